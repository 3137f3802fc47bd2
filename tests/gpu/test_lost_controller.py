"""A controller that is lost while members park their communicators, on NCCL, where parking is collective.

`make test-gpu`. Twelve processes share whatever GPUs there are. Without a GPU tests/runs/test_takeover.py does the same
with communicators that are closed and rebuilt.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import Running, assert_nothing_left
from support import last_iteration, pid_of

from analysis.compare import main as compare
from analysis.log import read_run

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tuple(part for setting in ("iterations=70", "num_layers=2", "num_microbatches=1")
                 for part in ("--set", setting))
WAIT_S = 150.0

pytestmark = [pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"), pytest.mark.timeout(400)]


def start(run: Path, number: int, *arguments: str) -> Running:
    hosts = ",".join(f"b{i}" for i in range(number // 2))
    command = [sys.executable, str(ROOT / "harness.py"), "--np", str(number), "--hosts", hosts, *SETTINGS, "--run",
               str(run), *arguments]
    return Running(command, run=run, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_all_park_and_resume(tmp_path: Path) -> None:
    """Slots 0 and 1 are lost with the first controller, so that a spare is the next: its loss costs no slot.

    The move of b1 is aborted, no recovery begun, when one member alone has been told to park.
    """
    twin = start(tmp_path / "undisturbed", 6).wait(WAIT_S)
    assert twin.rc == 0, twin.out + twin.err
    job = start(tmp_path / "moved", 12, "--prepare-share", "1", "--nccl-switch", "parked", "--fault", "kill@2:PARKING")
    try:
        job.wait_for(lambda: last_iteration(job.run) >= 3, "iteration 3", WAIT_S)
        for world_rank in (0, 1):
            os.kill(pid_of(job.run, world_rank), signal.SIGKILL)
        job.wait_for(lambda: "recovery 0, generation 1: done: " in job.out, "the recovery", WAIT_S)
        asked = subprocess.run([sys.executable, str(ROOT / "harness.py"), "request", "--run", str(job.run), "--vacate",
                                "b1->b4", "--wait"], capture_output=True, text=True, timeout=WAIT_S)
        assert asked.returncode == 1 and "was lost before its verdict" in asked.stdout, asked.stdout + asked.stderr
        ended = job.wait(WAIT_S)
        assert ended.rc == 0, ended.out + ended.err
    finally:
        job.kill()
    assert_nothing_left(job.run)
    made = read_run(job.run)
    holders = set(made.iterations["world_rank"][made.iterations["generation"] == 1].tolist())
    for name in (b"park", b"resume"):
        assert set(made.spans["world_rank"][made.spans["name"] == name].tolist()) == holders, f"not all did {name!r}"
    assert compare([str(twin.run), str(job.run)]) == 0
