"""A command that runs a whole job: start, wait with a hard time limit, find every process of it, kill it.

Owns starting, ending and finding the processes of a run. Must not import torch or MPI.

A process belongs to a run if its arguments or its first environment name the run's folder: launcher, mpiexec and ranks
have `--run DIR` among their arguments (a forked rank shows its own, see migration/zygote.py), hydra's proxies and the
fork server have LM_RUN.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

LEFTOVER_TIMEOUT_S = 10.0
TAIL_CHARACTERS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended. rc: exit code of the command (-N: by signal N)."""

    rc: int
    out: str
    err: str
    seconds: float
    run: Path


class Running:
    """A command that was started; `run` is its run folder."""

    def __init__(self, command: list[str], *, run: Path, env: Mapping[str, str]) -> None:
        self.run = run
        self.command = command
        self._out = run.with_name(run.name + ".out")
        self._err = run.with_name(run.name + ".err")
        self._started_s = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
                                            cwd=run.parent, start_new_session=True)

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0) -> Finished:
        """Waits for the end; after timeout_s everything of the run is killed and the test fails with its last words."""
        try:
            rc = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{' '.join(self.command)}\ndid not end in {timeout_s} s\n{self.tail()}")
        return Finished(rc=rc, out=self.out, err=self.err, seconds=time.monotonic() - self._started_s, run=self.run)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        """Waits until condition() holds; fails the test, with `what` was waited for, if it doesn't or the run ends."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            ended = self.process.poll() is not None
            if ended and condition():
                return
            if ended or time.monotonic() > deadline_s:
                why = f"the run ended with {self.process.returncode}" if ended else f"not in {timeout_s} s"
                self.kill()
                pytest.fail(f"waited for: {what}; {why}\n{self.tail()}")
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Processes of this run that live (launcher, mpiexec, proxies, ranks)."""
        return find_processes(self.run)

    def kill(self) -> None:
        """SIGKILL to every process of the run."""
        for pid in {self.process.pid, *self.pids()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended meanwhile
        self.process.wait()

    def tail(self) -> str:
        return (f"--- stdout, end\n{self.out[-TAIL_CHARACTERS:]}\n--- stderr, end\n{self.err[-TAIL_CHARACTERS:]}")


def find_processes(run: Path) -> list[int]:
    """Every living process that names the folder `run` in its arguments or first environment, but this one."""
    marker = os.fsencode(run)
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it ended while we looked, or is another user's
        # The folder's name must end where the marker ends: DIR/1 isn't DIR/10.
        if state != "Z" and any(text[at:at + 1] in (b"", b"\0", b"/", b"\n") for at in _ends(text, marker)):
            found.append(int(folder.name))
    return found


def _ends(text: bytes, marker: bytes) -> Iterator[int]:
    at = text.find(marker)
    while at >= 0:
        yield at + len(marker)
        at = text.find(marker, at + 1)


def assert_nothing_left(run: Path) -> None:
    """Fails, after killing what it found, if a process of the run is there after LEFTOVER_TIMEOUT_S."""
    deadline_s = time.monotonic() + LEFTOVER_TIMEOUT_S
    while left := find_processes(run):
        if time.monotonic() > deadline_s:
            shown = []
            for pid in left:
                try:
                    shown.append(f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass  # ended meanwhile
            pytest.fail(f"processes of {run} were left after {LEFTOVER_TIMEOUT_S} s:\n" + "\n".join(shown))
        time.sleep(0.05)
