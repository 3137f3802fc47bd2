"""MPI bring-up, hosts, and the control thread. The only file that speaks MPI.

The control thread imports MPI and makes every call to it; other threads hand it records. MPI's blocking waits spin, so
it polls: a posted receive, a test, a short sleep. Collectives only at the start; afterwards small records from process
to process, sent without waiting, because a process that is gone never receives.

Knows nothing of slots, moves or torch. Rules that keep both MPICH and Open MPI usable: no MPI_Finalize (it waits for
everybody), SIGUSR1 ignored (hydra sends it to survivors), errors returned.
"""
from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import Any

from migration.errors import UserError
from migration.plan import spread_hosts

_MESSAGE_BYTES = 1 << 18  # small ones go at once; a large one waits until the receiver polls
_START_TIMEOUT_S = 600.0  # for everybody to come up: nodes boot and file systems are slow at different speeds
POLL_S = 0.005
URGENT_POLL_S = 0.0005  # while a member waits at a boundary
_TAG = 7

Record = dict[str, Any]


def own_host(world_rank: int, world_size: int, virtual_hosts: list[str]) -> str:
    """This process's host: an equal run of ranks per virtual host, or what the launcher says, or the machine's name.

    Raises UserError when the processes can't be divided equally over `virtual_hosts`.
    """
    if virtual_hosts:
        return spread_hosts(virtual_hosts, world_size)[world_rank]
    for name in ("LM_HOST", "SLURMD_NODENAME", "PMI_HOSTNAME"):
        if os.environ.get(name):
            return os.environ[name]
    return socket.gethostname()


def own_address() -> str:
    """An address of this machine that other hosts can reach: LM_ADDRESS, or what its name resolves to."""
    if os.environ.get("LM_ADDRESS"):
        return os.environ["LM_ADDRESS"]
    try:
        found = [row[4][0] for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        found = []
    return next((a for a in found if not a.startswith("127.")), "127.0.0.1")


def leave_hydra() -> None:
    """After MPI_Finalize, before os._exit: tell hydra that this process is done.

    MPICH says so in an exit handler, and without it hydra kills the others and returns 9. os._exit runs no handlers; a
    normal exit runs torch's destructors too, and then 2 of 4 runs ended in std::terminate. So the line of the PMI-1
    protocol is sent from here. Nothing to do under another launcher.
    """
    if "PMI_FD" in os.environ and "SLURM_PROCID" not in os.environ:
        descriptor = int(os.environ["PMI_FD"])
        os.write(descriptor, b"cmd=finalize\n")
        os.read(descriptor, 64)


def _init(mpi: Any) -> None:
    """MPI_Init_thread through ctypes: mpi4py's own holds Python's lock while it waits for the whole world.

    Then no other thread of this process could run, and `World.start` would never see its time-out.
    """
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()  # finds what the module is linked to as well
    code = library.MPI_Init_thread(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    if code != mpi.SUCCESS or provided.value != mpi.THREAD_MULTIPLE:
        raise RuntimeError(f"MPI_Init_thread returned {code} and thread level {provided.value}, not "
                           f"{mpi.THREAD_MULTIPLE}")


def unname_shared_memory() -> None:
    """Remove the names of MPICH's files in /dev/shm, 1 MiB a process, once everybody has mapped what it needs.

    MPI_Finalize would do that, which no process here waits for; without a name the memory goes with the process.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/mpich_")
        if path[1]:
            with contextlib.suppress(FileNotFoundError):  # mapped in parts, or by others of this node too
                os.unlink(path[1] + path[2])


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
        self._outbox: queue.SimpleQueue[tuple[int, Record]] = queue.SimpleQueue()
        self._own: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._handlers: tuple[Callable[[Record], None], Callable[[float], None]] | None = None
        self._ready, self._going, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self.urgent = False

    def start(self, hello: Callable[[int, int], dict[str, Any]], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Bring MPI up. Collective over the world: everybody's `hello(rank, size)` is in `hellos` afterwards.

        Raises what `hello` raised, on every rank: a hello that failed travels as its message; and TimeoutError where
        somebody doesn't come.
        """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
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
            self._outbox.put((world_rank, record))
        self._wake.set()

    def abort(self) -> None:
        """The last resort, before records flow: MPI ends every process of the world."""
        self._comm.Abort(1)

    def finalize(self, timeout_s: float = 5.0) -> None:
        """End MPI in order, on the control thread. Collective over the world: gives up after `timeout_s`."""
        watch = threading.Timer(timeout_s, os._exit, (0,))
        watch.daemon = True
        watch.start()
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
            # nobody is left who could tell the controller: MPI ends everything
            sys.stderr.write(f"harness: control thread of world rank {self.rank} failed:\n{traceback.format_exc()}")
            sys.stderr.flush()
            self._comm.Abort(1)

    def _bring_up(self, hello: Callable[[int, int], dict[str, Any]]) -> None:
        # MPICH only: with its default (UCX) and polling like ours, records between hosts stayed away in 5 of 14 runs
        # for as long as we waited; with OFI in none of 50
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
        # every process is a node of its own to MPI, as with the proxies of --np: with shared memory inside nodes, a
        # busy machine's starts hung in MPI_Init (8 of 129; without it 0 of 123)
        os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")
        # datagrams: with OFI's providers over connections ("sockets", "tcp"), MPICH ends a process that has a record on
        # its way to one that is just dying, whatever the error handler; with this one it survived 200 sends a second
        os.environ.setdefault("FI_PROVIDER", "udp;ofi_rxd")
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
        _init(MPI)
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
        self.hellos = self._comm.allgather(own)
        unname_shared_memory()
        wrong = [h["error"] for h in self.hellos if "error" in h]
        if wrong:
            raise UserError(wrong[0])
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
        while True:
            for record in self._received():
                on_record(record)
            on_tick(time.monotonic())
            sending = [s for s in sending + self._start_sends() if not self._is_done(s[1])]
            self._wake.wait(URGENT_POLL_S if self.urgent else POLL_S)  # what is to be sent doesn't wait
            self._wake.clear()

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
            rank, record = self._outbox.get()
            for message in split_record(json.dumps(record).encode(), _MESSAGE_BYTES):
                try:
                    started.append((rank, self._comm.Isend(message, dest=rank, tag=_TAG), message))
                except self._mpi.Exception:
                    break  # the receiver is gone (OFI says so, UCX doesn't); the controller's heartbeats find out
        return started

    def _is_done(self, request: Any, status: Any = None) -> bool:
        """An error may be any other request's, such as that of a record to a process that has just died. So what isn't
        said to be done stays, with its buffer; a request that was the cause is MPI's null request afterwards, or is
        never done."""
        try:
            return bool(request.Test(status))
        except self._mpi.Exception:
            return False
