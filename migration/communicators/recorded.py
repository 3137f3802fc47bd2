"""What stands in a handle's place while an iteration is recorded, and while it is replayed.

Owns how torch's calls are read: which tensors come back, and when they hold the result. A `RecordingGroup` forwards
each call to the real group and notes it; a `ReplayGroup` gives the recorded answers, or forwards to a real group whose
members are all at the same iteration. Neither makes nor frees a communicator.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from migration.communicators.sandbox import FinishedWork, SandboxGroup
from migration.recording import Call, Recorder, Replay, fill
from third_party.pytorch.process_group import COLLECTIVES, MigratableGroup

_WITHOUT_RESULT = ("send", "barrier", "monitored_barrier")  # of all others the first argument is what comes back


def read_call(handle: MigratableGroup, operation: str, args: tuple[Any, ...]) -> Call:
    """The call as it is recorded and compared."""
    given = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(args)]
    for argument in args:
        if isinstance(argument, int):  # the peer and the tag
            given.append(str(argument))
        if hasattr(argument, "reduceOp"):
            given.append(str(argument.reduceOp.op))
        if hasattr(argument, "rootRank"):
            given.append(f"root {argument.rootRank}")
    return Call(group=handle.name, slots=handle.slots, operation=operation, given=tuple(given))


def results_of(operation: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that hold what the call brings, once it is done."""
    return [] if operation in _WITHOUT_RESULT else list(_tensors(args[:1]))


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if torch.is_tensor(argument):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


class _RecordedWork(Work):
    """A call under way; once waited for, its results are taken down."""

    def __init__(self, real: Any, when_done: Callable[[], None]) -> None:
        super().__init__()
        self._real, self._when_done = real, when_done

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        result = self._real.wait(*args, **kwargs)
        self._when_done()
        self._when_done = _nothing
        return result

    def is_completed(self) -> bool:
        return self._real.is_completed()

    def is_success(self) -> bool:
        return self._real.is_success()


def _nothing() -> None:
    """Results were taken down by an earlier wait."""


class RecordingGroup:
    """Forwards every call of `handle` to `real` and notes it in `recorder`. Method names are torch's."""

    def __init__(self, handle: MigratableGroup, real: Any, recorder: Recorder) -> None:
        self._handle, self._real, self._recorder = handle, real, recorder
        self._batch: list[tuple[int, list[torch.Tensor]]] | None = None  # calls that end together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # whatever is no collective

    def _record(self, operation: str, args: tuple[Any, ...]) -> Any:
        number = self._recorder.begin(read_call(self._handle, operation, args))
        results = results_of(operation, args)
        work = getattr(self._real, operation)(*args)
        if not results:
            self._recorder.keep(number, ())
            return work
        if self._batch is not None:
            self._batch.append((number, results))
            return work
        return self._recorded_work(work, lambda: self._recorder.keep(number, results))

    def _recorded_work(self, work: Any, when_done: Callable[[], None]) -> Any:
        if work is None:  # NCCL's answer to a call that the current stream waits for anyway
            when_done()
            return None
        return _RecordedWork(work, when_done)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []
        self._real._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch, None
        assert batch is not None, f"{self._handle.name}: a batch ends that never began"

        def keep_all() -> None:
            for number, results in batch:
                self._recorder.keep(number, results)

        return self._recorded_work(self._real._end_coalescing(device), keep_all)


class ReplayGroup(SandboxGroup):
    """Answers the calls of `handle` from `replay`; with `real`, that group does, after the call has been compared."""

    def __init__(self, handle: MigratableGroup, replay: Replay, real: Any = None) -> None:
        super().__init__(handle.rank(), handle.size())
        self._handle, self._replay, self._real = handle, replay, real

    def _answer(self, operation: str, args: tuple[Any, ...]) -> Any:
        answers = self._replay.check(read_call(self._handle, operation, args))
        if self._real is not None:
            return getattr(self._real, operation)(*args)
        for tensor, answer in zip(results_of(operation, args), answers, strict=True):
            fill(tensor, answer)
        return FinishedWork()

    def _get_backend(self, device: torch.device) -> Any:
        return self if self._real is None else self._real._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if self._real is not None:
            self._real._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        return FinishedWork() if self._real is None else self._real._end_coalescing(device)


def _recorded(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self._record(operation, args)


def _replayed(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self._answer(operation, args)


for _name in COLLECTIVES:
    setattr(RecordingGroup, _name, _recorded(_name))
    setattr(ReplayGroup, _name, _replayed(_name))
