"""The process of the fork server: imports everything once and then forks a copy of itself for each rank.

Owns the server's loop, what a copy takes over from the process that asked for it, and the words on the socket. Must
not know what the ranks do. See forkserver.py for the whole picture; this file imports nothing heavy by itself.

On the socket, a request is a length (with the descriptors beside it) and a JSON text; the answers are two numbers, the
copy's pid and, when it has ended, its exit code (-N: by signal N). The connection is closed when the last copy of the
same run has ended.
"""
from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

FORKED_VARIABLE = "LM_FORKED_PID"
RUN_VARIABLE = "LM_RUN"
NUMBER = struct.Struct("<i")
NO_COPY = 0  # in the place of a pid
LENGTH = struct.Struct("<I")
# The server's arguments are padded by this: a copy shows its own arguments in their place (ps, /proc/PID/cmdline).
TITLE_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_REQUEST_TIMEOUT_S = 10.0


def die_with_parent() -> None:
    """Has the kernel send SIGKILL to this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise EOFError(f"connection closed after {len(data)} of {num_bytes} bytes")
        data += chunk
    return bytes(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    program: str
    argv: list[str]
    cwd: str
    environment: dict[str, str]
    fds: list[int]  # the rank's stdin, stdout, stderr and, if it has one, its PMI connection


def main() -> NoReturn:
    """The server process: sys.argv is -c, path, folder, preload, entry, padding, number of the listening socket."""
    _, _, folder, preload, entry, _, fd = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _show_as([sys.executable, "-m", "migration.zygote", entry])
    try:
        _resolve(preload)()
        run = _resolve(entry)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    if len(threads) != 1:
        print(f"fork server: {preload} left threads ({', '.join(threads)}), and a process with several can't be copied "
              "safely: each rank imports for itself", file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # a collection in a copy would write to, and so duplicate, every shared page
    request = _Server(socket.socket(fileno=int(fd)), folder, may_copy=len(threads) == 1).serve()
    _become(request)  # from here on this is a copy
    sys.exit(run(request.argv))


def _resolve(name: str) -> Callable:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    pid: int
    run: str
    lives: bool = True


class _Server:
    """The loop of the server: takes requests, forks, reaps, and kills what nobody waits for any more."""

    def __init__(self, listener: socket.socket, folder: str, *, may_copy: bool) -> None:
        self._pid = os.getpid()
        self._may_copy = may_copy
        self._folder = folder
        self._listener = listener
        self._copies: dict[socket.socket, _Copy] = {}  # by the connection to its light process
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # a handler must exist for the wake-up to happen
        self._selector = selectors.DefaultSelector()
        for source, action in ((self._listener, self._accept), (sys.stdin.fileno(), self._end),
                               (self._wake_read, self._reap)):
            self._selector.register(source, selectors.EVENT_READ, action)

    def serve(self) -> _Request:
        """Serves for ever; returns in each copy, with its request."""
        while True:
            for key, _ in self._selector.select():
                request = key.data()
                if request is not None:
                    return request

    def _accept(self) -> _Request | None:
        connection, _ = self._listener.accept()
        try:
            request = _read_request(connection)
        except (EOFError, OSError, ValueError) as error:
            print(f"fork server: a request could not be read: {error!r}", file=sys.stderr, flush=True)
            connection.close()
            return None
        if not self._may_copy:
            self._tell(connection, NO_COPY)
            for fd in request.fds:
                os.close(fd)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            if os.getppid() != self._pid:  # the server ended before the kernel was told
                os._exit(1)
            connection.close()
            self._leave()
            return request
        for fd in request.fds:
            os.close(fd)
        # Without a run, a copy is a run of its own.
        self._copies[connection] = _Copy(pid=pid, run=request.environment.get(RUN_VARIABLE, str(pid)))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._lose(connection))
        self._tell(connection, pid)
        return None

    def _leave(self) -> None:
        """In a copy: lets go of everything that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._listener.close()
        for connection in self._copies:
            connection.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _lose(self, connection: socket.socket) -> None:
        """A light process says nothing after its request: whatever there is to read is its end."""
        if connection not in self._copies:
            return  # closed earlier in the same round of the loop
        copy = self._copies[connection]
        if copy.lives:
            os.kill(copy.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            self._selector.unregister(connection)
        else:
            self._close(connection)

    def _reap(self) -> None:
        os.read(self._wake_read, 4096)
        while self._copies:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection, copy in self._copies.items():
                if copy.pid == pid and copy.lives:
                    self._copies[connection] = dataclasses.replace(copy, lives=False)
                    self._tell(connection, os.waitstatus_to_exitcode(status))
                    self._close_run(copy.run)
                    break  # a pid that isn't found is of a program that preload started

    def _close_run(self, run: str) -> None:
        """Lets the light processes of a run go, if no copy of it lives."""
        connections = [connection for connection, copy in self._copies.items() if copy.run == run]
        if not any(self._copies[connection].lives for connection in connections):
            for connection in connections:
                self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        del self._copies[connection]
        connection.close()

    def _tell(self, connection: socket.socket, number: int) -> None:
        try:
            connection.sendall(NUMBER.pack(number))
        except OSError:
            pass  # the light process has gone; its copy is killed when the loop sees the connection closed

    def _end(self) -> NoReturn:
        """The creator closed the lifeline, or is no more."""
        for copy in self._copies.values():
            if copy.lives:
                os.kill(copy.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _read_request(connection: socket.socket) -> _Request:
    connection.settimeout(_REQUEST_TIMEOUT_S)
    header, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 4, socket.MSG_CMSG_CLOEXEC)
    if len(header) != LENGTH.size or len(fds) < 3:
        raise EOFError(f"{len(header)} bytes and {len(fds)} descriptors where {LENGTH.size} and 3 or 4 were due")
    fields = json.loads(receive(connection, LENGTH.unpack(header)[0]))
    return _Request(fds=list(fds), **fields)


def _become(request: _Request) -> None:
    """Makes this copy the process that asked: its streams, environment, folder and arguments."""
    for number, fd in enumerate(request.fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(request.environment)
    if len(request.fds) > 3:
        # Its number may be taken here by something that preload opened, so the variable follows the descriptor.
        os.environ["PMI_FD"] = str(request.fds[3])
    os.environ[FORKED_VARIABLE] = str(os.getpid())
    os.chdir(request.cwd)
    sys.argv[:] = [request.program, *request.argv]
    _show_as([sys.executable, *sys.argv])


def _show_as(words: Sequence[str]) -> None:
    """Writes `words` over this process's arguments as the system shows them; cut if they don't fit."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
    if not start:
        return  # a kernel that doesn't tell; only the looks are lost
    title = os.fsencode("\0".join(words))[:end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))
