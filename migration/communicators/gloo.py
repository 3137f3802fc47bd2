"""The Gloo communicator: stage 1 connects everything, stage 2 has nothing left to do. CPU only.

Host memory is what it takes, so old and new can live side by side. It follows the policies `parked` and `lazy` all the
same, without a gain: a machine without GPUs carries out the same protocol as one with.
"""
from __future__ import annotations

import contextlib
import functools
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from migration.attempt import Attempt
from migration.communicators.base import OPERATION_TIMEOUT_S, Communicator
from migration.errors import DeadlineExpired, MoveFailed
from third_party.pytorch.process_group import connect_gloo, meet_gloo

_NEVER_SENT_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)


class GlooCommunicator(Communicator):
    """A stock ProcessGroupGloo; tried: construction and destruction release the interpreter lock."""

    def __init__(self, name: str, slots: tuple[int, ...], group_rank: int, switch: str = "connected") -> None:
        super().__init__(name, slots, group_rank)
        self.switch = switch if len(slots) > 1 else "connected"
        self._is_closed = False
        self._is_aborted = False
        self._lock = threading.Lock()  # guards `inner` against an abort that comes while it is being built
        self._connecting: Attempt | None = None

    def prepare(self, store: dist.Store, timeout_s: float, operation_timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        prefixed = dist.PrefixStore(f"{self.name}/", store)
        started_s, ends_s = time.thread_time(), time.monotonic() + timeout_s
        with self.measured("prepare"):
            self._expect_wanted()
            meet_gloo(prefixed, self.name, self.group_rank, len(self.slots), timeout_s)
            left_s = max(0.0, ends_s - time.monotonic())
            connected, connect_work_s = self._connect(prefixed, left_s, operation_timeout_s)
            with self._lock:
                self._expect_wanted()
                self.inner = connected
        self.work_s = time.thread_time() - started_s + connect_work_s  # on a CPU it is the cores that training misses

    def _connect(self, store: dist.Store, timeout_s: float, operation_timeout_s: float) -> tuple[Any, float]:
        """The connected group, and the seconds that its thread has worked.

        A member that is killed meanwhile may leave Gloo in a wait that neither an abort nor the end of the store ends.
        So it connects on a thread that may be left behind, and that has nothing of this object.
        """
        attempt = Attempt()
        with self._lock:
            self._expect_wanted()
            self._connecting = attempt
        connect = functools.partial(_connect, store, self.name, self.group_rank, len(self.slots), operation_timeout_s)
        try:
            return attempt.make(f"connect {self.name}", connect, timeout_s, DeadlineExpired(
                f"{self.name}: all members came, but weren't connected within another {timeout_s:.1f} s"))
        finally:
            self._connecting = None  # it would keep the group open

    def _expect_wanted(self) -> None:
        if self._is_aborted:
            raise self._unwanted()

    def _unwanted(self) -> MoveFailed:
        return MoveFailed(f"{self.name} was aborted before it was prepared")

    def activate(self) -> None:
        assert self.inner is not None, f"{self.name} was not prepared"

    def park(self) -> None:
        if self.switch == "lazy":
            with self.measured("park"):
                self.close()

    def resume(self) -> None:
        if self._is_closed:
            raise MoveFailed(f"{self.name}: was closed to make room (policy lazy): rebuild it")

    @property
    def needs_rebuild(self) -> bool:
        return self._is_closed

    def rebuild(self, store: dist.Store, timeout_s: float) -> None:
        assert self._is_closed, f"{self.name} is open"
        with self.measured("rebuild", as_one=True):
            self.prepare(dist.PrefixStore("rebuilt", store), timeout_s)
        self._is_closed = False

    def abort(self) -> None:
        with self._lock:
            self._is_aborted, inner, connecting = True, self.inner, self._connecting
        if connecting is not None:
            connecting.give_up(self._unwanted())  # if its thread was faster, `prepare` sees the abort
        if inner is None or len(self.slots) == 1:
            return
        # ProcessGroupGloo.abort() does nothing (torch 2.13). But an operation that runs out of time closes all
        # connections of its group, which ends every other operation on it, at the peers too, within milliseconds. From
        # each peer in turn: where one has closed its connection already, the receive fails without running out of time,
        # and an operation with another peer, which may hang, would go on.
        for peer in range(len(self.slots)):
            if peer != self.group_rank:
                with contextlib.suppress(RuntimeError):  # the expiry itself, or that of an earlier abort
                    inner.recv([torch.empty(1)], peer, _NEVER_SENT_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        self._is_closed = True
        self.inner = None  # the destructor closes the sockets and ends Gloo's threads, about 40 ms


def _connect(*arguments: Any) -> tuple[Any, float]:
    return connect_gloo(*arguments), time.thread_time()
