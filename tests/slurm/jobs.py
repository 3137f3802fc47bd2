"""A job that was given to the local cluster by the command that users have: waiting for it, asking after it, ending it.

Must not import torch or MPI.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny"
_POLL_S = 0.1
_TAIL_CHARACTERS = 6000
_SUBMIT_TIMEOUT_S = 120.0
_CANCEL_TIMEOUT_S = 60.0


Submit = Callable[..., "SlurmJob"]


class SlurmJob:
    """`python -m slurm submit` with the site.toml in `folder`. With --salloc the command runs on beside the test."""

    def __init__(self, cluster: Cluster, folder: Path, arguments: Sequence[str], *,
                 environment: dict[str, str]) -> None:
        self.cluster, self.folder, self.environment = cluster, folder, environment
        command = [sys.executable, "-m", "slurm", "submit", "--name", NAME, "--site", str(folder / "site.toml"),
                   *arguments]
        self.submitted_s = time.time()
        with (folder / "submit.out").open("wb") as out:
            self.command = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                                            cwd=ROOT, start_new_session=True)
        self.is_batch = "--salloc" not in arguments
        if self.is_batch:
            code = self.command.wait(_SUBMIT_TIMEOUT_S)
            assert code == 0, self.said()

    @property
    def id(self) -> int:
        """Known once the command has said it."""
        words = self.said().split()
        return int(words[words.index("job") + 1] if self.is_batch else words[words.index("allocation") + 1])

    def said(self) -> str:
        return (self.folder / "submit.out").read_text(errors="replace")

    @property
    def out(self) -> str:
        """What the job printed so far; inside salloc, what the command printed."""
        files = sorted(self.folder.glob(f"{NAME}-*.out")) if self.is_batch else [self.folder / "submit.out"]
        return "".join(path.read_text(errors="replace") for path in files)

    def run(self, restarts: int = 0) -> Path:
        return self.folder / "runs" / f"{NAME}-{self.id}-r{restarts}"

    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("*"))

    def state(self) -> str:
        """Slurm's word for it: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ..."""
        text = self.cluster.command("scontrol", "--oneliner", "show", "job", str(self.id))
        return next(word.partition("=")[2] for word in text.split() if word.startswith("JobState="))

    def has_ended(self) -> bool:
        if not self.is_batch and self.command.poll() is None:
            return False
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
        """Fails the test, with the job's last words, if `condition` doesn't come to hold or the job ends before."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            ended = self.has_ended()
            if ended and condition():
                return
            if ended or time.monotonic() > deadline_s:
                pytest.fail(f"waited for: {what}; {'the job has ended' if ended else f'not in {timeout_s:.0f} s'}: "
                            f"{self.state()}\n{self.out[-_TAIL_CHARACTERS:]}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float = 240.0) -> str:
        """The state in which the job ended."""
        self.wait_for(self.has_ended, "its end", timeout_s)
        return self.state()

    def cancel(self) -> None:
        """End it if it still runs."""
        if not self.is_batch and self.command.poll() is None:
            os.killpg(self.command.pid, signal.SIGTERM)
            self.command.wait(_CANCEL_TIMEOUT_S)
        if self.is_batch and not self.has_ended():
            self.cluster.command("scancel", str(self.id))
            deadline_s = time.monotonic() + _CANCEL_TIMEOUT_S
            while not self.has_ended() and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
