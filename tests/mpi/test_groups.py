"""The life of process groups: opened without peers, connected, replaced beside training, closed.

On the job of three_slots.py. Generations that are given up are in test_groups_given_up.py.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from four_ranks import (Background, build_generation, count_resources, device, is_flat, new_store, thread_names,
                        wait_until, world)
from three_slots import JOB_SIZE, MOVED_SLOT, STAYERS, Process, prepare, start_job, swap

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


def test_sums_of_a_slot_have_one_digest_whoever_holds_it(process: Process) -> None:
    assert process.groups.sums_digest() == "", "nobody knows yet what is used"
    process.check_sums()
    if process.slot is not None:
        process.groups.learn_used(lambda: None)
    before = world().allgather((process.slot, process.groups.sums_digest()))
    swap(process, 1, 3, 1)
    after = world().allgather((process.slot, process.groups.sums_digest()))
    assert after[3] == before[1] and after[0] == before[0] and after[2] == before[2]
    assert len({digest for _, digest in before}) == 4, "the groups of each slot are others, and rank 3 has none"


def test_ten_swaps_leave_nothing_behind(process: Process) -> None:
    """Rank 1 and rank 3 take slot 1 in turn; after each, nobody holds more than after the first ones."""
    history: list[dict[str, int]] = []
    for i in range(NUM_SWAPS):
        leaver, joiner = ((1, 3), (3, 1))[i % 2]
        swap(process, leaver, joiner, 1 + i)
        expected = 4 if process.slot is not None else 1
        wait_until(lambda: process.groups.num_communicators == expected, f"communicators of swap {i} to close")
        world().barrier()
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
