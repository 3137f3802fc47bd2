"""Only groups that training uses are connected, and only old ones beside which a new one comes make room.

On the job of three_slots.py, and on a smaller one of which every slot moves.
"""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from four_ranks import WAIT_S, Background, device, make_maker, new_store, wait_until, world
from three_slots import Process, start_job, swap
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


def test_the_first_iteration_tells_what_is_used_and_a_joiner_learns_it() -> None:
    """Slot 1 takes no part in the pair's sums, and its process learns of them all the same; so does its joiner."""
    with start_job(used=frozenset()) as process:
        groups = process.groups
        if process.slot is not None:
            expect(process, set())
            process.check_sums()  # on whatever is used NCCL connects by itself
            groups.forget_use()
            if process.slot in PAIR:
                dist.all_reduce(torch.zeros(1, device=device()), group=process.handles[PAIR])
            dist.all_reduce(torch.zeros(1, device=device()), group=process.handles[WHOLE])
            groups.learn_used(lambda: None)
            expect(process, {WHOLE, PAIR})
            assert all(groups._live[process.handles[slots].name].probe_digest for slots in connected(process))
        names = {slots: process.handles[slots].name for slots in (WHOLE, PAIR)} if process.slot in PAIR else None
        used = frozenset(world().bcast(names, root=0).values())
        assert groups.used == (used if process.slot is not None else None)
        swap(process, 1, 3, 1)
        assert groups.used == used
        if process.slot is not None:
            expect(process, {WHOLE, PAIR})
            process.check_sums()
            wait_until(lambda: groups.num_communicators == 4, "the old generation to close")
        world().barrier()


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
