"""A real Slurm wants nodes back while a job trains: each is emptied and given back, and no loss changes.

One job a test, since a job's start is what costs. Every job is compared, as far as it came, with one that is left alone.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, assert_nothing_left
from support import Case, completed, last_iteration, trace

from analysis.log import read_run, text
from migration.forkserver import ADDRESS_VARIABLE, ForkServer
from slurm.cluster import Cluster

HARNESS = Path(__file__).resolve().parents[2] / "harness.py"
SRUN = ("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=pmi2")
ALLOCATION = ("--nodes=4", "--ntasks-per-node=2", "--exclusive", "--no-kill", "--time=30")
ENDLESS = 100_000
FOUR_SLOTS = Case(profile="tiny_TP2_PP2", iterations=ENDLESS, settings=("num_microbatches=1",))
SIX_SLOTS = Case(profile="tiny_TP2_PP1", iterations=ENDLESS, settings=("num_microbatches=1",))
TIMEOUT_S = 200.0  # of each wait: nothing is measured by it

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def start_job(cluster: Cluster, tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Running]]:
    """start_job(case, by="salloc") -> the job on four nodes of two processes each; salloc has no batch shell, sbatch has.

    At the end the job is cancelled, nodes are resumed, and no process of it may be left.
    """
    started: list[Running] = []

    def start(case: Case, *arguments: str, by: str = "salloc") -> Running:
        run = tmp_path / f"run{len(started)}"
        step = [*SRUN, sys.executable, str(HARNESS), "--profile", case.profile, "--slurm-poll", "0.5", "--run", str(run),
                *(word for setting in (f"iterations={case.iterations}", *case.settings) for word in ("--set", setting)),
                *arguments]
        if by == "salloc":
            command = ["salloc", *ALLOCATION, *step]
        else:
            command = ["sbatch", *ALLOCATION, "--wait", f"--output={run}.out", "--wrap", " ".join(step)]
        env = cluster.environment() | {ADDRESS_VARIABLE: fork_server.address, "OMP_NUM_THREADS": "1"}
        running = Running(command, run=run, env=env)
        started.append(running)
        return running

    yield start
    cluster.command("scancel", "--user=root")
    for running in started:
        running.kill()
        assert_nothing_left(running.run)
    for node, state in cluster.node_states().items():
        if state.startswith(("drain", "fail", "down")):
            cluster.command("scontrol", "update", f"NodeName={node}", "State=RESUME")


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


def test_two_nodes_at_once_are_emptied_and_given_back(cluster: Cluster, start_job: Callable[..., Running],
                                                      fork_server: ForkServer, tmp_path: Path) -> None:
    """Without a batch shell, world rank 0's node too, and the controller with it; one is drained, one fails."""
    job = start_job(FOUR_SLOTS)
    wait_for_iterations(job, 3)
    cluster.command("scontrol", "update", "NodeName=b0", "State=FAIL", "Reason=fan")
    cluster.command("scontrol", "update", "NodeName=b1", "State=DRAIN", "Reason=ECC | errors")
    job.wait_for(lambda: cluster.node_states()["b1"] == "drained", "b1 to be drained", TIMEOUT_S)
    job.wait_for(lambda: all(any(f"node {host} is given back" in line for line in said(job)) for host in ("b0", "b1")),
                 "both nodes to be given back", TIMEOUT_S)
    wait_for_iterations(job, 3)
    found = status(job)
    assert found["hosts"]["b2"]["slots"] + found["hosts"]["b3"]["slots"] == [0, 1, 2, 3], found["hosts"]
    assert [found["hosts"][host] for host in ("b0", "b1")] == [{"slots": [], "spares": 0}] * 2
    assert found["lost"] == [] and found["controller"] in (4, 5, 6, 7) and found["term"] >= 1
    shown = cluster.command("scontrol", "-o", "show", "job")
    assert "NodeList=b[2-3]" in shown and "Comment=Live Migrator: vacated and gave back b0 (failing (fan))" in shown, shown
    assert "b1 (draining (ECC | errors))" in shown
    assert any("b0 is failing (fan)" in line for line in said(job))
    assert_equal_so_far(FOUR_SLOTS, fork_server, job, tmp_path)


def test_the_batch_host_and_too_few_spares(cluster: Cluster, start_job: Callable[..., Running],
                                           fork_server: ForkServer, tmp_path: Path) -> None:
    """The batch host is emptied, but stays. Undrained in time, it is a spare again, which the next node was waiting for."""
    job = start_job(SIX_SLOTS, by="sbatch")
    wait_for_iterations(job, 3)
    cluster.command("scontrol", "update", "NodeName=b0", "State=DRAIN", "Reason=kernel")
    wait_for_word(job, "node b0 holds no slot", "batch shell")
    cluster.command("scontrol", "update", "NodeName=b1", "State=DRAIN", "Reason=disk")
    wait_for_word(job, "node b1 can't be emptied yet", "2 spare processes are needed", "0 free")
    wait_for_iterations(job, 3)
    found = status(job)
    assert found["hosts"]["b1"]["slots"] == [2, 3] and found["hosts"]["b0"] == {"slots": [], "spares": 2}
    assert (found["leaving"], found["term"]) == ({"b0": "draining (kernel), kept", "b1": "draining (disk), leaving"}, 1)
    cluster.command("scontrol", "update", "NodeName=b0", "State=RESUME")
    job.wait_for(lambda: cluster.node_states()["b1"] == "drained", "b1 to be drained", TIMEOUT_S)
    wait_for_word(job, "node b1 is given back")
    wait_for_iterations(job, 3)
    found = status(job)
    assert found["hosts"]["b0"] == {"slots": [2, 3], "spares": 0} and found["leaving"] == {
        "b1": "draining (disk), given back"}
    assert [move["request"] for move in found["moves"]] == ["b0", "b1"]
    assert sum("can't be emptied yet" in line for line in said(job)) == 1, said(job)
    assert_equal_so_far(SIX_SLOTS, fork_server, job, tmp_path)
