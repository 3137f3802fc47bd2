"""What every communicator can do, who calls it and when. Owns no communicator; knows nothing of moves.

The life of one, in the words of the project:

| call | when | by which thread | collective |
| --- | --- | --- | --- |
| `prepare` | PREPARING, beside training | the prepare thread | over the members: returns when all have come |
| `probe` | PREPARING, after `prepare` | the prepare thread | over the members |
| `connect_ahead` | READY, at a boundary before the pause | the training thread | over the members |
| `activate` | at the boundary, before the verdict | the training thread | over the members, where it connects |
| `park` / `resume` | old one: at the boundary / when the move aborts | the training thread | over the members |
| `rebuild` | when the move aborts, if `park` had to close it (`lazy`) | the training thread | over the members |
| `abort` | any time, from another thread: an operation under way ends with an error | control thread | no |
| `close` | after the commit (the old one) or an abort (the new one) | the background thread | no |
"""
from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from migration.errors import MoveFailed

OPERATION_TIMEOUT_S = 1800.0  # of a collective in training: an iteration may be long, a lost peer is noticed earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage took: seconds, and bytes that the device lost meanwhile (to whomever), negative for a gain."""

    seconds: float
    device_bytes: int


class Communicator(ABC):
    """The members of one process group, connected or about to be. `inner` is what a handle forwards to."""

    probes_when_prepared = True  # if training uses it; False where a probe would connect: then it comes with `activate`

    def __init__(self, name: str, slots: tuple[int, ...], group_rank: int) -> None:
        self.name = name
        self.slots = slots
        self.group_rank = group_rank
        self.inner: Any = None
        self.probe_digest = ""
        self.work_s = 0.0  # of stage 1, what training may feel: without the wait for members that come later
        self.costs: dict[str, StageCost] = {}  # of each stage, the last time
        self._untold: list[tuple[str, StageCost]] = []
        self.connects = True  # and is probed; else NCCL connects when the group is first used, if ever
        self.switch = ""  # how an old one makes room for a new one: connected (it needn't), parked, lazy (it is closed)

    @abstractmethod
    def prepare(self, store: dist.Store, timeout_s: float, operation_timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        """Stage 1. Collective over the members. Raises RuntimeError when one doesn't come in `timeout_s`.

        A later operation on it raises after `operation_timeout_s`.
        """

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has come to its end."""
        return self.inner is not None

    @property
    def is_connected(self) -> bool:
        """Whether it was connected before its first use; it may be parked now."""
        return True

    @property
    def connects_ahead(self) -> bool:
        """Whether there is something to connect, and it may be done before the pause."""
        return False

    @property
    def has_room_ahead(self) -> bool:
        """Whether this device has the memory for it now, beside the old ones."""
        return True

    def connect_ahead(self, device: torch.device) -> None:
        """Stage 2 ahead of the pause, and `probe`. One that is parked is parked again: only one at a time takes room.

        By the training thread. Collective over the members.
        """
        self.activate_and_probe(device)

    def activate_and_probe(self, device: torch.device) -> None:
        """`activate`, and `probe` unless that was done, if training uses it. Collective over the members then."""
        self.activate()
        if self.connects and not self.probe_digest:
            self.probe(device)

    @abstractmethod
    def activate(self) -> None:
        """Stage 2: afterwards the first collective costs what every later one costs."""

    @abstractmethod
    def park(self) -> None:
        """Give back what an idle communicator holds, so that it can still be resumed."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `park`."""

    @property
    def needs_rebuild(self) -> bool:
        """Whether `park` has closed it, so that `resume` can't bring it back."""
        return False

    def rebuild(self, store: dist.Store, timeout_s: float) -> None:
        """Make it anew after `lazy` has closed it: `inner` is another object then. Collective over the members."""
        raise MoveFailed(f"{self.name} can't be rebuilt")

    @abstractmethod
    def abort(self) -> None:
        """End every operation under way with an error, and let none begin: also `prepare`, `rebuild`, which come to it
        later. Not collective; from any thread; may be called twice.
        """

    def wait_aborted(self, timeout_s: float) -> None:
        """After `abort`: until it has given back what it held, or `timeout_s` have passed, which is logged."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. No operation may be outstanding."""

    # ---- what stages take

    def free_bytes(self) -> int:
        """Free memory of the device, whoever uses the rest; 0 where none is at stake."""
        return 0

    @contextmanager
    def measured(self, stage: str, *, as_one: bool = False) -> Iterator[None]:
        """The body is what `stage` takes, if it doesn't raise; `as_one`: stages inside it aren't told apart."""
        free_before, started_s, num_before = self.free_bytes(), time.perf_counter(), len(self._untold)
        yield
        seconds = time.perf_counter() - started_s
        self.costs[stage] = StageCost(seconds=seconds, device_bytes=free_before - self.free_bytes())
        if as_one:
            del self._untold[num_before:]
        self._untold.append((stage, self.costs[stage]))

    def take_costs(self) -> list[tuple[str, StageCost]]:
        """The stages since the last call, in order."""
        told, self._untold = self._untold, []
        return told

    # ---- transfers and probes

    def send_all(self, tensors: Iterable[torch.Tensor], peer: int, timeout_s: float | None = None) -> None:
        """Send `tensors`, in order, to group rank `peer`; they may be touched again when it returns.

        Collective over the two. Raises RuntimeError if the peer is gone, `timeout_s` passes (None: as `prepare` was
        told) or another thread aborts.
        """
        _wait_for([self.inner.send([tensor], peer, 0) for tensor in tensors], timeout_s)

    def recv_all(self, tensors: Iterable[torch.Tensor], peer: int, timeout_s: float | None = None) -> None:
        """The other side of `send_all`, into tensors of the same sizes; they hold the data when it returns."""
        _wait_for([self.inner.recv([tensor], peer, 0) for tensor in tensors], timeout_s)

    def probe(self, device: torch.device) -> str:
        """Digest of an adversarial all-reduce, which tells whether sums keep their bits on this communicator.

        Collective over the members. Every slot contributes 64 terms of very different size, so that their sum depends
        on the order of addition: equal digests on the old and the new communicator mean an equal order.
        """
        generator = torch.Generator().manual_seed(9973 * self.slots[self.group_rank] + 1)
        exponents = torch.randint(-20, 21, (64,), generator=generator)
        terms = (torch.randn(64, generator=generator) * torch.exp2(exponents.float())).to(device)
        work = self.inner.allreduce([terms])
        work.wait()
        self.probe_digest = hashlib.sha256(terms.cpu().numpy().tobytes()).hexdigest()[:16]
        return self.probe_digest


def _wait_for(works: Iterable[dist.Work], timeout_s: float | None) -> None:
    limit = () if timeout_s is None else (timedelta(seconds=timeout_s),)
    for work in works:
        work.wait(*limit)
