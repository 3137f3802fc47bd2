"""The life of process groups: opened without peers, connected, replaced beside training, given up, closed.

On the job of three_slots.py.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from four_ranks import (WAIT_S, Background, build_generation, count_resources, device, end_for_peer, is_flat,
                        make_maker, new_store, thread_names, wait_until, world)
from three_slots import JOB_SIZE, MOVED_SLOT, STAYERS, Process, prepare, start_job, swap
from tiny_jobs import shared_groups

from migration.errors import MoveFailed

pytestmark = pytest.mark.fast

NUM_SWAPS = 10
NUM_SETTLING = 4  # swaps after which what is made once has been made
_TAG = 7


@pytest.fixture
def process() -> Iterator[Process]:
    with start_job() as made:
        yield made


def test_handles_open_without_peers(process: Process) -> None:
    """A rank at a time: nobody else takes part, and everything works in the sandbox."""
    for rank in range(world().size):
        if rank == world().rank == 3:
            num_before = process.groups.num_communicators
            process.open(2)
            assert process.sums() == {slots: 100.0 for slots in process.handles}, "the own contribution"
            assert process.groups.num_communicators == num_before
            process.close()
        world().barrier()


def test_the_first_generation(process: Process) -> None:
    if process.slot is None:
        return
    process.check_sums()
    assert process.groups.num_communicators == 4, "the world, two pairs, and one for the groups of one"
    own = process.handles[process.slot,]
    assert own.inner is process.groups.handles[own.name].inner


def test_members_go_on_while_the_next_generation_is_prepared(process: Process) -> None:
    """The swap, step by step; ranks 0, 1 and 2 don't stop reducing on the old generation before it is prepared."""
    rank, comm = world().rank, world()
    server, store = new_store()
    kept, touched = process.handles.get((0, 2)), process.handles.get((0, 1, 2))
    before = {handle: handle.inner for handle in process.handles.values()}
    preparing = None
    if rank == 3:
        comm.recv(source=0, tag=_TAG)  # not before training has gone on for a while
        process.open(MOVED_SLOT)
        preparing = prepare(process, 1, store)
        assert isinstance(preparing.outcome(), str)
    elif rank in STAYERS:
        preparing = prepare(process, 1, store)
    num_beside = train_until_prepared(process, preparing) if rank != 3 else 0
    if rank in STAYERS:
        assert num_beside >= 5
        assert all(handle.inner is inner for handle, inner in before.items()), "changed before the commit"
        assert process.groups.num_communicators == 6, "old and new"
    counts = None
    if rank != 1:
        process.groups.activate()
        counts = process.groups.adopt()
    comm.barrier()
    if rank in STAYERS:
        assert kept.inner is before[kept], "an untouched group keeps its communicator"
        assert touched.inner is not before[touched]
        assert process.groups.num_communicators == 6, "the old ones wait for the end of the move"
        process.groups.retire()
        wait_until(lambda: process.groups.num_communicators == 4, "the old generation to close")
    if rank == 1:
        process.close()
    else:
        process.check_sums()
    totals = comm.allgather(counts)
    assert totals == [(2, 1), None, (0, 0), (1, 0)], "each group is counted by its first member"
    del server


def train_until_prepared(process: Process, preparing: Background | None) -> int:
    """Reduces on every handle until all stayers are prepared. Returns how often before that, on this rank.

    The end is agreed by the reduction itself, as ranks don't see each other's threads.
    """
    num_before = num_rounds = 0
    everybody_ready = False
    while not everybody_ready:
        ready = torch.tensor([float(preparing is None or not preparing.is_alive())], device=device())
        process.check_sums()
        num_before += not ready.item()
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        everybody_ready = bool(ready.item())
        num_rounds += 1
        if num_rounds == 5 and world().rank == 0:
            world().send(None, dest=3, tag=_TAG)
    if preparing is not None:
        preparing.outcome()
    return num_before


def test_a_member_that_never_comes(process: Process) -> None:
    """Dropping the store ends every wait on it, long before the deadline, and the old generation is as it was."""
    rank = world().rank
    server, store = new_store()
    preparing = prepare(process, 1, store) if rank in STAYERS else None  # rank 3 doesn't come
    if process.slot is not None:
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
    if process.slot is not None:
        process.check_sums()
    swap(process, 1, 3, 2)  # and the next try works
    if process.slot is not None:
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
    if rank == 3:
        process.close()
    else:
        process.check_sums()
        wait_until(lambda: process.groups.num_communicators == 4, "what was prepared to close")
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
    if world().rank == 3:
        process.close()
    else:
        process.check_sums()
        wait_until(lambda: process.groups.num_communicators == 4, "what was prepared to close")
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
    if process.slot is not None:
        process.check_sums()


def test_the_probe_sees_the_same_sums_in_the_next_generation(process: Process) -> None:
    server, store = new_store()
    live = process.groups.live_probe((MOVED_SLOT,)) if process.slot is not None else ""
    if world().rank == 3:
        process.open(MOVED_SLOT)
    # a probe connects: Gloo does it when it prepares, NCCL when it activates
    if world().rank == 1:
        new, live = "", live or process.groups.park((MOVED_SLOT,))
    else:
        prepared = prepare(process, 1, store).outcome()
        live = live or process.groups.park((MOVED_SLOT,))
        new = process.groups.activate() or prepared
    old = world().bcast(live, root=1)  # what the leaver saw, for the joiner
    if world().rank == 3:
        assert new == old and len(new.split()) == 3
    elif world().rank in STAYERS:
        assert new == live and len(new.split()) == 2
    process.groups.discard()
    if world().rank == 3:
        process.close()
    world().barrier()
    del server


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


def test_ten_swaps_leave_nothing_behind(process: Process) -> None:
    """Rank 1 and rank 3 take slot 1 in turn; after each, nobody holds more than after the first ones."""
    history: list[dict[str, int]] = []
    for i in range(NUM_SWAPS):
        leaver, joiner = ((1, 3), (3, 1))[i % 2]
        swap(process, leaver, joiner, 1 + i)
        expected = 4 if process.slot is not None else 1
        wait_until(lambda: process.groups.num_communicators == expected, f"communicators of swap {i} to close")
        world().barrier()
        if process.slot is not None:
            process.check_sums()
        world().barrier()
        if i < NUM_SETTLING:
            history.append(count_resources(process.groups))
        else:  # threads that have ended for Python are a moment longer there; who holds slot 1 alternates
            before = history[NUM_SETTLING - 2 + i % 2]
            wait_until(lambda: is_flat(count_resources(process.groups), before),
                       f"what swap {i} left behind to go: {count_resources(process.groups)}, before {before}")
        world().barrier()


def test_all_groups_share_one_gloo_thread(process: Process) -> None:
    """A thread for each group would wake up 100 times a second beside training."""
    if world().rank < JOB_SIZE:
        assert len([c for c in process.groups.communicators if len(c.slots) > 1]) > 1
    assert thread_names().count("gloo_tcp_loop") <= 1


def test_generation_by_generation_in_one_job(process: Process) -> None:
    """Every slot's group replaced, with the same members: handles keep their identity for Megatron."""
    if world().rank == 3:
        for generation in (1, 2):
            server, _ = new_store()
            world().barrier()
            del server
        return
    identity = dict(process.handles)
    for generation in (1, 2):
        inner = {slots: handle.inner for slots, handle in process.handles.items()}
        counts = build_generation(process.groups, generation, range(JOB_SIZE))
        process.groups.retire()
        assert process.handles == identity and counts[1] == 0
        assert all((process.handles[slots].inner is inner[slots]) == (len(slots) == 1) for slots in inner)
        process.check_sums()
