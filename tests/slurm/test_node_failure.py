"""A node of a real Slurm fails unannounced: the job goes on with its spares, or ends everywhere, to be requeued."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drained import (FOUR_SLOTS, TIMEOUT_S, assert_equal_so_far, bring_back, start_job, status,  # noqa: F401
                     wait_for_iterations)
from running import Running, assert_nothing_left

from migration.forkserver import ForkServer
from migration.options import REQUEUE_CODE
from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(900)


def test_a_job_goes_on_without_a_node_that_dies(cluster: Cluster, start_job: Callable[..., Running],  # noqa: F811
                                                fork_server: ForkServer, tmp_path: Path) -> None:
    """Its slurmd and its processes are killed, the controller among them; in the same step, the processes of the others
    recover."""
    job = start_job(FOUR_SLOTS, "--checkpoint-every", "4")
    wait_for_iterations(job, 7)
    cluster.kill_node("b0")
    job.wait_for(lambda: "recovery 0, generation 1: done: " in job.out, "the recovery", TIMEOUT_S)
    wait_for_iterations(job, 5)
    found = status(job)
    assert found["hosts"]["b0"]["slots"] == [] and found["generation"] == 1 and found["lost"] == [0, 1], found
    assert found["term"] == 1, found
    (recovery,) = found["recoveries"]
    assert (sorted(recovery["lost"]), recovery["hosts"]) == ([0, 1], ["b0", "b0"])
    print(f"\nSlurm, a node killed: noticed {recovery['detect_s']:.1f} s after the last word, first iteration "
          f"{recovery['recovery_s']:.1f} s later")
    assert_equal_so_far(FOUR_SLOTS, fork_server, [job], tmp_path)


def test_a_node_that_dies_ends_the_job_which_can_be_requeued(cluster: Cluster, fork_server: ForkServer, tmp_path: Path,
                                                             start_job: Callable[..., Running]) -> None:  # noqa: F811
    """Its slurmd and its processes are killed; no process stays on the other nodes, and the step ends."""
    arguments = ("--checkpoints", str(tmp_path / "checkpoints"), "--checkpoint-every", "4", "--recover", "off")
    job = start_job(FOUR_SLOTS, *arguments)
    wait_for_iterations(job, 7)
    cluster.kill_node("b1")
    finished = job.wait(TIMEOUT_S)
    result = json.loads((job.run / "result.json").read_text())
    assert result["status"] == "failed" and "on b1 is lost" in result["error"], result
    assert (result["requeue"], result["exit_code"]) == (True, REQUEUE_CODE), result
    assert sum("on b1 is lost" in line for line in finished.err.splitlines()) == 1, finished.err
    assert_nothing_left(job.run)
    bring_back(cluster)
    again = start_job(FOUR_SLOTS, *arguments)
    wait_for_iterations(again, 3)
    assert_equal_so_far(FOUR_SLOTS, fork_server, [job, again], tmp_path)
