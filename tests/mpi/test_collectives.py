"""Every c10d call works on a handle, before its communicator is replaced and after.

Each is tried on the world and on a group of two of it, in the first generation and in one after a swap. What torch
built on a handle before the swap (DDP, a device mesh) must work after it too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from four_ranks import WAIT_S, build_generation, device, world
from tiny_jobs import shared_groups
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Call = Callable[[Any, int, int], None]


@pytest.fixture(scope="module", params=["first generation", "after a swap"])
def handles(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Handles of a job of four slots: the world, and the pair this slot is in; and objects built before the swap."""
    groups = shared_groups()
    groups.open(world().rank, 4)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    build_generation(groups, 0, range(4))
    found = {"world": dist.group.WORLD, "pair": pairs[world().rank % 2]}
    found |= {"mesh": DeviceMesh.from_group(found["world"], device().type), "model": make_model(found["pair"])}
    if request.param == "after a swap":
        before = [h.inner for h in groups.handles.values()]
        build_generation(groups, 1, range(4))
        assert all(h.inner is not old for h, old in zip(groups.handles.values(), before) if h.size() > 1)
        groups.retire()
    yield found
    found.clear()
    groups.close()


def make_model(group: Any) -> Any:
    torch.manual_seed(dist.get_rank())  # DDP makes the weights equal
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False, device=device()),
                                                     process_group=group)


def zeros(length: int) -> torch.Tensor:
    return torch.zeros(length, device=device())


def counted(length: int) -> torch.Tensor:
    """0, 1, 2, ..."""
    return torch.arange(length, device=device())


def own(rank: int) -> torch.Tensor:
    """What group rank `rank` contributes."""
    return torch.tensor([rank + 1.0, 10.0 * (rank + 1)], device=device())


def total(size: int) -> torch.Tensor:
    return sum(own(r) for r in range(size))


def everybodys(size: int) -> torch.Tensor:
    return torch.cat([own(r) for r in range(size)])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected), f"{found} instead of {expected}"


# ---- the calls; each gets the group, the own group rank, and the group's size

def all_reduce(group: Any, rank: int, size: int) -> None:
    tensor = own(rank)
    dist.all_reduce(tensor, group=group)
    check(tensor, total(size))


def all_reduce_max(group: Any, rank: int, size: int) -> None:
    tensor = own(rank)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    check(tensor, own(size - 1))


def asynchronous(group: Any, rank: int, size: int) -> None:
    tensors = [own(rank) * i for i in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for i, work in enumerate(works):
        assert work.wait()
        check(tensors[i], total(size) * i)
    assert all(work.is_completed() for work in works)


def broadcast(group: Any, rank: int, size: int) -> None:
    tensor = own(rank)
    dist.broadcast(tensor, group_src=1, group=group)
    check(tensor, own(1))


def reduce(group: Any, rank: int, size: int) -> None:
    tensor = own(rank)
    dist.reduce(tensor, group_dst=1, group=group)
    if rank == 1:
        check(tensor, total(size))


def all_gather(group: Any, rank: int, size: int) -> None:
    parts = [zeros(2) for _ in range(size)]
    dist.all_gather(parts, own(rank), group=group)
    check(torch.cat(parts), everybodys(size))


def all_gather_into_tensor(group: Any, rank: int, size: int) -> None:
    whole = zeros(2 * size)
    dist.all_gather_into_tensor(whole, own(rank), group=group)
    check(whole, everybodys(size))


def reduce_scatter(group: Any, rank: int, size: int) -> None:
    part = zeros(2)
    dist.reduce_scatter(part, [own(rank) * (r + 1) for r in range(size)], group=group)
    check(part, total(size) * (rank + 1))


def reduce_scatter_tensor(group: Any, rank: int, size: int) -> None:
    part = zeros(2)
    dist.reduce_scatter_tensor(part, torch.cat([own(rank) * (r + 1) for r in range(size)]), group=group)
    check(part, total(size) * (rank + 1))


def gather(group: Any, rank: int, size: int) -> None:
    parts = [zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(own(rank), parts, group_dst=0, group=group)
    if parts:
        check(torch.cat(parts), everybodys(size))


def scatter(group: Any, rank: int, size: int) -> None:
    part = zeros(2)
    dist.scatter(part, [own(r) for r in range(size)] if rank == 0 else None, group_src=0, group=group)
    check(part, own(rank))


def all_to_all_single(group: Any, rank: int, size: int) -> None:
    received = zeros(size)
    dist.all_to_all_single(received, counted(size) + 10.0 * rank, group=group)
    check(received, counted(size) * 10.0 + rank)


def send_recv(group: Any, rank: int, size: int) -> None:
    """Around the ring, one after the other."""
    tensor = zeros(2)
    if rank == 0:
        dist.send(own(rank), group_dst=1, group=group)
        dist.recv(tensor, group_src=size - 1, group=group)
        check(tensor, own(0))
    else:
        dist.recv(tensor, group_src=rank - 1, group=group)
        dist.send(tensor, group_dst=(rank + 1) % size, group=group)
        check(tensor, own(0))


def batch_isend_irecv(group: Any, rank: int, size: int) -> None:
    tensor = zeros(2)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, own(rank), group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=(rank - 1) % size)]):
        work.wait()
    check(tensor, own((rank - 1) % size))


def coalesced(group: Any, rank: int, size: int) -> None:
    """As Megatron's data-parallel wrapper does it for its buckets."""
    parts = [zeros(2), zeros(2)]
    wholes = [torch.cat([own(rank) * i] * size) for i in (1, 2)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for part, whole in zip(parts, wholes):
            dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
    manager.wait()
    for i, part in enumerate(parts, 1):
        check(part, total(size) * i)


def objects(group: Any, rank: int, size: int) -> None:
    said: list[Any] = [None] * size
    dist.all_gather_object(said, {"rank": rank}, group=group)
    assert said == [{"rank": r} for r in range(size)]
    one = [("from", rank)]
    dist.broadcast_object_list(one, group_src=1, group=group)
    assert one == [("from", 1)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 7, gathered, group_dst=0, group=group)
    assert gathered is None or gathered == [r * 7 for r in range(size)]


def barrier(group: Any, rank: int, size: int) -> None:
    dist.barrier(group)


def monitored_barrier(group: Any, rank: int, size: int) -> None:
    """On the handle: torch's own function asks for a backend of the name "gloo"."""
    if device().type != "cpu":
        pytest.skip("NCCL has no monitored barrier")
    group.monitored_barrier(timedelta(seconds=WAIT_S), wait_all_ranks=True)


def functional_collectives(group: Any, rank: int, size: int) -> None:
    check(functional.all_reduce(own(rank), "sum", group), total(size))
    check(functional.all_gather_tensor(own(rank), 0, group), everybodys(size))
    check(functional.reduce_scatter_tensor(torch.cat([own(rank)] * size), "sum", 0, group), total(size))


CALLS: tuple[Call, ...] = (
    all_reduce, all_reduce_max, asynchronous, broadcast, reduce, all_gather, all_gather_into_tensor, reduce_scatter,
    reduce_scatter_tensor, gather, scatter, all_to_all_single, send_recv, batch_isend_irecv, coalesced, objects,
    barrier, monitored_barrier, functional_collectives)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("which", ["world", "pair"])
def test_call(handles: dict[str, Any], which: str, call: Call) -> None:
    group = handles[which]
    call(group, dist.get_rank(group), dist.get_world_size(group))


def test_ddp_built_before_a_swap(handles: dict[str, Any]) -> None:
    model, rank = handles["model"], dist.get_rank()
    model.zero_grad()
    model(own(rank)[None]).sum().backward()
    check(model.module.weight.grad[0], (own(rank % 2) + own(rank % 2 + 2)) / 2)  # the mean over the pair


def test_device_mesh_built_before_a_swap(handles: dict[str, Any]) -> None:
    mesh, rank = handles["mesh"], dist.get_rank()
    shards = DTensor.from_local(own(rank), mesh, [Shard(0)])
    check(shards.full_tensor(), everybodys(4))
    check(shards.redistribute(mesh, [Replicate()]).to_local(), everybodys(4))
    assert shards.sum().full_tensor().item() == total(4).sum().item()


def test_a_handle_says_what_torch_asks(handles: dict[str, Any]) -> None:
    world_handle, pair = handles["world"], handles["pair"]
    assert dist.get_backend(world_handle) == "migratable"
    assert dist.get_process_group_ranks(pair) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert (pair.size(), pair.rank()) == (2, dist.get_rank() // 2)
    assert dist.distributed_c10d._resolve_process_group(pair.group_name) is pair
