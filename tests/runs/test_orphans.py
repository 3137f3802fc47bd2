"""However a run ends, no process of it is left; and an error that ends it is told once."""
from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Finished, Running, assert_nothing_left
from support import Case, last_iteration, pid_of

from migration.forkserver import ADDRESS_VARIABLE, ForkServer
from migration.options import REQUEUE_CODE

HARNESS = Path(__file__).resolve().parents[2] / "harness.py"
CASE = Case(iterations=100_000)  # until it is ended
TIMEOUTS = ("--orphan-timeout", "5", "--heartbeat-timeout", "5")
BAD_TOKEN = 300
Start = Callable[..., Running]


@pytest.fixture
def start_mpirun(tmp_path: Path, fork_server: ForkServer) -> Iterator[Start]:
    """start_mpirun(*args) -> Running: plain `mpirun -n 8 python harness.py ARGS --run DIR`, as a user may type it."""
    started: list[Running] = []

    def start(*args: object) -> Running:
        mpirun = Path(sys.executable).with_name("mpirun")
        run = tmp_path / f"mpirun{len(started)}"
        command = [str(mpirun), "-n", "8", sys.executable, str(HARNESS), *map(str, args), "--run", str(run)]
        started.append(Running(command, run=run, env=os.environ | {ADDRESS_VARIABLE: fork_server.address}))
        return started[-1]

    yield start
    for job in started:
        if job.process.poll() is None:
            job.kill()
        assert_nothing_left(job.run)


@pytest.fixture(params=["np", "mpirun"])
def start(request: pytest.FixtureRequest) -> Start:
    """Both ways to start a run."""
    return request.getfixturevalue("start_harness" if request.param == "np" else "start_mpirun")


def train(start: Start, *args: str) -> Running:
    job = start(*CASE.arguments(8), *TIMEOUTS, *args)
    job.wait_for(lambda: last_iteration(job.run) >= 1, "iteration 1 to end")
    return job


def ended_badly(job: Running) -> Finished:
    finished = job.wait(60)
    assert finished.rc != 0
    assert_nothing_left(job.run)
    return finished


@pytest.fixture
def dataset_with_a_bad_token(tmp_path: Path) -> Path:
    """An indexed dataset, written byte by byte, of which one window of forty has a token outside the vocabulary."""
    num_tokens = 40 * 64 + 1
    tokens = [i % 256 for i in range(num_tokens)]
    tokens[17 * 64 + 5] = BAD_TOKEN
    prefix = tmp_path / "corpus"
    (tmp_path / "corpus.bin").write_bytes(struct.pack(f"<{num_tokens}H", *tokens))
    uint16 = 8
    index = struct.pack("<QBQQiqqq", 1, uint16, 1, 2, num_tokens, 0, 0, 1)  # one sequence, one document
    (tmp_path / "corpus.idx").write_bytes(b"MMIDIDX\0\0" + index)
    return prefix


def test_error_of_one_process_ends_all_with_one_message(start: Start, dataset_with_a_bad_token: Path) -> None:
    """One data-parallel rank meets the bad token, in the midst of training; the others only miss their neighbour."""
    job = start(*Case(iterations=1000).arguments(8), "--data", dataset_with_a_bad_token)
    finished = ended_badly(job)
    lines = [line for line in (finished.out + finished.err).splitlines() if f"is {BAD_TOKEN}" in line]
    assert len(lines) == 1, finished.out + finished.err
    assert str(dataset_with_a_bad_token) in lines[0] and "vocab_size" in lines[0]
    result = json.loads((job.run / "result.json").read_text())
    assert result["status"] == "failed" and f"is {BAD_TOKEN}" in result["error"]


@pytest.mark.fast
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_launcher_is_ended(start: Start, signum: signal.Signals) -> None:
    """The launcher of --np, or the user's own mpirun."""
    job = train(start)
    job.process.send_signal(signum)
    ended_badly(job)


@pytest.mark.parametrize("world_rank", [0, 3], ids=["controller", "slot"])
def test_process_is_killed(start: Start, world_rank: int) -> None:
    """The controller, in whose place its deputy ends the job; and another process that holds a slot, where a spare may
    not take it."""
    job = train(start, "--recover", "off")
    os.kill(pid_of(job.run, world_rank), signal.SIGKILL)
    ended_badly(job)


def test_lost_slot_fails_the_run(start_harness: Start) -> None:
    """Of seven processes one is a spare: the first loss is recovered from, the second one can't be."""
    job = start_harness(*CASE.arguments(14), *TIMEOUTS, "--checkpoint-every", "2", "--hosts", "a,b,c,d,e,f,g", np=7)
    for number in (3, 4):
        job.wait_for(lambda: last_iteration(job.run) >= 2 * number - 4, "some iterations to end")
        os.kill(pid_of(job.run, number), signal.SIGKILL)
        job.wait_for(lambda: ": done: " in job.out or job.process.poll() is not None, "a recovery, or the end")
    finished = ended_badly(job)
    result = json.loads((job.run / "result.json").read_text())
    assert (result["status"], result["requeue"], finished.rc) == ("failed", True, REQUEUE_CODE)
    assert "world rank 4 on e is lost: " in result["error"] and "; 0 spares are too few to go on" in result["error"]
    assert [recovery["lost"] for recovery in result["recoveries"]] == [[3]]
    assert sum("world rank 4 on e is lost" in line for line in finished.err.splitlines()) == 1, finished.err


def test_stopped_controller_and_deputy_are_noticed(start_harness: Start) -> None:
    """They live but say nothing: whoever hears no controller for the orphan time-out ends itself."""
    job = train(start_harness)
    stopped = [pid_of(job.run, world_rank) for world_rank in (0, 7)]
    others = {pid_of(job.run, world_rank) for world_rank in range(1, 7)}
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        job.wait_for(lambda: not others & set(job.pids()), "all others to end", timeout_s=30)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    ended_badly(job)
