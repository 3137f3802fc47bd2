"""Fixtures for whole runs, each launched as a user would, with a hard time limit and nothing left behind.

Must not import torch or MPI. What a started run can do is in running.py.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from running import Finished, Running, assert_nothing_left

from migration.forkserver import ADDRESS_VARIABLE, ForkServer

HARNESS = Path(__file__).resolve().parents[2] / "harness.py"


@pytest.fixture
def start_harness(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Running]]:
    """start_harness(*args, np=8, env=None, run=None) -> Running: `harness.py --np 8 ARGS --run DIR`, not waited for.

    np=None: neither --np nor --run is added (plan, request, ...). At the end of the test everything still running is
    killed, and the test fails if a process of a run that had ended is left.
    """
    started: list[Running] = []

    def start(*args: object, np: int | None = 8, env: Mapping[str, str] | None = None,
              run: Path | None = None) -> Running:
        run = run or tmp_path / f"run{len(started)}"
        command = [sys.executable, str(HARNESS), *map(str, args)]
        if np is not None:
            command[2:2] = ["--np", str(np)]
            if "--run" not in command:
                command += ["--run", str(run)]
        environment = dict(os.environ) | {ADDRESS_VARIABLE: fork_server.address} | dict(env or {})
        running = Running(command, run=run, env=environment)
        started.append(running)
        return running

    yield start
    for running in started:
        if running.process.poll() is None:
            running.kill()
    for running in started:
        assert_nothing_left(running.run)


@pytest.fixture
def harness(start_harness: Callable[..., Running]) -> Callable[..., Finished]:
    """harness(*args, np=8, timeout=120, env=None, run=None) -> Finished: the same, waited for."""

    def run_to_end(*args: object, np: int | None = 8, timeout: float = 120.0, env: Mapping[str, str] | None = None,
                   run: Path | None = None) -> Finished:
        return start_harness(*args, np=np, env=env, run=run).wait(timeout)

    return run_to_end
