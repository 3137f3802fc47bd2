"""What the tests of nodes that go share: the jobs, and what each of them has done and said so far. Owns no test."""
from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from running import Running, assert_nothing_left
from support import Case, last_iteration, trace

from analysis.log import read_run, text
from migration.forkserver import ADDRESS_VARIABLE, ForkServer
from slurm import cluster as local
from slurm.cluster import Cluster

HARNESS = Path(__file__).resolve().parents[2] / "harness.py"
SRUN = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=pmi2")
ALLOCATION = ("--nodes=4", "--ntasks-per-node=2", "--exclusive", "--no-kill", "--time=30")
ENDLESS = 100_000
FOUR_SLOTS = Case(profile="tiny_TP2_PP2", iterations=ENDLESS, settings=("num_microbatches=1",))
SIX_SLOTS = Case(profile="tiny_TP2_PP1", iterations=ENDLESS, settings=("num_microbatches=1",))
TIMEOUT_S = 200.0  # of each wait: nothing is measured by it


@pytest.fixture
def start_job(cluster: Cluster, tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Running]]:
    """start_job(case, *arguments, by="salloc") -> the job on four nodes of two processes; only sbatch has a batch shell.

    At the end the job is cancelled, nodes are up again, and no process of it may be left.
    """
    started: list[Running] = []

    def start(case: Case, *arguments: str, by: str = "salloc") -> Running:
        run = tmp_path / f"run{len(started)}"
        step = [*SRUN, sys.executable, str(HARNESS), "--profile", case.profile, "--slurm-poll", "0.5", *arguments,
                *case.changes, "--run", str(run)]
        if by == "salloc":
            command = ["salloc", *ALLOCATION, *step]
        else:
            command = ["sbatch", *ALLOCATION, "--wait", f"--output={run}.out", "--wrap", " ".join(step)]
        env = cluster.environment() | {ADDRESS_VARIABLE: fork_server.address, "OMP_NUM_THREADS": "1"}
        started.append(Running(command, run=run, env=env))
        return started[-1]

    yield start
    cluster.command("scancel", "--user=root")
    for running in started:
        running.kill()
        assert_nothing_left(running.run)
    bring_back(cluster)


def bring_back(cluster: Cluster) -> None:
    """Nodes that were drained, failed or killed are up again."""
    last = local.find(cluster.folder)
    assert last is not None
    for node in last.node_states():
        if not last.daemons[f"slurmd.{node}"].lives():
            last = last.start_node(node)
    deadline_s = time.monotonic() + TIMEOUT_S
    while gone := [node for node, state in last.node_states().items() if state.startswith(("drain", "fail", "down"))]:
        assert time.monotonic() < deadline_s, f"nodes {gone} don't come back"
        for node in gone:
            with contextlib.suppress(RuntimeError):  # it has come back by itself since: the next look tells
                last.command("scontrol", "update", f"NodeName={node}", "State=RESUME")


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


def assert_equal_so_far(case: Case, fork_server: ForkServer, jobs: Sequence[Running], folder: Path) -> None:
    """Every iteration that all slots have done is, bit for bit, that of a job which is left alone.

    Each of `jobs` goes on from a checkpoint of the one before it.
    """
    found: dict[tuple[int, int], tuple[object, ...]] = {}
    for job in jobs:
        found |= trace(read_run(job.run))
    slots = range(case.job_size)
    number = 1 + min(max(iteration for iteration, slot in found if slot == which) for which in slots)
    twin = folder / "twin"
    command = [sys.executable, str(HARNESS), "--np", str(case.job_size), *case.arguments(case.job_size), "--save-at",
               str(number), "--run", str(twin)]
    finished = Running(command, run=twin, env=os.environ | {ADDRESS_VARIABLE: fork_server.address}).wait(TIMEOUT_S)
    assert finished.rc == 0, finished.err
    expected = trace(read_run(twin))
    assert expected.keys() == {(iteration, slot) for iteration in range(number) for slot in slots}
    differing = sorted(key for key in expected if found.get(key) != expected[key])
    assert not differing, f"(iteration, slot) {differing[0]} of {number} iterations differs first"
