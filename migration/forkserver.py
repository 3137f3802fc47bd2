"""Import once, fork the ranks: one process pays for the heavy imports, every rank is a copy of it.

Owns the creator's side and the rank's side of the fork server; the server process itself is zygote.py. Must not know
what the ranks do: it gets the names of two functions, one that imports (`preload`) and one that a rank runs (`entry`).

Started by a launcher, a rank is a light process with nothing imported. It hands its arguments, environment, working
directory, standard streams and PMI connection to the server and then only waits: signals go on to the copy, and it
ends as the copy ended. It stays until the last copy of its run (LM_RUN) has ended, so that the launcher sees nobody
leave a job that goes on: mpiexec may break when it does (see launch.py).

Who dies with whom: the light process's death ends its copy (the server sees the connection close), the server's death
ends all copies (the kernel, `die_with_parent`), and the creator's death ends the server (its lifeline closes). Tried: a
thread in each copy that watches the light process; the server's loop does it without.

Linux only. The server has one thread when it forks, so no lock is copied while it is held; where its imports have left
more, it makes no copies, and each process goes on by itself.
"""
from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from migration.errors import UserError
from migration.zygote import FORKED_VARIABLE, LENGTH, NO_COPY, NUMBER, TITLE_BYTES, receive

ADDRESS_VARIABLE = "LM_FORKSERVER"
_CLOSE_TIMEOUT_S = 10.0
_MAX_ADDRESS_BYTES = 100  # the kernel's limit for the path of a Unix socket is 108
_BACKLOG = 1024  # ranks that may wait here while the server still imports
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from migration import zygote; zygote.main()"


def forked_here() -> bool:
    """Whether this very process is a copy made by a fork server (not a program that such a copy started)."""
    return os.environ.get(FORKED_VARIABLE) == str(os.getpid())


class ForkServer:
    """Creator's side: starts the server and ends it. Ready at once; ranks that come early wait for the imports.

    preload, entry: functions as "module:function", importable with the creator's sys.path; preload takes nothing,
    entry takes the arguments (without the program) and returns an exit code. environment: the server's own; a copy
    has that of the process that asked.
    """

    def __init__(self, *, preload: str, entry: str, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="lm-")  # mode 0700: only this user can have code run here
        if len(os.fsencode(self._folder)) > _MAX_ADDRESS_BYTES - len("/socket"):
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="lm-", dir="/tmp")
        self.address = os.path.join(self._folder, "socket")
        path = json.dumps([entry_ or os.getcwd() for entry_ in sys.path])
        command = [sys.executable, "-P", "-c", _START, path, self._folder, preload, entry, "-" * TITLE_BYTES]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(_BACKLOG)
            # stdin is the lifeline: when this process ends, however, the server reads its end.
            self._process = subprocess.Popen(
                [*command, str(listener.fileno())], stdin=subprocess.PIPE, pass_fds=(listener.fileno(),),
                env={"OMP_NUM_THREADS": "1"} | dict(os.environ if environment is None else environment),
                start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the server and every copy that still runs. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the copies go with it
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # the server removes it too, if it got that far

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def hand_over(address: str, argv: Sequence[str]) -> None:
    """Has the server at `address` run a copy in place of this process; ends as the copy ends.

    Returns if the server makes no copies: then this process does everything itself. argv: arguments without the
    program. Raises UserError if no server listens there.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # hydra's news that another rank failed; the copy has its own answer
    fds = [0, 1, 2]
    if "PMI_FD" in os.environ:
        fds.append(int(os.environ["PMI_FD"]))
    request = json.dumps({"program": sys.argv[0], "argv": list(argv), "cwd": os.getcwd(),
                          "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
        except OSError as error:
            raise UserError(f"{ADDRESS_VARIABLE}={address}: no fork server answers there ({error.strerror}); "
                            f"unset {ADDRESS_VARIABLE}") from error
        try:
            socket.send_fds(connection, [LENGTH.pack(len(request))], fds)
            connection.sendall(request)
            pid = NUMBER.unpack(receive(connection, NUMBER.size))[0]
            if pid == NO_COPY:
                return
            _forward_signals(pid)
            exit_code = NUMBER.unpack(receive(connection, NUMBER.size))[0]
            _stop_forwarding()
            connection.recv(1)  # its end: nobody of this run is left
        except (EOFError, ConnectionError):
            print(f"rank {os.environ.get('PMI_RANK', '?')}: the fork server is gone, and its copies with it",
                  file=sys.stderr, flush=True)
            os._exit(1)
    _end_as(exit_code)


def _forward_signals(pid: int) -> None:
    def forward(signum: int, frame: FrameType | None) -> None:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass  # it has just ended; its exit code is on the way

    for signum in _FORWARDED:
        signal.signal(signum, forward)


def _stop_forwarding() -> None:
    """Once the copy has ended its pid may become another's."""
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN if signum == signal.SIGUSR2 else signal.SIG_DFL)


def _end_as(exit_code: int) -> NoReturn:
    """Ends this process with `exit_code`, or by signal -exit_code, as subprocess counts them."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the copy may have dumped core; this process is no use there
        if -exit_code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code & 0xFF)
