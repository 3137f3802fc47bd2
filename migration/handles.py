"""What Megatron-Core gets when it asks torch for process groups: handles that keep their identity over generations.

Owns the handles of this process and their order, which is one on all members. They begin in a sandbox. Knows no
communicator of a generation: groups.py puts these inside.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist

from migration.communicators.sandbox import SandboxCommunicator
from third_party.pytorch import process_group as wiring
from third_party.pytorch.timed_group import TimedGroup, Waits


class Handles:
    """One object in a process, since torch keeps a backend's creator for ever."""

    def __init__(self) -> None:
        self.waits: Waits | None = None  # where it is measured how long this process waits in its groups
        self.handles: dict[str, wiring.MigratableGroup] = {}
        wiring.register(self._create_handle)

    def _create_handle(self, name: str, group_rank: int, slots: tuple[int, ...]) -> wiring.MigratableGroup:
        handle = (wiring.MigratableGroup(name, group_rank, slots) if self.waits is None
                  else TimedGroup(name, group_rank, slots, self.waits))
        communicator = SandboxCommunicator(name, slots, group_rank)
        communicator.prepare()
        handle.inner = communicator.inner
        self.handles[name] = handle
        return handle

    def open(self, slot: int, job_size: int) -> None:
        """Make torch's world as `slot` of `job_size`: handles only, in a sandbox. Nobody else is needed."""
        assert not self.handles, "the handles of another slot are still open"
        dist.init_process_group(wiring.BACKEND, store=dist.HashStore(), rank=slot, world_size=job_size)

    def touched(self, slots: Iterable[int]) -> list[wiring.MigratableGroup]:
        """Handles of more than one slot with a member in `slots`, in the order that is one on all members."""
        wanted = set(slots)
        found = [h for h in self.handles.values() if h.size() > 1 and wanted.intersection(h.slots)]
        return sorted(found, key=lambda h: place(h.name))

    def within(self, slots: Iterable[int]) -> list[str]:
        """Names of the groups of several slots that have no member outside `slots`, in the order of `touched`."""
        wanted = set(slots)
        return [h.name for h in self.touched(wanted) if wanted.issuperset(h.slots)]

    def replace(self, make: Callable[[wiring.MigratableGroup], Any]) -> Callable[[], None]:
        """From now on every handle of several slots forwards to what `make` gives for it; returns what undoes that.

        By the training thread, with no operation outstanding, now and when it is undone. A handle that a commit has
        pointed elsewhere meanwhile stays as it is.
        """
        changed = []
        for handle in [h for h in self.handles.values() if h.size() > 1]:
            before, handle.inner = handle.inner, make(handle)
            changed.append((handle, before, handle.inner))

        def undo() -> None:
            for handle, before, inner in changed:
                if handle.inner is inner:
                    handle.inner = before

        return undo

    @contextlib.contextmanager
    def replaced(self, make: Callable[[wiring.MigratableGroup], Any]) -> Iterator[None]:
        """The same, for a block."""
        undo = self.replace(make)
        try:
            yield
        finally:
            undo()

    def description(self, name: str) -> str:
        """What Megatron calls the group that torch calls `name`."""
        return self.handles[name].description if name in self.handles else ""

    def isolate(self) -> None:
        """From now on this process's groups answer by themselves, without peers, as while they are being opened."""
        for handle in self.handles.values():
            communicator = SandboxCommunicator(handle.name, handle.slots, handle.rank())
            communicator.prepare()
            handle.inner = communicator.inner


def place(group_name: str) -> tuple[int, str]:
    """The key of the order that is one on all members: torch's names are running numbers."""
    return len(group_name), group_name
