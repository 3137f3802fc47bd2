"""A real Slurm wants nodes back while a job trains: each is emptied and given back, and no loss changes.

One job a test, since a job's start is what costs. Every job is compared, as far as it came, with one left alone.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drained import (FOUR_SLOTS, SIX_SLOTS, TIMEOUT_S, assert_equal_so_far, said, start_job,  # noqa: F401
                     status, wait_for_iterations, wait_for_word)
from running import Running

from migration.forkserver import ForkServer
from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(600)


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
    assert "NodeList=b[2-3]" in shown, shown
    assert "Comment=Live Migrator: vacated and gave back b0 (failing (fan))" in shown, shown
    assert "b1 (draining (ECC | errors))" in shown
    assert any("b0 is failing (fan)" in line for line in said(job))
    assert_equal_so_far(FOUR_SLOTS, fork_server, [job], tmp_path)


def test_the_batch_host_and_too_few_spares(cluster: Cluster, start_job: Callable[..., Running],
                                           fork_server: ForkServer, tmp_path: Path) -> None:
    """The batch host is emptied, but stays. Undrained in time, it is a spare again, for the next node waits for one."""
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
    assert_equal_so_far(SIX_SLOTS, fork_server, [job], tmp_path)
