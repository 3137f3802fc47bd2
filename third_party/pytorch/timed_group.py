"""A process group that measures how long its process waits in it. Only where stragglers are looked for.

Owns which of torch's calls wait: each collective, when it is called, and the work that it returns. Private names of
torch: those of process_group.py.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch._C._distributed_c10d import ProcessGroup, Work

from third_party.pytorch.process_group import COLLECTIVES, MigratableGroup


class Waits(Protocol):
    """Adds up waiting times: what is between `begin` and the `end` that gets its result."""

    def begin(self) -> Any: ...

    def end(self, begun: Any) -> None: ...


class TimedWork(Work):
    """A call under way; waiting for it is measured."""

    def __init__(self, real: Any, waits: Waits) -> None:
        super().__init__()
        self._real, self._waits = real, waits

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        begun = self._waits.begin()
        try:
            return self._real.wait(*args, **kwargs)
        finally:
            self._waits.end(begun)

    def synchronize(self) -> None:
        self._real.synchronize()

    def is_completed(self) -> bool:
        return self._real.is_completed()

    def is_success(self) -> bool:
        return self._real.is_success()

    def exception(self) -> Any:
        return self._real.exception()

    def result(self) -> Any:
        return self._real.result()

    def get_future(self) -> Any:
        return self._real.get_future()


class TimedGroup(MigratableGroup):
    """A handle like the others."""

    def __init__(self, name: str, group_rank: int, slots: tuple[int, ...], waits: Waits) -> None:
        super().__init__(name, group_rank, slots)
        self.waits = waits


def _timed(name: str) -> Callable[..., Any]:
    def call(self: TimedGroup, *args: Any, **kwargs: Any) -> Any:
        self.is_used = True
        begun = self.waits.begin()
        try:
            work = getattr(self.inner, name)(*args, **kwargs)
        finally:
            self.waits.end(begun)
        return None if work is None else TimedWork(work, self.waits)
    return call


for _name in (*COLLECTIVES, "_end_coalescing"):
    if hasattr(ProcessGroup, _name):
        setattr(TimedGroup, _name, _timed(_name))
