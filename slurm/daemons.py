"""The processes of a local cluster: starting its daemons, recognising them later, ending them and what they left.

A process is known by its pid and its start time, since a pid may become another's. Linux only.
"""
from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from migration.footprint import read_stat

_TERM_GRACE_S = 5.0
_KILL_GRACE_S = 5.0
_POLL_S = 0.02
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A daemon that was started. start_ticks: field 22 of /proc/PID/stat."""

    name: str
    pid: int
    start_ticks: int

    def lives(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def start(name: str, command: Sequence[str], *, output: Path, environment: dict[str, str]) -> Daemon:
    """Start `command`, which must stay in the foreground, in a session of its own. What it prints goes to `output`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(command[0], command, environment, setsid=True, file_actions=[
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2)])
    ticks = _start_ticks(pid)
    return Daemon(name=name, pid=pid, start_ticks=-1 if ticks is None else ticks)


def start_slurmd(folder: Path, node: str, environment: dict[str, str]) -> Daemon:
    """A node's, with its output in `folder`. Its step managers inherit its environment, and so can be told from others.
    """
    return start(f"slurmd.{node}", [need_program("slurmd"), "-D", "-N", node], output=folder / f"slurmd.{node}.out",
                 environment={**environment, "SLURMD_NODENAME": node})


def find_program(name: str) -> str | None:
    """Its path, also where the user's PATH leaves out what is for root."""
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH)


def need_program(name: str) -> str:
    path = find_program(name)
    assert path is not None, f"{name}: missing() should have said so"
    return path


def end(daemons: Sequence[Daemon]) -> None:
    """SIGTERM, and SIGKILL to those that are there some seconds later. Returns when none lives.

    Raises TimeoutError for one that even SIGKILL doesn't end.
    """
    for signum, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        _send([daemon for daemon in daemons if daemon.lives()], signum)
        deadline_s = time.monotonic() + grace_s
        while left := [daemon for daemon in daemons if daemon.lives()]:
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        if not left:
            return
    raise TimeoutError(f"still there {_KILL_GRACE_S:.0f} s after SIGKILL: {[(d.name, d.pid) for d in left]}")


def kill(daemons: Sequence[Daemon]) -> None:
    """SIGKILL at once; as `end`."""
    _send(daemons, signal.SIGKILL)
    end(daemons)


def find_tasks(slurm_conf: Path, node: str | None = None) -> list[Daemon]:
    """What Slurm started on the nodes (or on one) and still lives: step managers, batch shells, tasks.

    Not a user's shell, although it has SLURM_CONF too: only what was started on a node has SLURMD_NODENAME.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it ended while we looked
        ticks = _start_ticks(pid)
        names = {entry.partition(b"=")[2] for entry in environ if entry.startswith(b"SLURMD_NODENAME=")}
        is_ours = b"SLURM_CONF=" + os.fsencode(slurm_conf) in environ and bool(names)
        if is_ours and ticks is not None and (node is None or os.fsencode(node) in names):
            found.append(Daemon(name=name, pid=pid, start_ticks=ticks))
    return found


def _send(daemons: Sequence[Daemon], signum: int) -> None:
    for daemon in daemons:
        try:
            os.kill(daemon.pid, signum)
        except ProcessLookupError:
            pass  # ended meanwhile


def _start_ticks(pid: int) -> int | None:
    """None for a process that has ended, a zombie included (which is reaped if it is a child of this process)."""
    stat = read_stat(pid)
    if stat is None:
        return None
    if stat.state == "Z":
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # another's child: its parent reaps it
        return None
    return stat.start_ticks
