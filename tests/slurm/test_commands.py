"""What an operator does with a job in Slurm: look before it, end it, and see mixed code refused."""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from drained import ALLOCATION, HARNESS, SRUN
from jobs import ROOT, Submit
from running import assert_nothing_left, find_processes
from support import LONG, last_iteration

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)
TIMEOUT_S = 240.0


def test_kill_leaves_nothing_and_nothing_is_requeued(submit: Submit) -> None:
    job = submit("--set", f"iterations={LONG.iterations * 100}")
    job.wait_for(lambda: last_iteration(job.run()) >= 1, "iteration 1")
    assert find_processes(job.run())
    killed = subprocess.run([sys.executable, str(HARNESS), "kill", "--run", str(job.run()), "--grace", "60"],
                            env=job.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert killed.returncode == 0 and killed.stdout.endswith("none left\n"), killed.stdout + killed.stderr
    assert "8 processes on 4 hosts ended" in killed.stdout
    assert job.wait() == "FAILED" and job.runs() == [job.run()], job.out[-3000:]
    assert_nothing_left(job.run())


def test_code_that_differs_on_a_node_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """b2 has a copy with one comment more; before anything heavy is loaded it is named, on an allocation of its own."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "build", "__pycache__"))
    with (copy / "migration" / "part.py").open("a") as file:
        file.write("# another version\n")
    run = tmp_path / "run"
    programs = "".join(f"{task} {sys.executable} {(copy if task in (4, 5) else ROOT) / 'harness.py'} --run {run}\n"
                       for task in range(8))
    (tmp_path / "programs").write_text(programs)
    done = subprocess.run(["salloc", *ALLOCATION, *SRUN, "--multi-prog", str(tmp_path / "programs")], cwd=tmp_path,
                          env={k: v for k, v in cluster.environment().items() if k != "LM_FORKSERVER"},
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("harness: ")]
    assert "host b2 (world ranks 4, 5" in line and "runs other code than host b0" in line and str(copy) in line
    assert_nothing_left(run)
