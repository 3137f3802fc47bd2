"""The control thread, and with it MPI: how it comes up, and the records that go through it. No other file speaks MPI.

The control thread imports MPI and makes every call to it; other threads hand it records. MPI's blocking waits spin, so
it polls: a posted receive, a test, a short wait. Collectives only at the start; afterwards small records from process
to process, sent without waiting, because a process that is gone never receives.

Knows nothing of slots, moves or torch. Rules that keep both MPICH and Open MPI usable: no MPI_Finalize (it waits for
everybody), SIGUSR1 ignored (hydra sends it to survivors), errors returned. What MPICH alone needs is in mpich.py.
"""
from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from migration.bell import Bell
from migration.errors import UserError
from migration.mpich import init, leave_hydra, set_defaults, unname_shared_memory

_MESSAGE_BYTES = 1 << 18  # small ones go at once; a large one waits until the receiver polls
_START_TIMEOUT_S = 600.0  # for everybody to come up: nodes boot and file systems are slow at different speeds
_ABORT_S = 5.0
POLL_S = 0.005
# In the pause of a move whoever is sent a record is rung: it polls at once, and a moment later, for the record may be
# slower than the datagram. A long record takes several turns of both sides, which poll often then, and so do all where no
# datagram gets through.
URGENT_POLL_S, RUNG_POLL_S = 0.0005, 0.001
_HURRY_S = 5.0  # longer than any pause with nothing to connect; afterwards a long record is only slower
_TAG = 7

Record = dict[str, Any]


def split_record(data: bytes, max_bytes: int) -> list[bytes]:
    """The messages in which a record travels: each begins with a byte that says whether more of it follows."""
    size = max_bytes - 1
    parts = [data[at:at + size] for at in range(0, len(data), size)]
    return [*(b"+" + part for part in parts[:-1]), b"." + parts[-1]]


def join_message(begun: dict[int, bytes], sender: int, message: bytes) -> bytes | None:
    """The record that `message` completes, or None. MPI keeps the order of one sender's messages, not of several."""
    data = begun.pop(sender, b"") + message[1:]
    if message[:1] == b".":
        return data
    begun[sender] = data
    return None


class World:
    """Every MPI process, spares included."""

    def __init__(self) -> None:
        self.rank = -1
        self.size = 0
        self.hellos: list[dict[str, Any]] = []
        self.library = ""
        self._outbox: queue.SimpleQueue[tuple[int, Record, bool]] = queue.SimpleQueue()
        self._own: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._handlers: tuple[Callable[[Record], None], Callable[[float], None]] | None = None
        self._ready, self._going = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self.urgent = False   # a member waits at a boundary: what this process sends, it rings for
        self._hurries_until_s = 0.0

    def start(self, hello: Callable[[int, int], dict[str, Any]], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Bring MPI up. Collective over the world: everybody's `hello(rank, size)` is in `hellos` afterwards.

        Raises what `hello` raised, on every rank: a hello that failed travels as its message; and TimeoutError where
        somebody doesn't come.
        """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, args=(hello,), name="control", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout_s):
            unname_shared_memory()
            raise TimeoutError(f"MPI did not come up on {socket.gethostname()} in {timeout_s:g} s: a process of the "
                               "world was never started, hangs, or can't be reached from here; start one process a "
                               "host to see which")
        if self._failure is not None:
            raise self._failure

    def go(self, on_record: Callable[[Record], None], on_tick: Callable[[float], None]) -> None:
        """Let records flow: the control thread calls `on_record` for each and `on_tick(now_s)` at every poll."""
        self._handlers = (on_record, on_tick)
        self._going.set()

    def send(self, world_rank: int, record: Record) -> None:
        """Hand over a record for `world_rank` (perhaps this process). Any thread; returns at once."""
        if world_rank == self.rank:
            self._own.put(record)
        else:
            self._outbox.put((world_rank, record, self.urgent))
        self._bell.wake()

    def hurry(self, soon: bool) -> None:
        """Whether a long record will soon come: then this process polls often for it, for some seconds at most."""
        self._hurries_until_s = time.monotonic() + _HURRY_S if soon else 0.0

    def abort(self) -> None:
        """The last resort, before records flow: MPI ends every process of the world.

        This one ends too: in a copy of a fork server MPI's call may not come back.
        """
        _end_in(_ABORT_S, 1)
        self._comm.Abort(1)

    def finalize(self, timeout_s: float = 5.0) -> None:
        """End MPI in order, on the control thread. Collective over the world: gives up after `timeout_s`."""
        watch = _end_in(timeout_s, 0)
        self._request.Cancel()
        self._mpi.Finalize()
        leave_hydra()
        watch.cancel()

    # ---- the control thread

    def _run(self, hello: Callable[[int, int], dict[str, Any]]) -> None:
        try:
            self._bring_up(hello)
        except BaseException as error:  # handed to the main thread, which raises it
            self._failure = error
        self._ready.set()
        if self._failure is not None:
            return
        self._going.wait()
        try:
            self._poll()
        except BaseException:
            # nobody is left here who could tell the others: they see that this process is gone, and go on if they can
            sys.stderr.write(f"harness: control thread of world rank {self.rank} failed:\n{traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(1)

    def _bring_up(self, hello: Callable[[int, int], dict[str, Any]]) -> None:
        set_defaults()
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
        init(MPI)
        self._mpi = MPI
        for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):  # what is no communicator's own error counts as SELF's
            communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.library = MPI.Get_library_version().split("\n")[0].strip()
        try:
            own: dict[str, Any] = hello(self.rank, self.size)
        except UserError as error:
            own = {"error": str(error)}
        except Exception as error:  # everybody must hear of it, or they would wait here for ever
            own = {"error": f"world rank {self.rank} on {socket.gethostname()}: {traceback.format_exc().strip()}"}
        self.hellos = self._comm.allgather({**own, **self._bell.hello})
        unname_shared_memory()
        wrong = [h["error"] for h in self.hellos if "error" in h]
        if wrong:
            raise UserError(wrong[0])
        self._bell.meet(self.hellos, self.rank)
        self._status = MPI.Status()
        self._buffer = bytearray(_MESSAGE_BYTES)
        self._begun: dict[int, bytes] = {}  # by sender, a record of which only the first messages have come
        self._post()

    def _post(self) -> None:
        self._request = self._comm.Irecv(self._buffer, source=self._mpi.ANY_SOURCE, tag=_TAG)

    def _poll(self) -> None:
        assert self._handlers is not None
        on_record, on_tick = self._handlers
        sending: list[tuple[int, Any, bytes]] = []
        rung = False
        while True:
            for record in self._received():
                on_record(record)
            on_tick(time.monotonic())
            sending = [s for s in sending + self._start_sends() if not self._is_done(s[1])]
            hurries = (time.monotonic() < self._hurries_until_s
                       or (self.urgent and (sending or not self._bell.is_heard)))
            rung = self._bell.wait(URGENT_POLL_S if hurries else RUNG_POLL_S if rung else POLL_S)

    def _received(self) -> list[Record]:
        found = []
        # one call makes progress, the next one sees it: over TCP a single test would be a poll late
        while self._is_done(self._request, self._status) or self._is_done(self._request, self._status):
            message = bytes(self._buffer[:self._status.Get_count(self._mpi.BYTE)])
            sender = self._status.Get_source()
            self._post()
            if (data := join_message(self._begun, sender, message)) is not None:
                found.append(json.loads(data))
        while not self._own.empty():
            found.append(self._own.get())
        return found

    def _start_sends(self) -> list[tuple[int, Any, bytes]]:
        started = []
        while not self._outbox.empty():
            rank, record, is_urgent = self._outbox.get()
            for message in split_record(json.dumps(record).encode(), _MESSAGE_BYTES):
                try:
                    started.append((rank, self._comm.Isend(message, dest=rank, tag=_TAG), message))
                except self._mpi.Exception:
                    break  # the receiver is gone (OFI says so, UCX doesn't); the controller's heartbeats find out
            if is_urgent:
                self._bell.ring(rank)
        return started

    def _is_done(self, request: Any, status: Any = None) -> bool:
        """An error may be any other request's, such as that of a record to a process that has just died. So what isn't
        said to be done stays, with its buffer; a request that was the cause is MPI's null request afterwards, or is
        never done."""
        try:
            return bool(request.Test(status))
        except self._mpi.Exception:
            return False


def _end_in(seconds: float, code: int) -> threading.Timer:
    """End this process then, whatever MPI waits for, unless the timer is cancelled."""
    watch = threading.Timer(seconds, os._exit, (code,))
    watch.daemon = True
    watch.start()
    return watch
