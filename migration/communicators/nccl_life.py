"""Who owns an NCCL communicator, its stage, and how it ends: adoption by torch's group, abort, close, deadlines.

The bare communicator belongs to this object until a torch group adopts it, and to that group afterwards: its owner
frees it, once. nccl.py says in which order the stages come; nothing here is collective but `close`.
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from migration.communicators import nccl_device
from migration.communicators.base import OPERATION_TIMEOUT_S, Communicator
from migration.communicators.nccl_policy import NcclPolicy
from migration.errors import MoveFailed
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.library import Library
from third_party.pytorch.nccl_group import backend_of, build_nccl

_log = logging.getLogger(__name__)


class Stage(Enum):
    NEW = "new"
    PREPARED = "prepared"
    PARKED = "parked"
    CONNECTED = "connected"
    CLOSED = "closed"
    ABORTED = "aborted"


class NcclLife(Communicator):
    """The beginning and the end of an NcclCommunicator."""

    def __init__(self, name: str, slots: tuple[int, ...], group_rank: int, *, device: torch.device, library: Library,
                 policy: NcclPolicy) -> None:
        super().__init__(name, slots, group_rank)
        self.device, self.library, self.policy = device, library, policy
        self.stage = Stage.NEW
        self._bare = Bare(library, group_rank, len(slots), name)
        self._has_connected = False  # which stays with it while it is parked
        self._operation_timeout_s = OPERATION_TIMEOUT_S
        self._owner_lock = threading.Lock()  # held while the bare communicator changes its owner
        self._aborting: threading.Thread | None = None
        self._is_given_up = False  # also where it was closed when it was aborted: it isn't rebuilt any more

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    # ---- ownership

    def _adopt(self, expected: Stage) -> None:
        """`inner` is ready and owns the bare communicator. Raises MoveFailed if it was aborted meanwhile."""
        with self._owner_lock:
            self._expect(expected)
            self.inner = self._build_inner()

    def _build_inner(self) -> Any:
        """What a handle forwards to: a stock group that owns the bare communicator."""
        group = build_nccl(None, self.name, self.group_rank, len(self.slots), self.device, ranks=self.slots,
                           communicator=self._bare.pointer, operation_timeout_s=self._operation_timeout_s)
        self._bare.hand_over()
        return group

    # ---- the end

    def abort(self) -> None:
        """Returns at once; the work is done on a thread of its own, since NCCL may take its time over it.

        What is suspended then isn't resumed before, which would need its peers: a few MiB of it may be lost.
        """
        with self._owner_lock:
            self._is_given_up = True
            if self.stage in (Stage.ABORTED, Stage.CLOSED):
                return
            self.stage = Stage.ABORTED
            self._aborting = threading.Thread(target=self._abort_now, args=(self.inner,), name=f"abort {self.name}",
                                              daemon=True)
            self._aborting.start()

    def _abort_now(self, inner: Any) -> None:
        try:
            if self._bare.owned:
                self._bare.abort()
            else:
                self._bare.mark_aborted()
                backend_of(inner).abort()
        except Exception:  # nobody's work depends on this thread; the process may go on without the memory
            _log.exception("%s: abort", self.name)

    def wait_aborted(self, timeout_s: float) -> None:
        if self._aborting is None:
            return
        self._aborting.join(timeout_s)
        if self._aborting.is_alive():
            _log.warning("%s: not aborted after %.1f s more; its memory isn't back", self.name, timeout_s)

    def close(self) -> None:
        """Collective over the members if it was parked or connected: in one order on all of them.

        Every wait has a deadline; what isn't done by then is logged and left behind.
        """
        if self.stage is not Stage.CLOSED:
            with self.measured("close"):
                self._close()

    def _close(self) -> None:
        all_are_there = False
        if self.stage is Stage.PARKED:
            try:
                # NCCL documents no call but this one for a suspended communicator, and freeing it as it is would free
                # memory that isn't mapped. A peer may be gone.
                with self.measured("resume"):
                    self._resume_memory(self.policy.close_timeout_s)
                all_are_there = True
            except RuntimeError:
                _log.exception("%s: couldn't be resumed to be closed; its memory may be lost", self.name)
        with self._owner_lock:
            aborted = self.stage is Stage.ABORTED
            inner, self.inner = self.inner, None
            self.stage = Stage.CLOSED
        if aborted:
            return  # which frees it
        if self._bare.owned:  # no torch group has it: a pair, one that was never activated, or its init failed
            joined = all_are_there and self.policy.close_by == "destroy"
            self._free(self._bare.destroy if joined else self._bare.abort)
        else:  # one that we never connected is freed without its peers; nothing is outstanding where NCCL has done it
            self._free(backend_of(inner).shutdown if self._has_connected else backend_of(inner).abort)

    def _free(self, call: Callable[[], None]) -> None:
        worker = threading.Thread(target=call, name=f"close {self.name}", daemon=True)
        worker.start()
        worker.join(self.policy.close_timeout_s)
        if worker.is_alive():
            _log.warning("%s: still not closed after %s s; left to a thread", self.name, self.policy.close_timeout_s)

    # ---- memory

    def _suspend(self) -> None:
        with self._deadline(self.policy.park_timeout_s, "parking"):
            self._bare.suspend()
        self._become(Stage.PARKED)

    def _resume_memory(self, timeout_s: float) -> None:
        with self._deadline(timeout_s, "resuming"):
            self._bare.resume()
        self._become(Stage.CONNECTED if self._has_connected else Stage.PREPARED)

    # ---- inside

    def _wait(self, what: str, timeout_s: float) -> None:
        nccl_device.wait_for_stream(self._bare, self.device, time.monotonic() + timeout_s, what, self.abort)

    def _deadline(self, timeout_s: float, what: str) -> contextlib.AbstractContextManager[None]:
        return nccl_device.deadline(f"{self.name}: {what}", timeout_s, self.abort)

    def _become(self, stage: Stage) -> None:
        with self._owner_lock:
            if self.stage is Stage.ABORTED:
                raise MoveFailed(f"{self.name} was aborted before it was {stage.value}")
            self.stage = stage

    def _expect(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise MoveFailed(f"{self.name} is {self.stage.value}, expected {stage.value}")
