"""The controller's process or host is lost, or hangs: its deputy takes its place, and the job goes on, bit for bit.

Each run has several losses, in each of which another process is the controller.
"""
from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from running import Running, assert_nothing_left
from support import (LONG, Harness, Undisturbed, assert_equal, completed, last_iteration, outcomes,  # noqa: F401
                     pid_of, undisturbed)

from analysis.log import read_run, text

NUM_PROCESSES = 14  # six slots on b0, b1, b2; spares on b3 to b6
EVERY = 8  # iterations, between checkpoints
TIMEOUT_S = 180.0
Start = Callable[..., Running]


def status(harness: Harness, job: Running) -> dict[str, Any]:
    finished = harness("status", "--run", job.run, "--json", np=None)
    assert finished.rc == 0, finished.err
    return json.loads(finished.out)


def wait_for_iteration(job: Running, iteration: int) -> None:
    job.wait_for(lambda: last_iteration(job.run) >= iteration, f"iteration {iteration} to end", TIMEOUT_S)


def kill(job: Running, *world_ranks: int) -> None:
    for pid in [pid_of(job.run, world_rank) for world_rank in world_ranks]:
        os.kill(pid, signal.SIGKILL)


def wait_for_controller(job: Running, world_rank: int, term: int) -> None:
    job.wait_for(lambda: f"world rank {world_rank} on b{world_rank // 2} takes its place, term {term}" in job.out,
                 f"world rank {world_rank} to be the controller", TIMEOUT_S)


def test_killed_controllers(start_harness: Start, harness: Harness, undisturbed: Undisturbed,  # noqa: F811
                            capsys: pytest.CaptureFixture[str]) -> None:
    """Slots 0 and 1 with the controller, a whole host; a spare in PREPARING; a spare whose commit its deputy alone has;
    a spare that has told one member alone to make room.

    Somebody waits for a move meanwhile. Old communicators are closed to make room, and rebuilt.
    """
    job = start_harness(*LONG.arguments(NUM_PROCESSES), "--checkpoint-every", EVERY, "--slow-joiner", "5",
                        "--fault", "kill@4:VERDICT#1", "--fault", "kill@2:PARKING#2", "--nccl-switch", "lazy",
                        "--allow-lazy", np=NUM_PROCESSES)
    wait_for_iteration(job, EVERY + 2)
    kill(job, 0, 1)
    wait_for_controller(job, 13, 1)
    job.wait_for(lambda: "recovery 0, generation 1: done: " in job.out, "the recovery", TIMEOUT_S)
    assert harness("request", "--run", job.run, "--vacate", "b1->b4", np=None).rc == 0
    job.wait_for(lambda: status(harness, job)["phase"] == "PREPARING", "the move to begin", TIMEOUT_S)
    kill(job, 13)
    wait_for_controller(job, 11, 2)
    waited = harness("request", "--run", job.run, "--vacate", "b2->b4", "--wait", np=None)
    assert waited.rc == 0 and "committed before iteration" in waited.out, waited.out + waited.err
    wait_for_controller(job, 12, 3)
    waited = harness("request", "--run", job.run, "--vacate", "b1->b2", "--wait", np=None)
    assert waited.rc == 1 and "was lost before its verdict" in waited.out, waited.out + waited.err
    result = completed(job.wait(TIMEOUT_S))
    (recovery,) = result["recoveries"]
    assert (sorted(recovery["lost"]), recovery["hosts"], recovery["slots"]) == ([0, 1], ["b0", "b0"], [0, 1])
    assert recovery["from_iteration"] in (EVERY, 2 * EVERY) and recovery["redone"] > 0
    assert recovery["keeps_bits"] is True
    assert outcomes(result) == ["ABORTED", "COMMITTED", "ABORTED"]
    assert (result["generation"], result["term"]) == (2, 4)
    assert "the controller, world rank 13, was lost before its verdict" in result["moves"][0]["reason"]
    assert result["moves"][1]["assignments"] == [[4, 4, 8], [5, 5, 9]]
    assert "10 old groups, closed to make room (policy lazy), were rebuilt" in result["moves"][2]["reason"]
    assert [(fault["text"], fault["fired"]) for fault in result["faults"]] == [("kill@4:VERDICT#1", 1),
                                                                               ("kill@2:PARKING#2", 1)]
    assert [row["iteration"] for row in result["checkpoints"]] == sorted({row["iteration"] for row in
                                                                          result["checkpoints"]})
    assert_equal(LONG, undisturbed(LONG), job.run)
    assert_nothing_left(job.run)
    with capsys.disabled():
        print(f"\nthe controller's host killed: noticed {recovery['detect_s']:.2f} s after its last word, first "
              f"iteration {recovery['recovery_s']:.2f} s later")


def test_a_controller_that_hangs(start_harness: Start, harness: Harness,
                                 undisturbed: Undisturbed) -> None:  # noqa: F811
    """Its process is stopped, and holds slot 0, while members of a move wait for a joiner that hangs, on the store that
    it serves. Later it wakes up under another controller's term, and must end.
    """
    number = 10
    job = start_harness(*LONG.arguments(number), "--heartbeat-timeout", "4", np=number)
    wait_for_iteration(job, 4)
    pids = [pid_of(job.run, world_rank) for world_rank in (6, 0)]
    os.kill(pids[0], signal.SIGSTOP)
    assert harness("request", "--run", job.run, "--vacate", "b1->b3", np=None).rc == 0
    job.wait_for(lambda: status(harness, job)["phase"] == "PREPARING", "the move to begin", TIMEOUT_S)
    os.kill(pids[1], signal.SIGSTOP)
    wait_for_controller(job, 9, 1)
    job.wait_for(lambda: "recovery 0, generation 1: done: " in job.out, "the recovery", TIMEOUT_S)
    assert set(pids) <= set(job.pids())
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    job.wait_for(lambda: not set(pids) & set(job.pids()), "the processes that hung to end", TIMEOUT_S)
    found = status(harness, job)
    assert (found["controller"], found["term"], found["lost"]) == (9, 1, [0, 6]), "it has written no address of its own"
    result = completed(job.wait(TIMEOUT_S))
    (recovery,) = result["recoveries"]
    assert (recovery["lost"], recovery["slots"], recovery["from_iteration"]) == ([0], [0, 1], 0)
    assert recovery["to"] == [8, 9] and recovery["keeps_bits"] is True
    assert "not heard for" in recovery["why"]
    own = [text(row["text"]) for row in read_run(job.run).events if row["world_rank"] == 0]
    assert any("was the controller, term 0, and was held for lost" in line for line in own), own
    assert_equal(LONG, undisturbed(LONG), job.run)
