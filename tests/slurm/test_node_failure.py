"""A node of a real Slurm fails unannounced: the job ends everywhere, and another goes on from its checkpoint."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drained import FOUR_SLOTS, TIMEOUT_S, assert_equal_so_far, bring_back, start_job, wait_for_iterations  # noqa: F401
from running import Running, assert_nothing_left

from migration.forkserver import ForkServer
from migration.options import REQUEUE_CODE
from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(900)


def test_a_node_that_dies_ends_the_job_which_can_be_requeued(cluster: Cluster, start_job: Callable[..., Running],  # noqa: F811
                                                             fork_server: ForkServer, tmp_path: Path) -> None:
    """Its slurmd and its processes are killed; no process stays on the other nodes, and the step ends."""
    arguments = ("--checkpoints", str(tmp_path / "checkpoints"), "--checkpoint-every", "4")
    job = start_job(FOUR_SLOTS, *arguments)
    wait_for_iterations(job, 7)
    cluster.kill_node("b1")
    finished = job.wait(TIMEOUT_S)
    result = json.loads((job.run / "result.json").read_text())
    assert result["status"] == "failed" and "on b1 died" in result["error"], result
    assert (result["requeue"], result["exit_code"]) == (True, REQUEUE_CODE), result
    assert sum("died" in line for line in finished.err.splitlines()) == 1, finished.err
    assert_nothing_left(job.run)
    bring_back(cluster)
    again = start_job(FOUR_SLOTS, *arguments)
    wait_for_iterations(again, 3)
    assert_equal_so_far(FOUR_SLOTS, fork_server, [job, again], tmp_path)
