"""A shadow iteration needs no peer: whatever the slot and its options, it ends at once, finite, with nothing open."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_jobs import open_job, shared_groups, tiny_config

from migration import state
from migration.job import Job

# name: (slot, changes to the tiny Config). Slot order is tp, dp, pp: of 2 x 2 stages, slots 0 and 1 are the first.
CASES = {
    "first stage": (0, {"pp": 2}),
    "middle stage": (1, {"pp": 3, "num_layers": 3}),
    "last stage": (1, {"pp": 2}),
    "first stage, interleaved": (0, {"pp": 2, "vpp": 2, "num_layers": 4}),
    "last stage, interleaved": (1, {"pp": 2, "vpp": 2, "num_layers": 4}),
    "tensor parallel": (1, {"tp": 2}),
    "sequence parallel": (1, {"tp": 2, "sequence_parallel": True}),
    "untied embeddings": (1, {"pp": 2, "tied_embeddings": False}),
    "recompute": (0, {"dp": 2, "recompute": True}),
    **{f"{'distributed' if distributed else 'plain'}, {dtype}, overlap of {overlap}": (
        1, {"dp": 2, "dtype": dtype, "distributed_optimizer": distributed,
            "overlap_grad_reduce": overlap != "nothing", "overlap_param_gather": overlap == "both"})
       for distributed in (False, True) for dtype in ("fp32", "bf16", "fp16")
       for overlap in ("nothing", "gradients", "both") if distributed or overlap != "both"},
    "everything at once": (7, {"tp": 2, "pp": 2, "dp": 2, "vpp": 2, "num_layers": 4, "sequence_parallel": True,
                               "overlap_grad_reduce": True, "overlap_param_gather": True, "recompute": True}),
}


@pytest.mark.parametrize("slot, changes", CASES.values(), ids=CASES)
def test_a_shadow_iteration(slot: int, changes: dict[str, object]) -> None:
    with open_job(tiny_config(**changes), slot) as job:
        checks = [chunk.ddp_config.check_for_nan_in_grad for chunk in job.chunks]
        for _ in range(2):  # the first iteration is special to the overlapped reduction
            job.run_shadow_iteration()
            job.check_drained()
        assert [chunk.ddp_config.check_for_nan_in_grad for chunk in job.chunks] == checks
        assert job.iteration == 2
        if job.is_last_stage:
            assert math.isfinite(job.history.loss_sum) and job.history.num_losses == 2
        assert_finite(job)
        assert job.groups.num_communicators == 0, "a sandbox is no communicator"


def assert_finite(job: Job) -> None:
    for kind, named in state.capture(job).tensors.items():
        for name, tensor in named.items():
            assert bool(tensor.isfinite().all()), f"{kind} {name}"


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A world of four slots of which this process is slot 2, all alone."""
    groups = shared_groups()
    groups.open(2, 4)
    yield dist.group.WORLD
    groups.close()


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


OWN = torch.tensor([5.0, 6.0])
WHOLE = torch.arange(8.0)
COALESCED = {
    "all_gather_into_tensor": lambda out, group: dist.all_gather_into_tensor(out, OWN.clone(), group=group),
    "reduce_scatter_tensor": lambda out, group: dist.reduce_scatter_tensor(out[:2], WHOLE.clone(), group=group),
}


def test_reductions_keep_the_own_contribution(world: dist.ProcessGroup) -> None:
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.reduce(t, 1)):
        tensor = OWN.clone()
        call(tensor)
        assert torch.equal(tensor, OWN)
    out = nan(2)
    dist.reduce_scatter_tensor(out, WHOLE.clone())
    assert torch.equal(out, WHOLE[4:6]), "its own part"


def test_gathers_repeat_the_own_contribution(world: dist.ProcessGroup) -> None:
    parts, out = [nan(2) for _ in range(4)], nan(8)
    dist.all_gather(parts, OWN)
    dist.all_gather_into_tensor(out, OWN)
    assert all(torch.equal(part, OWN) for part in parts) and torch.equal(out, OWN.repeat(4))
    in_place = WHOLE.clone()
    dist.all_gather_into_tensor(in_place, in_place[4:6])
    assert torch.equal(in_place, WHOLE[4:6].repeat(4)), "the source lies within the output"


def test_receives_give_zeros(world: dist.ProcessGroup) -> None:
    received, exchanged = nan(3), nan(8)
    dist.send(OWN, 3)
    dist.recv(received, 1)
    dist.all_to_all_single(exchanged, WHOLE.clone())
    assert not received.any() and not exchanged.any()
    batch = nan(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, OWN, 3), dist.P2POp(dist.irecv, batch, 1)]):
        work.wait()
    assert not batch.any()


def test_work_is_done_when_it_begins(world: dist.ProcessGroup) -> None:
    work = dist.all_reduce(OWN.clone(), async_op=True)
    assert work.is_completed() and work.wait()
    dist.barrier()


@pytest.mark.parametrize("call", COALESCED.values(), ids=COALESCED)
def test_coalesced(world: dist.ProcessGroup, call: Callable[..., object]) -> None:
    outputs = [nan(8), nan(8)]
    with dist._coalescing_manager(world, async_ops=True) as manager:
        for out in outputs:
            call(out, world)
    manager.wait()
    assert all(bool(out[:2].isfinite().all()) for out in outputs)
