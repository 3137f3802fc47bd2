"""What can be done with a communicator: operations, queries, groups. Knows its state, doesn't change it.

Buffers and streams are integers (device pointer, cudaStream_t), so that this needs neither torch nor CUDA. Operations
are asynchronous on their stream. The calling thread has set its CUDA device before.
"""
from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from enum import Enum

from nccl_bindings.errors import Aborted, NcclError
from nccl_bindings.library import Library
from nccl_bindings.raw import Raw
from nccl_bindings.types import DataType, RedOp, Result, UniqueId

_MOST_GROUPS = 16


class State(Enum):
    NEW = "new"
    INITIALIZING = "initializing"
    READY = "ready"
    SUSPENDED = "suspended"
    FINALIZED = "finalized"
    GONE = "gone"        # destroyed, or its init failed
    ABORTED = "aborted"


def check(raw: Raw, call: str, code: int) -> None:
    """Raises NcclError unless `code` is success. In progress counts as success of a non-blocking communicator."""
    if code in (Result.SUCCESS, Result.IN_PROGRESS):
        return
    text = raw.ncclGetErrorString(code).decode(errors="replace")
    last = raw.ncclGetLastError(None) or b""
    raise NcclError(call, code, text, last.decode(errors="replace"))


def new_unique_id(raw: Raw) -> bytes:
    """The 128 bytes that name a new communicator; every member needs them.

    Starts a thread in this process which serves the bootstrap and can't be ended before all members have come: make
    an id when they are known to come, in a process whose loss would end the communicator anyway.
    """
    unique_id = UniqueId()
    check(raw, "ncclGetUniqueId", raw.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


@contextlib.contextmanager
def group(raw: Raw) -> Iterator[None]:
    """Calls inside are issued together at the end. Collective over the members of each, who may group differently."""
    check(raw, "ncclGroupStart", raw.ncclGroupStart())
    try:
        yield
        check(raw, "ncclGroupEnd", raw.ncclGroupEnd())
    except BaseException:
        leave_groups(raw)  # what went wrong matters more than its answer
        raise


def leave_groups(raw: Raw) -> int:
    """End the groups that are open on this thread; returns how many. After a call that failed, before the next one.

    NCCL makes a group of each operation, and one that fails may leave it open (2.30.7: in a connection whose other
    side went away). Everything that this thread calls afterwards, for any communicator, would then be queued for ever,
    and reported as done. Raises RuntimeError if there is no end to it.
    """
    for num in range(_MOST_GROUPS):
        if raw.ncclGroupEnd() == Result.INVALID_USAGE:  # "not in a group call"
            return num
    raise RuntimeError(f"NCCL: this thread still has a group open after {_MOST_GROUPS} were ended")


class Operations:
    """Member `group_rank` of `group_size`; what it points to belongs to the subclass."""

    def __init__(self, library: Library, group_rank: int, group_size: int, name: str) -> None:
        if not 0 <= group_rank < group_size:
            raise ValueError(f"communicator {name}: rank {group_rank} isn't in 0..{group_size - 1}")
        self.raw = Raw(library)
        self.name, self.group_rank, self.group_size = name, group_rank, group_size
        self.state = State.NEW
        self._pointer = ctypes.c_void_p()  # NCCL writes it early in init, where another thread can read it

    @property
    def pointer(self) -> int:
        """The ncclComm_t, 0 where there is none."""
        return 0 if self.state in (State.GONE, State.ABORTED) else self._pointer.value or 0

    # ---- queries, not collective

    def async_error(self) -> int:
        """NCCL's code for what happened since: 0, 7 (in progress), or an error."""
        code = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.byref(code))
        return code.value

    def query_size(self) -> int:
        return self._query("ncclCommCount")

    def query_rank(self) -> int:
        return self._query("ncclCommUserRank")

    def _query(self, name: str) -> int:
        self._expect(State.READY, State.SUSPENDED)
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value))
        return value.value

    # ---- operations: pointers to device memory, counts in elements. All members join, with equal counts and types.

    def all_reduce(self, send: int, recv: int, count: int, dtype: DataType, op: RedOp, stream: int) -> None:
        self._operate("ncclAllReduce", send, recv, count, dtype, op, stream=stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: DataType, root: int, stream: int) -> None:
        self._operate("ncclBroadcast", send, recv, count, dtype, root, stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: DataType, stream: int) -> None:
        """`count` elements from each member; `recv` holds `group_size` times as many."""
        self._operate("ncclAllGather", send, recv, count, dtype, stream=stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: DataType, op: RedOp, stream: int) -> None:
        """`count` elements for each member; `send` holds `group_size` times as many."""
        self._operate("ncclReduceScatter", send, recv, count, dtype, op, stream=stream)

    def send(self, data: int, count: int, dtype: DataType, peer: int, stream: int) -> None:
        """Only `peer` joins, with the matching `recv`. Both directions at once need a `group`."""
        self._operate("ncclSend", data, count, dtype, peer, stream=stream)

    def recv(self, data: int, count: int, dtype: DataType, peer: int, stream: int) -> None:
        """Only `peer` joins, with the matching `send`."""
        self._operate("ncclRecv", data, count, dtype, peer, stream=stream)

    # ---- inside

    def _operate(self, name: str, *arguments: int, stream: int) -> None:
        self._expect(State.READY)
        try:
            check(self.raw, f"{name} on {self._title()}", getattr(self.raw, name)(*arguments, self._pointer, stream))
        except NcclError:
            leave_groups(self.raw)
            raise

    def _call(self, name: str, *arguments: object) -> None:
        check(self.raw, f"{name} of {self._title()}", getattr(self.raw, name)(self._pointer, *arguments))

    def _expect(self, *states: State) -> None:
        if self.state is State.ABORTED and State.ABORTED not in states:
            raise Aborted(f"{self._title()} was aborted")
        if self.state not in states:
            raise RuntimeError(f"{self._title()} is {self.state.value}; this needs it "
                               f"{' or '.join(s.value for s in states)}")

    def _title(self) -> str:
        return f"communicator {self.name or '(no name)'}, rank {self.group_rank} of {self.group_size}"
