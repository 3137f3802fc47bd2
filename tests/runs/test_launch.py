"""The launcher: the exit code is the run's, and whatever ends the launcher ends the job."""
from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import Running, assert_nothing_left
from test_forkserver import Start, facts, server, start  # noqa: F401  (fixtures)

from migration import launch as launch_module
from migration.errors import UserError
from migration.launch import launch

pytestmark = pytest.mark.fast
EACH_WAY = pytest.mark.parametrize("env", [{}, {"DUMMY_ALONE": "1"}], ids=["shared", "alone"])


@pytest.mark.parametrize("mode, rc", [("ranks", 0), ("failed", 1), ("no_result", 1), ("exit", 1)])
def test_exit_code_is_the_result(start: Start, mode: str, rc: int) -> None:
    done = start(mode, np=2, address=None).wait(60)  # with a fork server of its own
    assert done.rc == rc
    assert ("ended without a result" in done.err) is (mode in ("no_result", "exit"))


@EACH_WAY
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_launcher_told_to_end(start: Start, signum: signal.Signals, env: dict[str, str]) -> None:
    running = start("wait", np=3, env=env)
    facts(running, 3)
    running.process.send_signal(signum)
    assert running.wait(30).rc == 128 + signum
    assert_nothing_left(running.run)


@EACH_WAY
@pytest.mark.parametrize("victim", ["launcher", "mpiexec"])
@pytest.mark.parametrize("address", [None, "session"], ids=["own_server", "session_server"])
def test_killed_launch_leaves_nothing(start: Start, victim: str, address: str | None, env: dict[str, str]) -> None:
    running = start("wait", np=3, env=env, **({} if address else {"address": None}))
    facts(running, 3)
    os.kill(running.process.pid if victim == "launcher" else _find(running, "mpiexec"), signal.SIGKILL)
    assert running.wait(30).rc == (-signal.SIGKILL if victim == "launcher" else 1)
    assert_nothing_left(running.run)


def test_processes_that_leave_at_once_leave_their_neighbours(start: Start) -> None:
    """With shared imports mpiexec must not see it: it breaks in one of thirty such cases and takes the job along."""
    running = start("wait", np=8)
    ranks = facts(running, 8)
    for rank, signum in ((1, signal.SIGKILL), (2, signal.SIGUSR2), (5, signal.SIGKILL), (6, signal.SIGUSR2)):
        os.kill(ranks[rank]["pid"], signum)
    leavers = {ranks[rank]["pid"] for rank in (1, 2, 5, 6)}
    running.wait_for(lambda: not leavers & set(running.pids()), "four processes to be gone")
    others = {rank["pid"] for rank in ranks} - leavers
    assert others | {rank["light_pid"] for rank in ranks} <= set(running.pids())
    for pid in others:
        os.kill(pid, signal.SIGUSR2)
    assert running.wait(30).rc == 1  # it left no result
    assert_nothing_left(running.run)


def _find(running: Running, name: str) -> int:
    (pid,) = [pid for pid in running.pids() if Path(f"/proc/{pid}/comm").read_text().strip().startswith(name)]
    return pid


def test_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(UserError, match="there is a finished run in it"):
        launch(2, [], run_dir=tmp_path)


def test_no_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="pip install mpich"):
        launch(2, [], run_dir=tmp_path)


def test_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    other.chmod(0o755)
    monkeypatch.setattr(launch_module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="is not MPICH's mpiexec"):
        launch(2, [], run_dir=tmp_path)
