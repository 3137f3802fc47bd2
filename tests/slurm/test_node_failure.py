"""Nodes of a real Slurm that fail unannounced: the job ends everywhere, and says whether it can go on from where."""
from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from drained import FOUR_SLOTS, TIMEOUT_S, wait_for_iterations
from running import Running

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("node", ["b1"])
def test_a_node_that_dies_ends_the_job_everywhere(cluster: Cluster, start_job: Callable[..., Running], node: str) -> None:
    job = start_job(FOUR_SLOTS, "--heartbeat-timeout", "10", "--orphan-timeout", "20")
    wait_for_iterations(job, 3)
    cluster.kill_node(node)
    finished = job.wait(TIMEOUT_S)
    print(finished.seconds, finished.rc, finished.out[-1500:], finished.err[-1500:])
    result = json.loads((job.run / "result.json").read_text())
    assert result["status"] == "failed" and f"on {node} died" in result["error"], result
    assert cluster.command("squeue", "-h", "-o", "%T").split() in ([], ["COMPLETING"])
