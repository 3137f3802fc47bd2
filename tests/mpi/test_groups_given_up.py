"""The next generation is given up, at any time: the old one is as it was, also where it had made room.

On the job of three_slots.py.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from four_ranks import WAIT_S, Background, device, end_for_peer, make_maker, new_store, wait_until, world
from three_slots import MOVED_SLOT, STAYERS, Process, prepare, start_job, swap
from tiny_jobs import shared_groups

from migration.errors import MoveFailed

pytestmark = pytest.mark.fast


@pytest.fixture
def process() -> Iterator[Process]:
    with start_job() as made:
        yield made


def expect_the_old_generation(process: Process) -> None:
    """After `discard`: the joiner, rank 3, leaves; for the others everything is as before."""
    if world().rank == 3:
        process.close()
    else:
        process.check_sums()
        wait_until(lambda: process.groups.num_communicators == 4, "what was prepared to close")


def test_a_member_that_never_comes(process: Process) -> None:
    """Dropping the store ends every wait on it, long before the deadline, and the old generation is as it was."""
    rank = world().rank
    server, store = new_store()
    preparing = prepare(process, 1, store) if rank in STAYERS else None  # rank 3 doesn't come
    process.check_sums()
    world().barrier()
    if rank in STAYERS:
        assert preparing.is_alive()
    world().barrier()
    del server
    if preparing is not None:
        preparing.join(WAIT_S / 2)
        assert not preparing.is_alive() and isinstance(preparing.error, RuntimeError), repr(preparing.error)
        process.groups.discard()
        wait_until(lambda: process.groups.num_communicators == 4, "what was prepared to close")
    process.check_sums()
    swap(process, 1, 3, 2)  # and the next try works
    process.check_sums()


def test_an_abort_at_the_boundary(process: Process) -> None:
    """Prepared and activated by all, then the verdict is to go on as before."""
    rank = world().rank
    server, store = new_store()
    if rank == 3:
        process.open(MOVED_SLOT)
    if rank != 1:
        prepare(process, 1, store).outcome()
        process.groups.activate()
        process.groups.resume((MOVED_SLOT,))
        process.groups.discard()
    expect_the_old_generation(process)
    world().barrier()
    del server


@pytest.mark.parametrize("switch", ["parked", "lazy"])
def test_old_ones_make_room_and_come_back(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """By each policy: prepared, room made, activated, then back; handles refuse everything between. Then a commit."""
    monkeypatch.setattr(shared_groups(), "_maker", make_maker(switch, allow_lazy=True))
    with start_job() as process:
        rank, groups, moved = world().rank, process.groups, (MOVED_SLOT,)
        server, store = new_store()
        if rank == 3:
            process.open(MOVED_SLOT)
        if rank == 1:
            groups.learn_switches(1, store, moved, WAIT_S)
        else:
            prepare(process, 1, store).outcome()
        world().barrier()  # until then the store is needed
        assert groups.room(moved) == switch
        old = {handle: handle.inner for handle in process.handles.values()}
        groups.park(moved)
        if rank != 1:
            groups.activate()
        if rank != 3:
            away = {slots for slots, handle in process.handles.items() if handle.inner is not old[handle]}
            assert away == {slots for slots in process.handles if MOVED_SLOT in slots and len(slots) > 1}
            with pytest.raises(RuntimeError, match=r"no allreduce now: g0/.* has made room"):
                dist.all_reduce(torch.zeros(1, device=device()), group=process.handles[0, 1, 2])
        server, store = new_store()
        rebuilt = groups.resume(moved, ("127.0.0.1", store.port), WAIT_S)
        world().barrier()  # a probe may still be under way elsewhere
        groups.discard()
        expected = {"parked": (0, 0), "lazy": {0: (2, 0), 1: (1, 0), 2: (0, 0), 3: (0, 0)}[rank]}[switch]
        assert rebuilt == expected, "each group by its first member, and sums keep their bits"
        if rank == 3:
            process.close()
        else:
            process.check_sums()
            assert all((handle.inner is inner) is (switch == "parked" or handle.size() == 1 or MOVED_SLOT
                                                   not in handle.slots) for handle, inner in old.items())
            wait_until(lambda: groups.num_communicators == 4, "what was prepared to close")
        swap(process, 1, 3, 2)
        if process.slot is not None:
            process.check_sums()
            wait_until(lambda: groups.num_communicators == 4, "the old generation to close")
        world().barrier()
        del server


@pytest.mark.parametrize("switch", ["connected", "lazy"])
def test_without_leave_nothing_is_closed_before_the_commit(monkeypatch: pytest.MonkeyPatch, process: Process,
                                                           switch: str) -> None:
    monkeypatch.setattr(process.groups, "_maker", make_maker(switch))
    server, store = new_store()
    if world().rank == 3:
        process.open(MOVED_SLOT)
    if world().rank != 1:
        preparing = prepare(process, 1, store)
        if switch == "connected":
            preparing.outcome()
        else:
            with pytest.raises(MoveFailed, match="closed before the commit .*--allow-lazy"):
                preparing.outcome()
    world().barrier()  # a probe may still be under way elsewhere
    process.groups.discard()
    expect_the_old_generation(process)
    world().barrier()
    del server


def test_nothing_is_prepared_after_an_abort(process: Process) -> None:
    """An abort may come between two groups: the next one is refused, also one that no abort could reach."""
    server, store = new_store()
    if world().rank in STAYERS:
        process.groups.abort_next()
        with pytest.raises(MoveFailed, match="was aborted before it was prepared"):
            prepare(process, 1, store).outcome()
        process.groups.discard()
        assert process.groups.num_communicators == 4
    world().barrier()
    del server
    swap(process, 1, 3, 2)
    process.check_sums()


def test_an_abort_ends_what_is_under_way(process: Process) -> None:
    """Of a pair, from another thread: at the side that aborts and at its peer, but nowhere else."""
    rank = world().rank
    server, store = new_store()
    if rank in (0, 1):
        pair = process.groups.make_pair("pair", rank)
        process.groups.prepare_pair(pair, store, WAIT_S, 2 * WAIT_S)
        tensors = [torch.zeros(length, device=device()) for length in (4, 4, 1 << 20)]
        calls = (pair.inner.recv, pair.inner.recv, pair.inner.send)
        # Gloo tells them apart by a tag; NCCL by their order, and there a time limit is in its place
        lasts = (0, 1, 2) if device().type == "cpu" else (2 * WAIT_S,) * 3
        operations = [Background(call([tensor], 1 - rank, last).wait)
                      for call, tensor, last in zip(calls, tensors, lasts, strict=True)]
        assert all(operation.is_alive() for operation in operations), "neither side has what the other waits for"
    world().barrier()
    if rank == 0:
        pair.abort()
        pair.abort()
    if rank == 1:
        end_for_peer(pair)
    if rank in (0, 1):
        for operation in operations:
            with pytest.raises(RuntimeError):
                operation.outcome()
        process.groups.release_pair(pair)
        del pair, operations
    if process.slot is not None:
        process.check_sums()
        wait_until(lambda: process.groups.num_communicators == 4, "the pair to close")
    world().barrier()
    del server
