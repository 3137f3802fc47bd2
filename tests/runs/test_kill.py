"""`harness.py kill`: in whatever state a run is, no process of it is there afterwards, and their number is told."""
from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Running, assert_nothing_left, find_processes
from support import Case, Harness, last_iteration, refused
from test_orphans import start_mpirun  # noqa: F401  (a fixture)

from migration.footprint import FOLDER, Footprint, read_footprints, write_footprint

FOREVER = Case(iterations=100_000)
Start = Callable[..., Running]


def wait_until_it_trains(job: Running) -> Running:
    # what is killed needn't hurry
    job.wait_for(lambda: last_iteration(job.run) >= 1, "iteration 1 to end", timeout_s=150)
    return job


def test_a_run_that_answers_is_asked(start_harness: Start, harness: Harness) -> None:
    """The controller ends it, so there is a result; killing what has ended is no error."""
    job = wait_until_it_trains(start_harness(*FOREVER.arguments(8)))
    finished = harness("kill", "--run", job.run, "--grace", "60", np=None)
    assert finished.rc == 0, finished.err
    assert "8 processes on 4 hosts ended" in finished.out and finished.out.endswith("none left\n"), finished.out
    assert not find_processes(job.run)
    assert job.wait(5).rc == 1
    result = json.loads((job.run / "result.json").read_text())
    assert result["status"] == "failed" and "ended by harness.py kill" in result["error"]
    again = harness("kill", "--run", job.run, np=None)
    assert (again.rc, again.out) == (0, "0 processes on 0 hosts ended, none left\n")


@pytest.mark.parametrize("way", ["start_harness", "start_mpirun"])
def test_a_run_that_hangs(way: str, request: pytest.FixtureRequest, harness: Harness) -> None:
    """Its controller and a slot are stopped: nobody answers, and SIGTERM does nothing to them."""
    job = wait_until_it_trains(request.getfixturevalue(way)(*FOREVER.arguments(8)))
    for footprint in read_footprints(str(job.run)):
        if footprint.world_rank in (0, 3):
            os.kill(footprint.pid, signal.SIGSTOP)
    finished = harness("kill", "--run", job.run, np=None)
    assert finished.rc == 0, finished.out + finished.err
    assert "one by one" in finished.out and "8 processes on 4 hosts ended" in finished.out, finished.out
    assert not find_processes(job.run)
    job.wait(20)
    assert_nothing_left(job.run)


# other machines; a program in the place of ssh


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A run folder with one process, which is on another machine."""
    run = tmp_path / "run"
    run.mkdir()
    write_footprint(str(run), 5, "b2")
    path = run / FOLDER / "w0005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere", "pid": 1 << 30}))
    assert isinstance(read_footprints(str(run))[0], Footprint)
    return run


def kill_with(harness: Harness, run: Path, ssh: str, tmp_path: Path) -> tuple[int, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    if ssh:
        (folder / "ssh").write_text(f"#!{sys.executable}\n{ssh}")
        (folder / "ssh").chmod(stat.S_IRWXU)
    finished = harness("kill", "--run", run, np=None, env={"PATH": str(folder)})
    return finished.rc, finished.out


def test_a_machine_that_cannot_be_reached_is_named(harness: Harness, elsewhere: Path, tmp_path: Path) -> None:
    code, out = kill_with(harness, elsewhere, "", tmp_path)
    assert code == 1 and "elsewhere can't be reached (neither srun nor ssh" in out and "these are left" in out
    assert f"kill --run {elsewhere} --here" in out.splitlines()[-1], out


def test_a_machine_that_refuses_is_named_with_its_words(harness: Harness, elsewhere: Path, tmp_path: Path) -> None:
    code, out = kill_with(harness, elsewhere, "import sys; sys.exit('permission denied')", tmp_path)
    assert code == 1 and "elsewhere can't be reached (ssh: permission denied); log in there and type" in out, out


def test_a_machine_that_answers(harness: Harness, elsewhere: Path, tmp_path: Path) -> None:
    """The same command runs there, and what it reports counts."""
    command = "import os, sys; assert 'elsewhere' in sys.argv; os.execv('/bin/sh', ['sh', '-c', sys.argv[-1]])"
    assert kill_with(harness, elsewhere, command, tmp_path)[0] == 0
    left = "print('{\"ended\": {\"b2\": 1}, \"num_others\": 2, \"left\": [\"process 9 on elsewhere: python\"]}')"
    (tmp_path / "bin" / "ssh").unlink()
    (tmp_path / "bin").rmdir()
    code, out = kill_with(harness, elsewhere, left, tmp_path)
    assert code == 1 and "1 processes on 1 hosts ended" in out and "process 9 on elsewhere: python" in out, out


@pytest.mark.parametrize("squeue, code", [("pass", 0), ("import sys; sys.exit('squeue: Invalid job id specified')", 0),
                                          ("print('RUNNING')", 1), ("import sys; sys.exit('no controller')", 1)])
def test_a_job_that_slurm_has_ended_needs_no_look(harness: Harness, elsewhere: Path, tmp_path: Path, squeue: str,
                                                  code: int) -> None:
    path = elsewhere / FOLDER / "w0005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job": "4", "node": "elsewhere"}))
    (tmp_path / "bin").mkdir()
    for name, text in (("squeue", squeue), ("srun", "import sys; sys.exit('job 4 has expired')")):
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    finished = harness("kill", "--run", elsewhere, np=None, env={"PATH": str(tmp_path / "bin")})
    assert finished.rc == code, finished.out
    assert ("none left" in finished.out) is (code == 0) and ("job 4 has expired" in finished.out) is (code == 1)


def test_no_run(harness: Harness, tmp_path: Path) -> None:
    refused(harness("kill", "--run", tmp_path / "nowhere", np=None), "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(harness("kill", "--run", tmp_path / "empty", np=None), "empty", "no run was started there")
