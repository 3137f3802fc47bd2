"""The fork server: a copy is the process that asked, ends as it should, and dies with whom it should."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dummy_ranks
import pytest
from running import Running, assert_nothing_left

from migration.forkserver import ADDRESS_VARIABLE, ForkServer

pytestmark = pytest.mark.fast
Start = Callable[..., Running]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(preload="dummy_ranks:preload", entry="dummy_ranks:run") as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, server: ForkServer) -> Iterator[Start]:
    """start(mode, np=None, env={}, address=...) -> Running: dummy_ranks.py, in the run folder, with a fork server."""
    started: list[Running] = []

    def start_one(mode: str, *, np: int | None = None, env: dict[str, str] | None = None,
                  address: str | None = server.address) -> Running:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        command = [sys.executable, dummy_ranks.__file__, *(["--np", str(np)] if np else []), "--run", str(folder), mode]
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)} | (env or {})
        environment.pop(ADDRESS_VARIABLE, None)
        if address is not None:
            environment[ADDRESS_VARIABLE] = address
        started.append(Running(command, run=folder, env=environment))
        return started[-1]

    yield start_one
    for running in started:
        running.kill()
        assert_nothing_left(running.run)


def facts(running: Running, num_ranks: int = 1) -> list[dict]:
    """What each rank wrote, in the order of ranks; waits for it."""
    files = [running.run / f"rank{rank}.json" for rank in range(num_ranks)]
    running.wait_for(lambda: all(file.exists() for file in files), f"{num_ranks} ranks to report")
    return [json.loads(file.read_text()) for file in files]


def test_copy_is_the_process_that_asked(start: Start, server: ForkServer) -> None:
    running = start("wait", env={"DUMMY_MARK": "ünïcode \udcff"})
    (copy,) = facts(running)
    assert copy["forked"] and copy["pid"] != copy["light_pid"] == running.process.pid
    assert copy["cwd"] == str(running.run.parent) and copy["mark"] == "ünïcode \udcff"
    assert copy["argv"] == running.command[1:]
    assert copy["cmdline"] == running.command, "ps must show a copy as the process it stands for"
    assert copy["num_threads"] == 1
    assert copy["num_fds"] == 4, "stdin, stdout, stderr and the listing itself; nothing of the server's"
    assert {copy["pid"], copy["light_pid"]} == set(running.pids())


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_under_mpiexec(start: Start, server: ForkServer, shared: bool) -> None:
    running = start("ranks", np=4, env={} if shared else {"DUMMY_ALONE": "1"})
    done = running.wait(60)
    assert done.rc == 0, running.tail()
    ranks = facts(running, 4)
    assert [(rank["size"], rank["rank"], rank["sum"]) for rank in ranks] == [(4, r, 6) for r in range(4)]
    assert all(rank["forked"] is shared for rank in ranks)
    assert len({rank["pid"] for rank in ranks}) == 4
    assert all(f"rank {rank} was here" in done.out for rank in range(4))


def test_a_server_with_a_thread_makes_no_copies(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with ForkServer(preload="dummy_ranks:preload_with_a_thread", entry="dummy_ranks:run") as server:
        running = start("ranks", np=3, address=server.address)
        done = running.wait(60)
    assert done.rc == 0, running.tail()
    assert [(rank["rank"], rank["forked"]) for rank in facts(running, 3)] == [(r, False) for r in range(3)]
    assert "left threads (" in (said := capfd.readouterr().err) and "each rank imports for itself" in said


def test_exit_code(start: Start) -> None:
    assert start("exit").wait(30).rc == 7


def test_uncaught_exception(start: Start) -> None:
    done = start("raise").wait(30)
    assert done.rc == 1 and "RuntimeError: this was to be expected" in done.err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_copy_that_died_by_a_signal(start: Start, signum: signal.Signals) -> None:
    running = start("wait")
    os.kill(facts(running)[0]["pid"], signum)
    assert running.wait(30).rc == -signum


@pytest.mark.parametrize("signum, rc", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR2, 12)])
def test_signals_go_on_to_the_copy(start: Start, signum: signal.Signals, rc: int) -> None:
    running = start("wait")
    facts(running)
    running.process.send_signal(signum)
    assert running.wait(30).rc == rc


def test_copy_dies_with_its_light_process(start: Start) -> None:
    running, other = start("wait"), start("wait")
    facts(running), facts(other)
    running.process.kill()
    running.wait(30)
    assert_nothing_left(running.run)
    assert len(other.pids()) == 2, "another copy must not be touched"


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_copies_die_with_the_server(start: Start, how: str) -> None:
    server = ForkServer(preload="dummy_ranks:preload", entry="dummy_ranks:run")
    try:
        running = start("wait", address=server.address)
        facts(running)
        if how == "killed":
            os.kill(server.pid, signal.SIGKILL)
        else:
            server.close()
        done = running.wait(30)
        assert done.rc == 1 and "fork server is gone" in done.err
        assert_nothing_left(running.run)
    finally:
        server.close()
    assert not os.path.exists(server.address) and not os.path.exists(os.path.dirname(server.address))
    assert not os.path.exists(f"/proc/{server.pid}")


def test_server_that_cannot_import(start: Start) -> None:
    code = "from migration.forkserver import ForkServer; s = ForkServer(preload='no_such:thing', entry='a:b'); " \
           "print(s.address, flush=True); input()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=environment) as creator:
        assert creator.stdout is not None
        done = start("exit", address=creator.stdout.readline().strip()).wait(30)
        _, err = creator.communicate("\n")
    assert done.rc == 1 and ("fork server is gone" in done.err or "no fork server answers" in done.err)
    assert "No module named 'no_such'" in err


def test_no_server(start: Start, tmp_path: Path) -> None:
    done = start("exit", address=str(tmp_path / "nowhere")).wait(30)
    assert done.rc == 1 and "no fork server answers there" in done.err
