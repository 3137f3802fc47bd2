"""A process that holds a slot is killed, or hangs: the job goes on in the processes that live, equal to the last bit.

Each run has several losses, and checks of everything that a recovery must leave behind. Whatever was done before it is
compared too: redone iterations must have the same bits as those that were lost.
"""
from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Finished, Running, assert_nothing_left
from support import (Case, Undisturbed, assert_equal, completed, last_iteration, outcomes, pid_of,  # noqa: F401
                     undisturbed)

from analysis.log import Run, read_run, text
from analysis.report import main as report

CASE = Case(iterations=84, settings=("num_microbatches=1",))
NUM_PROCESSES = 12  # six slots on b0, b1, b2; spares on b3, b4, b5
EVERY = 8  # iterations, between checkpoints
TIMEOUT_S = 180.0
Start = Callable[..., Running]


def kill(job: Running, *world_ranks: int, after: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Once iteration `after` has ended somewhere."""
    job.wait_for(lambda: last_iteration(job.run) >= after, f"iteration {after} to end", TIMEOUT_S)
    for pid in [pid_of(job.run, world_rank) for world_rank in world_ranks]:
        os.kill(pid, signum)


def next_after_a_checkpoint(job: Running) -> int:
    """An iteration to come, two after one before which a checkpoint is saved: a loss there costs some."""
    return (last_iteration(job.run) // EVERY + 1) * EVERY + 2


def wait_for_recovery(job: Running, number: int) -> None:
    job.wait_for(lambda: any(line.startswith(f"recovery {number}, ") and ": done: " in line
                             for line in job.out.splitlines()), f"recovery {number}", TIMEOUT_S)


def owners(run: Run, slot: int, generation: int) -> set[int]:
    rows = run.iterations[(run.iterations["slot"] == slot) & (run.iterations["generation"] == generation)]
    return set(rows["world_rank"].tolist())


def assert_redone(run: Run, recovery: dict[str, Any]) -> None:
    """What was done twice is in the log twice, from the iteration on from which the job went on."""
    redone = run.redone[run.redone["generation"] < recovery["generation"]]
    assert len(redone) and redone["iteration"].min() >= recovery["from_iteration"]
    assert redone["iteration"].max() < recovery["from_iteration"] + recovery["redone"]


def told(capsys: pytest.CaptureFixture[str], result: dict[str, Any], what: str) -> None:
    for recovery in result["recoveries"]:
        with capsys.disabled():
            print(f"\n{what}: world ranks {recovery['lost']} noticed {recovery['detect_s']:.2f} s after their last "
                  f"word, first iteration {recovery['recovery_s']:.2f} s later, {recovery['redone']} iterations again")


def test_killed_processes_are_replaced_and_moves_go_on(start_harness: Start, undisturbed: Undisturbed,  # noqa: F811
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """One of b1, whose other process leaves its slot too; then both of b2, a whole host; then a planned move; then one
    of b0's new host, in whose place the one of b1 that stood by is all that is left."""
    job = start_harness(*CASE.arguments(NUM_PROCESSES), "--checkpoint-every", EVERY, "--checkpoint-digests",
                        "--vacate", "b0@50", "--hold", np=NUM_PROCESSES)
    kill(job, 3, after=EVERY + 2)
    wait_for_recovery(job, 0)
    kill(job, 4, 5, after=next_after_a_checkpoint(job))
    wait_for_recovery(job, 1)
    job.wait_for(lambda: "move b0@50 committed" in job.out, "the move", TIMEOUT_S)
    kill(job, 0, 1, 10, after=7 * EVERY + 2)  # two spares, and one that has their slots
    result = completed(job.wait(TIMEOUT_S))
    first, second, third = result["recoveries"]
    assert (first["lost"], first["hosts"], first["slots"], first["to"]) == ([3], ["b1"], [2, 3], [6, 7])
    assert (sorted(second["lost"]), second["hosts"], second["slots"]) == ([4, 5], ["b2", "b2"], [4, 5])
    assert second["to"] == [8, 9], "a host's slots go to one host"
    assert (third["lost"], third["hosts"], third["slots"], third["to"]) == ([10], ["b5"], [0], [2])
    assert [recovery["keeps_bits"] for recovery in result["recoveries"]] == [True] * 3
    assert "; sums keep their bits" in job.out and "other bits" not in job.out
    for generation, recovery in zip((1, 2, 4), result["recoveries"]):  # 2 to 3 is the move
        assert recovery["generation"] == generation and recovery["from_iteration"] % EVERY == 0
        assert recovery["from_iteration"] > 0 and recovery["redone"] > 0
        assert recovery["checkpoint"].endswith(f"iteration{recovery['from_iteration']:08d}")
        assert recovery["detect_s"] > 0 and recovery["recovery_s"] > 0
    assert outcomes(result) == ["COMMITTED"] and result["generation"] == 4
    assert result["moves"][0]["assignments"] == [[0, 0, 10], [1, 1, 11]] and result["moves"][0]["iteration"] == 50
    run = read_run(job.run)
    assert_redone(run, first)
    assert owners(run, 2, 0) == {2} and owners(run, 2, 1) == {6} and owners(run, 3, 1) == {7}
    assert owners(run, 0, 3) == {10} and owners(run, 0, 4) == {2} and owners(run, 1, 4) == {11}
    assert_equal(CASE, undisturbed(CASE), job.run)
    assert_nothing_left(job.run)
    assert report([str(job.run)]) == 0
    shown = capsys.readouterr().out
    assert ("recovery 0, generation 1: slot 2 goes to world rank 6 on b3, slot 3 goes to world rank 7 on b3, world "
            "rank 2 on b1 stands by") in shown
    assert "    RECOVERING load " in shown
    assert {path.name for path in job.run.glob("*.png")} == {"gantt.png", "iteration_times.png"}
    told(capsys, result, "killed")


def test_a_process_that_hangs_and_losses_in_a_move(start_harness: Start, undisturbed: Undisturbed,  # noqa: F811
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """A leaver dies in SWITCHING, a joiner just after the commit; then a process hangs, and comes back to life later.

    There is no checkpoint, so each time the job starts over.
    """
    number = NUM_PROCESSES + 4
    job = start_harness(*CASE.arguments(number), "--vacate", "b1->b3@6", "--vacate", "b2->b4@10", "--hold", "--fault",
                        "kill@2:LEAVING#0", "--fault", "kill@4:COMMITTED#1", "--heartbeat-timeout", "8", np=number)
    wait_for_recovery(job, 1)
    kill(job, 1, after=last_iteration(job.run) + 2, signum=signal.SIGSTOP)
    wait_for_recovery(job, 2)
    assert json.loads((job.run / "processes" / "w0001.json").read_text())["pid"] in job.pids()
    os.kill(pid_of(job.run, 1), signal.SIGCONT)  # it must end, and hurt nobody
    pid = pid_of(job.run, 1)
    job.wait_for(lambda: pid not in job.pids(), "the process that hung to end", TIMEOUT_S)
    result = completed(job.wait(TIMEOUT_S))
    assert [recovery["lost"] for recovery in result["recoveries"]] == [[2], [8], [1]]
    assert [recovery["slots"] for recovery in result["recoveries"]] == [[2, 3], [], [0, 1]]
    assert [recovery["to"] for recovery in result["recoveries"]] == [[6, 7], [], [10, 11]]
    assert [recovery["keeps_bits"] for recovery in result["recoveries"]] == [True] * 3
    assert result["term"] == 1, "the first controller's process lost its slot, and handed its role over"
    assert [recovery["from_iteration"] for recovery in result["recoveries"]] == [0, 0, 0]
    assert [recovery["checkpoint"] for recovery in result["recoveries"]] == [None] * 3
    assert [recovery["generation"] for recovery in result["recoveries"]] == [1, 3, 4], "1 to 2 is the commit"
    assert outcomes(result) == ["ABORTED", "ABORTED"] and result["generation"] == 4
    assert "world rank 2 on b1 is lost" in result["moves"][0]["reason"]
    assert "world rank 8 on b4 is lost" in result["moves"][1]["reason"]
    assert {fault["fired"] for fault in result["faults"]} == {1} and len(result["faults"]) == 2
    run = read_run(job.run)
    assert owners(run, 4, 4) == {4}, "a joiner that dies before all have acknowledged has taken nothing over"
    assert not any("Recovering" in text(row["text"]) for row in run.events if text(row["kind"]) == "error")
    assert_equal(CASE, undisturbed(CASE), job.run)
    told(capsys, result, "in a move, and hung")


def test_a_joiner_that_hangs_after_the_commit(harness: Callable[..., Finished],
                                              undisturbed: Undisturbed) -> None:  # noqa: F811
    """It is alive and heard of, but never goes on: the commit is undone, and the job does without it."""
    number = 10
    job = harness(*CASE.arguments(number), "--vacate", "b1->b3@6", "--hold", "--switch-deadline", "4",
                  "--fault", "hang@2:COMMITTED", np=number)
    result = completed(job)
    assert [(recovery["lost"], recovery["slots"]) for recovery in result["recoveries"]] == [([6], [])]
    assert "the acknowledgement of the commit took longer than 4 s, and its own is missing" in job.out
    assert outcomes(result) == ["ABORTED"] and result["generation"] == 2
    assert_equal(CASE, undisturbed(CASE), job.run)
    assert_nothing_left(job.run)
