"""A communicator as an object that owns its pointer: made, split, aborted, suspended, destroyed.

Each method says who must join it, and raises when the communicator isn't in a state for it. The calling thread has set
its CUDA device before. While a call is in NCCL, other Python threads run: that is how one aborts what another waits
for.
"""
from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass

from nccl_bindings.errors import Aborted, DeadlinePassed
from nccl_bindings.library import Library
from nccl_bindings.operations import Operations, State, check
from nccl_bindings.types import SUSPEND_MEMORY, Config, MemoryStat, Result, UniqueId, make_config

_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Device memory of a communicator as NCCL counts it: without NET and NVLS buffers."""

    suspendable_bytes: int
    persistent_bytes: int
    total_bytes: int
    is_suspended: bool


class Communicator(Operations):
    """Owns an ncclComm_t, until it hands it over."""

    def __init__(self, library: Library, group_rank: int, group_size: int, name: str = "") -> None:
        super().__init__(library, group_rank, group_size, name)
        self.owned = True
        self._config: Config | None = None  # NCCL keeps pointers into it
        self._lock = threading.Lock()
        self._init_returned = threading.Event()
        self.issuing = threading.Lock()  # held by whoever issues in a group: an abort frees what that uses

    # ---- life

    def config(self, **fields: int | bytes) -> Config:
        """A configuration for this library, named like this object where the library takes names."""
        if self.name and "commName" not in fields and self.raw.library.has("names"):
            fields["commName"] = self.name.encode()
        return make_config(self.raw.library.version, **fields)

    def init(self, unique_id: bytes, **fields: int | bytes) -> None:
        """Bootstrap and topology; connects nothing yet. Collective over the members; blocks until all have come.

        NCCL knows no time-out here: another thread calls `abort` to end it. Raises NcclError, or Aborted.
        """
        self._begin(self.config(blocking=1, **fields))
        self._end_init(self._call_init(unique_id))

    def _begin(self, config: Config) -> None:
        with self._lock:
            if self.state is State.ABORTED:
                raise Aborted(f"{self._title()} was aborted before its init")
            self._expect(State.NEW)
            self.state = State.INITIALIZING
        self._config = config

    def _call_init(self, unique_id: bytes) -> int:
        return self.raw.ncclCommInitRankConfig(ctypes.byref(self._pointer), self.group_size,
                                               UniqueId.from_buffer_copy(unique_id), self.group_rank,
                                               ctypes.byref(self._config))

    def _end_init(self, code: int) -> None:
        with self._lock:
            self._init_returned.set()
            if self.state is State.ABORTED:
                raise Aborted(f"{self._title()}: init was aborted by another thread")
            self.state = State.READY if code == Result.SUCCESS else State.GONE
        check(self.raw, f"ncclCommInitRankConfig of {self._title()}", code)

    def split(self, color: int, key: int, **fields: int | bytes) -> Communicator | None:
        """A child of those with the same `color`, ordered by `key`; None with types.NO_COLOR. All members join.

        Nothing may be under way on this communicator.
        """
        self._expect(State.READY)
        pointer = ctypes.c_void_p()
        config = make_config(self.raw.library.version, **{"blocking": 1, **fields})
        self._call("ncclCommSplit", color, key, ctypes.byref(pointer), ctypes.byref(config))
        if not pointer.value:
            return None
        child = Communicator(self.raw.library, 0, 1, f"{self.name}/{color}")
        child._pointer, child._config, child.state = pointer, config, State.READY
        child.group_rank, child.group_size = child.query_rank(), child.query_size()
        return child

    def abort(self, visible_within_s: float = 10.0) -> None:
        """End what is under way with an error and free the communicator. Not collective; from any thread.

        A second call does nothing. During an init it waits until NCCL has shown the pointer, at most
        `visible_within_s`; raises DeadlinePassed when it doesn't.
        """
        with self._lock:
            self._expect_owned("abort")
            before, self.state = self.state, State.ABORTED
        if before in (State.NEW, State.GONE, State.ABORTED):
            return
        ends_s = time.monotonic() + visible_within_s
        while before is State.INITIALIZING and not self._pointer.value and not self._init_returned.is_set():
            if time.monotonic() > ends_s:
                raise DeadlinePassed(f"{self._title()}: abort: init showed no pointer within {visible_within_s} s")
            time.sleep(_POLL_S)
        held = self.issuing.acquire(timeout=visible_within_s)  # the state is ABORTED: nobody begins to issue any more
        try:
            self._abort_pointer()
        finally:
            if held:
                self.issuing.release()

    def _abort_pointer(self) -> None:
        if self._pointer.value:
            check(self.raw, f"ncclCommAbort of {self._title()}", self.raw.ncclCommAbort(self._pointer))

    def finalize(self) -> None:
        """Flush everything that was issued. All members join. Afterwards only `destroy` or `abort`."""
        self._expect_owned("finalize")
        self._expect(State.READY)
        self._call("ncclCommFinalize")
        self.state = State.FINALIZED

    def destroy(self) -> None:
        """Free it. All members of this host join; nothing may be under way.

        A suspended one must be resumed before (with all members): NCCL can't free what it doesn't have mapped.
        """
        self._expect_owned("destroy")
        self._expect(State.READY, State.FINALIZED)
        self._call("ncclCommDestroy")
        self._pointer.value = None
        self.state = State.GONE

    def hand_over(self) -> int:
        """Gives the pointer to another owner, who destroys or aborts it. Everything else stays possible here.

        This object must outlive the communicator, which keeps pointers into its configuration.
        """
        self._expect_owned("hand_over")
        self._expect(State.READY)
        self.owned = False
        return self.pointer

    def mark_aborted(self) -> None:
        """Its new owner aborts it: whatever is called or waited for here from now on raises Aborted."""
        if self.owned:
            raise RuntimeError(f"mark_aborted: {self._title()} has no other owner; call abort")
        with self._lock:
            self.state = State.ABORTED

    # ---- memory

    def suspend(self) -> None:
        """Give the device memory back. Collective; synchronises the device; nothing may be under way."""
        self._expect(State.READY)
        self._call("ncclCommSuspend", SUSPEND_MEMORY)
        self._become(State.SUSPENDED)

    def resume(self) -> None:
        """Take it again, with what was connected. Collective."""
        self._expect(State.SUSPENDED)
        self._call("ncclCommResume")
        self._become(State.READY)

    def memory_stats(self) -> MemoryStats:
        """Not collective."""
        self._expect(State.READY, State.SUSPENDED)
        values = []
        for stat in MemoryStat:
            value = ctypes.c_uint64()
            self._call("ncclCommMemStats", int(stat), ctypes.byref(value))
            values.append(value.value)
        suspendable, suspended, persistent, total = values
        return MemoryStats(suspendable_bytes=suspendable, persistent_bytes=persistent, total_bytes=total,
                           is_suspended=bool(suspended))

    def _become(self, state: State) -> None:
        with self._lock:
            if self.state is State.ABORTED:
                raise Aborted(f"{self._title()} was aborted before it was {state.value}")
            self.state = state

    def _expect_owned(self, what: str) -> None:
        if not self.owned:
            raise RuntimeError(f"{what}: {self._title()} was handed over; its new owner frees it")
