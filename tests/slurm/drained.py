"""What the tests of nodes that go share: the jobs, and what each of them has done and said so far. Owns no test."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from running import Running
from support import Case, completed, last_iteration, trace

from analysis.log import read_run, text
from migration.forkserver import ADDRESS_VARIABLE, ForkServer

HARNESS = Path(__file__).resolve().parents[2] / "harness.py"
SRUN = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=pmi2")
ALLOCATION = ("--nodes=4", "--ntasks-per-node=2", "--exclusive", "--no-kill", "--time=30")
ENDLESS = 100_000
FOUR_SLOTS = Case(profile="tiny_TP2_PP2", iterations=ENDLESS, settings=("num_microbatches=1",))
SIX_SLOTS = Case(profile="tiny_TP2_PP1", iterations=ENDLESS, settings=("num_microbatches=1",))
TIMEOUT_S = 200.0  # of each wait: nothing is measured by it


def wait_for_iterations(job: Running, number: int) -> None:
    """Until `number` more iterations have ended: the job trains."""
    goal = last_iteration(job.run) + number
    job.wait_for(lambda: last_iteration(job.run) >= goal, f"iteration {goal} to end", TIMEOUT_S)


def status(job: Running) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(HARNESS), "status", "--run", str(job.run), "--json"],
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said(job: Running) -> list[str]:
    """What the controllers, one after the other, logged of Slurm."""
    return [text(row["text"]) for row in read_run(job.run).events if text(row["kind"]) == "slurm"]


def wait_for_word(job: Running, *words: str) -> None:
    job.wait_for(lambda: any(all(word in line for word in words) for line in said(job)), f"the job to say {words}",
                 TIMEOUT_S)


def assert_equal_so_far(case: Case, fork_server: ForkServer, job: Running, folder: Path) -> None:
    """Every iteration that all slots have done is, bit for bit, that of a job which is left alone."""
    found = trace(read_run(job.run))
    slots = range(case.job_size)
    number = 1 + min(max(iteration for iteration, slot in found if slot == which) for which in slots)
    twin = folder / "twin"
    command = [sys.executable, str(HARNESS), "--np", str(case.job_size), *case.arguments(case.job_size), "--save-at",
               str(number), "--run", str(twin)]
    completed(Running(command, run=twin, env=os.environ | {ADDRESS_VARIABLE: fork_server.address}).wait(TIMEOUT_S))
    expected = trace(read_run(twin))
    assert expected.keys() == {(iteration, slot) for iteration in range(number) for slot in slots}
    differing = sorted(key for key in expected if found.get(key) != expected[key])
    assert not differing, f"(iteration, slot) {differing[0]} of {number} iterations differs first"
