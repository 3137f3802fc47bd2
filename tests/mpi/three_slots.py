"""A job of three slots, held by ranks 0, 1 and 2 at first; rank 3 is the spare. Slot 1 moves between ranks 1 and 3.

Only process groups: no model, so that a test can look at each communicator.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from four_ranks import WAIT_S, Background, new_store, wait_until, world
from tiny_jobs import shared_groups

from migration import usage
from migration.groups import Groups

JOB_SIZE, MOVED_SLOT = 3, 1
STAYERS = (0, 2)
SETS = ((0, 1), (0, 2), (1, 2), (0,), (1,), (2,))  # of slots; (0, 2) stays as it is when slot 1 moves


@dataclass(slots=True, kw_only=True)
class Process:
    """What one rank knows of the job: its slot if it has one, and its handles by the slots in them."""

    groups: Groups
    slot: int | None
    handles: dict[tuple[int, ...], dist.ProcessGroup]

    def open(self, slot: int) -> None:
        """Handles only, in a sandbox."""
        self.groups.open(slot, JOB_SIZE)
        self.slot = slot
        self.handles = {slots: dist.new_group(list(slots)) for slots in SETS}
        self.handles = {slots: handle for slots, handle in self.handles.items() if slot in slots}
        self.handles[0, 1, 2] = dist.group.WORLD

    def close(self) -> None:
        self.handles.clear()
        self.groups.close()
        self.slot = None

    def sums(self) -> dict[tuple[int, ...], float]:
        """An all-reduce on each handle, of 10 to the power of the slot. Collective over the job."""
        found = {}
        for slots in sorted(self.handles):
            tensor = torch.tensor([10.0 ** self.slot], device=self.groups.device)
            dist.all_reduce(tensor, group=self.handles[slots])
            found[slots] = tensor.item()
        return found

    def check_sums(self) -> None:
        """Collective over the job; a process without a slot only passes."""
        if self.slot is not None:
            assert self.sums() == {slots: sum(10.0 ** slot for slot in slots) for slots in self.handles}


@contextmanager
def start_job() -> Iterator[Process]:
    """A job in generation 0 on ranks 0 to 2; rank 3 holds nothing. All its groups are connected."""
    groups = shared_groups()
    groups.used = None  # of another job
    made = Process(groups=groups, slot=None, handles={})
    server, store = new_store()
    if world().rank < JOB_SIZE:
        made.open(world().rank)
        groups.prepare(0, store, range(JOB_SIZE), WAIT_S)
        groups.activate()
        groups.adopt()
    world().barrier()
    del server
    yield made
    if made.slot is not None:
        made.close()
    wait_until(lambda: groups.num_communicators <= 1, "communicators of the last test to close")  # one for groups of 1


def prepare(process: Process, generation: int, store: dist.Store, used: frozenset[str] | None = None) -> Background:
    return Background(lambda: process.groups.prepare(generation, store, (MOVED_SLOT,), WAIT_S, used=used))


def swap(process: Process, leaver: int, joiner: int, generation: int) -> tuple[int, int] | None:
    """Slot 1 goes from `leaver` to `joiner`. Collective over the world. Returns (rebuilt, kept) but for the leaver."""
    rank = world().rank
    server, store = new_store()
    if rank == joiner:
        process.open(MOVED_SLOT)
    else:
        usage.tell(store, process.slot, process.groups.used)
    counts = None
    if rank == leaver:
        process.groups.learn_switches(generation, store, (MOVED_SLOT,), WAIT_S)
    else:
        prepare(process, generation, store, usage.ask(store, range(JOB_SIZE), WAIT_S)).outcome()
    process.groups.park((MOVED_SLOT,))
    if rank != leaver:
        process.groups.activate()
        counts = process.groups.adopt()
    world().barrier()
    if rank == leaver:
        process.close()
    else:
        process.groups.retire()
    del server
    return counts
