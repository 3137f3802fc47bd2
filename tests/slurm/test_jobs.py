"""The shape of m24 (four nodes, one of spares) with a tiny profile, on a real Slurm: submitted as users do it.

Each way to start one is tested with a move, and compared bit for bit with the same job that had no Slurm, no spares and
no move.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import ROOT, SlurmJob, Submit
from running import assert_nothing_left, find_processes
from support import Case, assert_equal, assert_moves, final_digests, last_iteration, trace

from analysis.log import read_run
from migration.footprint import read_footprints
from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(900)

SHORT = Case()
# shorter than support.py's, since all of a Slurm's processes share the cores of one machine
LONG = Case(iterations=60, settings=("num_microbatches=1",))
B1_TO_B3 = [[2, 2, 6], [3, 3, 7]]  # slot, leaver, joiner: the hosts are Slurm's nodes, in its order


def result_of(job: SlurmJob, state: str = "COMPLETED") -> dict:
    assert job.wait() == state, job.out[-3000:]
    result = json.loads((job.run() / "result.json").read_text())
    assert result["status"] == "completed", result
    return result


def test_a_batch_job_vacates_a_node_on_request(submit: Submit, undisturbed: Callable[[Case], Path],
                                               capsys: pytest.CaptureFixture[str]) -> None:
    twin = undisturbed(LONG)
    job = submit(*LONG.changes)
    job.wait_for(lambda: last_iteration(job.run()) >= 2, "iteration 2")
    asked = subprocess.run([sys.executable, str(ROOT / "harness.py"), "request", "--run", str(job.run()), "--vacate",
                            "b1", "--wait"], capture_output=True, text=True, timeout=200)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    result = result_of(job)
    assert_moves(result, [(result["moves"][0]["iteration"], B1_TO_B3)])
    assert_equal(LONG, twin, job.run())
    assert f"{job.run()}: completed" in job.out
    started_s = float(read_run(job.run()).iterations["start_s"].min())
    with capsys.disabled():
        print(f"\nSlurm, 8 processes on 4 nodes: {started_s - job.submitted_s:.1f} s from submission to the first "
              f"iteration; downtime {result['moves'][0]['downtime_s'] * 1e3:.0f} ms")


def test_a_job_whose_time_is_over_is_requeued_and_goes_on(submit: Submit, undisturbed: Callable[[Case], Path],
                                                          cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's signal ahead of the limit comes to the batch shell; what follows is the script's and the job's doing."""
    twin = undisturbed(LONG)
    job = submit(*LONG.changes, site=f'checkpoints = "{tmp_path}/checkpoints"')
    job.wait_for(lambda: last_iteration(job.run()) >= 2, "iteration 2")
    cluster.command("scancel", "--batch", "--signal=USR1", str(job.id))
    job.wait_for(lambda: (job.run() / "result.json").exists(), "the first run's end")
    assert json.loads((job.run() / "result.json").read_text())["requeue"] is True
    assert job.wait() == "COMPLETED", job.out[-3000:]
    assert job.runs() == [job.run(0), job.run(1)] and "signal USR1" in job.out
    first, second, whole = trace(read_run(job.run(0))), trace(read_run(job.run(1))), trace(read_run(twin))
    assert not first.keys() & second.keys() and {0, LONG.iterations - 1} <= {i for i, _ in first | second}
    assert first | second == whole
    assert final_digests(read_run(job.run(1))) == final_digests(read_run(twin))


def test_a_job_that_loses_a_process_is_requeued_from_its_checkpoint(submit: Submit, tmp_path: Path,
                                                                   undisturbed: Callable[[Case], Path]) -> None:
    """No spare takes its slot. Nobody does anything: the script asks for the verdict, and Slurm starts it again."""
    twin = undisturbed(LONG)
    job = submit(*LONG.changes, "--checkpoint-every", "4", "--recover", "off",
                 site=f'checkpoints = "{tmp_path}/checkpoints"')
    job.wait_for(lambda: last_iteration(job.run()) >= 9, "iteration 9")
    (lost,) = [footprint for footprint in read_footprints(str(job.run())) if footprint.world_rank == 3]
    os.kill(lost.pid, signal.SIGKILL)
    job.wait_for(lambda: (job.run() / "result.json").exists(), "the first run's end")
    result = json.loads((job.run() / "result.json").read_text())
    assert (result["status"], result["requeue"]) == ("failed", True) and "world rank 3 on b1" in result["error"], result
    assert job.wait() == "COMPLETED", job.out[-3000:]
    first, second, whole = trace(read_run(job.run(0))), trace(read_run(job.run(1))), trace(read_run(twin))
    assert {LONG.iterations - 1} <= {i for i, _ in second} and min(i for i, _ in second) % 4 == 0
    assert all(whole[key] == row for key, row in first.items()) and {**first, **second} == whole
    assert final_digests(read_run(job.run(1))) == final_digests(read_run(twin))


@pytest.mark.parametrize("options", [("--launcher", "mpirun"), ("--salloc",)], ids=["mpirun", "salloc"])
def test_other_ways_to_start(options: tuple[str, ...], submit: Submit, undisturbed: Callable[[Case], Path]) -> None:
    job = submit(*SHORT.changes, "--vacate", "b1@6", "--hold", options=options)
    assert_moves(result_of(job), [(6, B1_TO_B3)])
    assert_equal(SHORT, undisturbed(SHORT), job.run())


def test_a_cancelled_job_leaves_no_process(submit: Submit, cluster: Cluster) -> None:
    """The copies that share imports are no children of the step, and must end with it all the same."""
    job = submit(*LONG.changes)
    job.wait_for(lambda: last_iteration(job.run()) >= 0, "the first iteration")
    assert len(find_processes(job.run())) >= 16  # light processes and their copies
    cluster.command("scancel", str(job.id))
    assert job.wait() == "CANCELLED"
    assert_nothing_left(job.run())


def test_a_wrong_argument_is_refused_before_anything_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    wrong = subprocess.run([sys.executable, "-m", "slurm", "submit", "--", "--vacate", "b1@99999"], cwd=ROOT,
                           env=cluster.environment(), capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "b1@99999" in wrong.stderr
    (tmp_path / "site.toml").write_text('partition = "nowhere"')
    refused = subprocess.run([sys.executable, "-m", "slurm", "submit", "--site", str(tmp_path / "site.toml")], cwd=ROOT,
                             env=cluster.environment(), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert refused.stderr.startswith("slurm: sbatch refused the job: ")


def test_the_recorded_job_is_one_that_slurm_takes(cluster: Cluster) -> None:
    taken = subprocess.run(["sbatch", "--test-only", "slurm/m24.sbatch"], cwd=ROOT, env=cluster.environment(),
                           capture_output=True, text=True, timeout=60)
    assert taken.returncode == 0, taken.stderr
    assert "on nodes b[0-3]" in taken.stderr, taken.stderr
