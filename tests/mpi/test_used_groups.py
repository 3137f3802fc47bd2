"""Only groups that training uses are connected, and only old ones beside which a new one comes make room.

On the job of three_slots.py, and on a smaller one of which every slot moves.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from four_ranks import WAIT_S, Background, device, make_maker, new_store, wait_until, world
from three_slots import JOB_SIZE, Process, swap
from tiny_jobs import shared_groups

pytestmark = pytest.mark.fast

WHOLE, PAIR = (0, 1, 2), (0, 2)


def connected(process: Process) -> set[tuple[int, ...]]:
    """By the slots in them; those of NCCL alone can be ready without being connected."""
    live = process.groups._live
    return {slots for slots, handle in process.handles.items()
            if len(slots) > 1 and (device().type == "cpu" or live[handle.name].is_connected)}


def expect(process: Process, used: set[tuple[int, ...]]) -> None:
    found = connected(process)
    own = {slots for slots in process.handles if len(slots) > 1}
    assert found == (own if device().type == "cpu" else own & used), (process.slot, found)
    probed = {slots for slots in own if process.groups._live[process.handles[slots].name].probe_digest}
    assert probed == own & used, (process.slot, probed)


@contextmanager
def begun_job() -> Iterator[Process]:
    """As `start_job`, but begun as a run is."""
    process = Process(groups=shared_groups(), slot=None, handles={})
    process.groups.used = None
    if world().rank < JOB_SIZE:
        process.open(world().rank)
    begin(process, 0)
    yield process
    if process.slot is not None:
        process.close()
    wait_until(lambda: process.groups.num_communicators <= 1, "communicators to close")
    world().barrier()


def begin(process: Process, generation: int) -> None:
    server, store = new_store()
    if process.slot is not None:
        process.groups.begin(generation, store, process.slot, WAIT_S)
    world().barrier()
    del server


def use(process: Process) -> None:
    """The whole job's group, and slots 0 and 2 their pair."""
    if process.slot is not None:
        process.groups.forget_use()
        for slots in (WHOLE, *(PAIR,) * (process.slot in PAIR)):
            dist.all_reduce(torch.zeros(1, device=device()), group=process.handles[slots])


def test_the_first_iteration_tells_what_is_used_and_a_joiner_learns_it() -> None:
    """Slot 1 takes no part in the pair's sums, and its process learns of them all the same; so does its joiner."""
    with begun_job() as process:
        groups = process.groups
        assert groups.used is None and groups.sums_digest() == ""
        if process.slot is not None:
            expect(process, set())
            process.check_sums()  # on whatever is used NCCL connects by itself
        use(process)
        if process.slot is not None:
            groups.learn_used(lambda: None)
            expect(process, {WHOLE, PAIR})
        used = names_used(process)
        assert groups.used == (used if process.slot is not None else None)
        sums = world().allgather(groups.sums_digest())
        swap(process, 1, 3, 1)
        assert groups.used == used
        if process.slot is not None:
            assert groups.sums_digest() == sums[process.slot]
            expect(process, {WHOLE, PAIR})
            process.check_sums()
            wait_until(lambda: groups.num_communicators == 4, "the old generation to close")
        world().barrier()


def test_a_generation_after_a_loss_begins_with_what_the_survivors_know() -> None:
    """Rank 1 is lost, and rank 3, which was a spare, begins with its slot."""
    with begun_job() as process:
        groups = process.groups
        use(process)
        if process.slot is not None:
            groups.learn_used(lambda: None)
        used, sums = names_used(process), world().allgather(groups.sums_digest())
        slot = {0: 0, 2: 2, 3: 1}.get(world().rank)
        if process.slot is not None:
            process.close()
        if slot is not None:
            process.open(slot)
        begin(process, 1)
        if process.slot is not None:
            assert groups.used == used
            expect(process, {WHOLE, PAIR})
            assert groups.sums_digest() == sums[process.slot], "known before the first iteration"
            process.check_sums()


def test_an_abort_while_it_is_learned_leaves_what_was_known() -> None:
    class Aborted(Exception):
        pass

    def aborted() -> None:
        raise Aborted

    with begun_job() as process:
        use(process)
        if process.slot is not None:
            with pytest.raises(Aborted):
                process.groups.learn_used(aborted)
            assert process.groups.used is None
        world().barrier()


def names_used(process: Process) -> frozenset[str]:
    """Of the groups in `use`. Collective over the world."""
    names = [process.handles[slots].name for slots in (WHOLE, PAIR)] if world().rank == 0 else None
    return frozenset(world().bcast(names, root=0))


@pytest.mark.parametrize("switch", ["parked", "lazy"])
def test_where_all_members_leave_no_old_one_makes_room(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """Ranks 0 and 1 give all of a job of two slots to ranks 2 and 3: no process has old and new ones."""
    groups, rank, slots = shared_groups(), world().rank, (0, 1)
    monkeypatch.setattr(groups, "_maker", make_maker(switch))  # without leave to close one
    groups.used = None
    process = Process(groups=groups, slot=rank % 2, handles={})
    groups.open(rank % 2, len(slots))
    process.handles = {slots: dist.group.WORLD}
    server, store = new_store()
    if rank in slots:
        groups.prepare(0, store, slots, WAIT_S)
        groups.activate()
        groups.adopt()
    world().barrier()
    if rank in slots:
        groups.learn_switches(1, store, slots, WAIT_S)
    else:
        Background(lambda: groups.prepare(1, store, slots, WAIT_S)).outcome()
    assert groups.room(slots) == ""
    groups.park(slots)
    if rank in slots:
        process.check_sums()
    if rank not in slots:
        groups.activate()
        groups.adopt()
        process.check_sums()
    world().barrier()
    process.close()
    wait_until(lambda: groups.num_communicators <= 1, "communicators to close")
    del server
