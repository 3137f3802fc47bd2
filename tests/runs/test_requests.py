"""Moves asked for while the job runs: by command, by signal, queued, cancelled, of several hosts, of one rank."""
from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from running import Finished, Running
from support import (LONG, Case, Harness, Undisturbed, assert_equal, assert_moves, completed,  # noqa: F401
                     last_iteration, outcomes, pid_of, refused, undisturbed, vacate)

from analysis.log import read_run

SEED = 20260
FIRST_RANK = {"b0": 0, "b1": 2, "b2": 4, "b3": 6}


def wait_for_iteration(job: Running, iteration: int) -> None:
    job.wait_for(lambda: last_iteration(job.run) >= iteration, f"iteration {iteration} to end")


def status(harness: Harness, job: Running) -> dict[str, Any]:
    finished = harness("status", "--run", job.run, "--json", np=None)
    assert finished.rc == 0, finished.err
    return json.loads(finished.out)


def ask(harness: Harness, job: Running, *args: str) -> Finished:
    return harness(args[0], "--run", job.run, *args[1:], np=None)


def num_done(job: Running) -> int:
    """Moves that have come to their end so far."""
    return len(read_run(job.run).moves)


def test_random_moments(harness: Harness, start_harness: Callable[..., Running], undisturbed: Undisturbed) -> None:
    """Another process asks whenever it likes; the last time it is a signal to a process of the host itself."""
    rng = random.Random(SEED)
    job = start_harness(*LONG.arguments(8))
    spare, vacated = "b3", []
    for by_signal in (False, False, True):
        host = rng.choice([h for h in FIRST_RANK if h != spare])
        wait_for_iteration(job, last_iteration(job.run) + rng.randint(2, 6))
        time.sleep(rng.random() * 0.2)  # the moment within an iteration; nothing waits for it
        if by_signal:
            os.kill(pid_of(job.run, FIRST_RANK[host] + rng.randint(0, 1)), signal.SIGUSR2)
            job.wait_for(lambda: num_done(job) == 3, "the move of the signal's host to be done")
        else:
            finished = ask(harness, job, "request", "--vacate", host, "--wait")
            assert finished.rc == 0, finished.err
            assert num_done(job) == len(vacated) + 1, "--wait came back before the move was done"
        vacated.append((host, spare))
        spare = host
    result = completed(job.wait())
    assert outcomes(result) == ["COMMITTED"] * 3
    for move, (host, target) in zip(result["moves"], vacated, strict=True):
        left = {leaver for _, leaver, _ in move["assignments"]}
        joined = {joiner for _, _, joiner in move["assignments"]}
        assert left == {FIRST_RANK[host], FIRST_RANK[host] + 1}
        assert joined == {FIRST_RANK[target], FIRST_RANK[target] + 1}
    assert_equal(LONG, undisturbed(LONG), job.run)


def test_what_is_refused_changes_nothing(harness: Harness, start_harness: Callable[..., Running]) -> None:
    """A wrong request is told to who asked, and to nobody else. Then a move that rests is cancelled."""
    job = start_harness(*Case(iterations=100_000).arguments(8), "--prepare-deadline", "1000000", "--prepare-share",
                        "0.000001")  # the fixture ends it
    wait_for_iteration(job, 1)
    refused(ask(harness, job, "request", "--vacate", "nowhere"), "nowhere")
    refused(ask(harness, job, "request", "--vacate", "b0,b1"), "b0,b1", "spare")
    refused(ask(harness, job, "request", "--vacate", "b1@100000"), "b1@100000", "last iteration")
    refused(ask(harness, job, "cancel"), "cancel")
    refused(ask(harness, job, "stop"), "--checkpoints")
    found = status(harness, job)
    assert (found["phase"], found["generation"], found["queued"]) == ("TRAINING", 0, [])
    assert num_done(job) == 0
    wait_for_iteration(job, found["iteration"] + 2)
    cancel_while_it_rests(harness, job)


def cancel_while_it_rests(harness: Harness, job: Running) -> None:
    """A rest would take minutes, and without the cancel's end of it the abort is not acknowledged in time."""
    assert ask(harness, job, "request", "--vacate", "b1").rc == 0
    job.wait_for(lambda: "1 of " in status(harness, job)["progress"], "a group to be prepared")
    found = status(harness, job)
    assert re.fullmatch(r"PREPARING b1 \(\d/8; 1 of \d+ groups\)", found["progress"]), found
    wait_for_iteration(job, found["iteration"] + 5)
    assert status(harness, job)["progress"] == found["progress"], "it didn't rest"
    assert ask(harness, job, "cancel").rc == 0
    job.wait_for(lambda: num_done(job) == 1, "the abort to be acknowledged")
    after = status(harness, job)
    assert (after["phase"], after["generation"], outcomes(after)) == ("TRAINING", 0, ["ABORTED"])
    run = read_run(job.run)
    rests = run.communicators[run.communicators["stage"] == b"rest"]
    assert 0 < len(rests) == len(set(rests["world_rank"])), "each stayer was in its first rest"
    wait_for_iteration(job, after["iteration"] + 2)


def test_cancel(harness: Harness, start_harness: Callable[..., Running], undisturbed: Undisturbed) -> None:
    """Training waits for a joiner that takes its time; the cancel releases it."""
    case = Case()
    job = start_harness(*case.arguments(8), *vacate("b1->b3@8"), "--slow-joiner", "10")
    wait_for_iteration(job, 3)
    assert ask(harness, job, "cancel").rc == 0
    result = completed(job.wait())
    assert outcomes(result) == ["ABORTED"] and "cancel" in result["moves"][0]["reason"]
    assert result["generation"] == 0
    assert_equal(case, undisturbed(case), job.run)


def test_request_during_a_move_is_queued_before_one_that_training_waits_for(
        harness: Harness, start_harness: Callable[..., Running], undisturbed: Undisturbed) -> None:
    """It asks for the host that the move under way is only about to free: at once it couldn't be done.

    Training is held for the last move before the queued one is ready: that takes effect there, and then the last too.
    """
    case = Case(iterations=16, settings=("num_microbatches=1",))
    job = start_harness(*case.arguments(10), *vacate("b1->b3@6", "b2->b4@12"), "--lead", "0", "--slow-joiner", "4",
                        np=10)
    wait_for_iteration(job, 4)  # the first move begins
    assert ask(harness, job, "request", "--vacate", "b0->b1").rc == 0
    under_way = status(harness, job)
    assert under_way["phase"] != "TRAINING" and under_way["queued"] == ["b0->b1", "b2->b4@12"], under_way
    result = completed(job.wait())
    assert [move["request"] for move in result["moves"]] == ["b1->b3@6", "b0->b1", "b2->b4@12"]
    assert_moves(result, [(6, [[2, 2, 6], [3, 3, 7]]), (12, [[0, 0, 2], [1, 1, 3]]), (12, [[4, 4, 8], [5, 5, 9]])])
    assert_equal(case, undisturbed(case), job.run)


def test_a_vacated_host_can_go_away(harness: Harness, start_harness: Callable[..., Running],
                                    undisturbed: Undisturbed) -> None:
    """Even that of world rank 0, the first controller: its processes are killed, and the next one takes requests."""
    job = start_harness(*LONG.arguments(8), "--heartbeat-timeout", "5")
    wait_for_iteration(job, 1)
    assert ask(harness, job, "request", "--vacate", "b0", "--wait").rc == 0
    for world_rank in (0, 1):
        os.kill(pid_of(job.run, world_rank), signal.SIGKILL)
    found = status(harness, job)
    assert (found["term"], found["controller"]) == (1, 2)
    completed(job.wait())
    assert_equal(LONG, undisturbed(LONG), job.run)


def test_several_hosts_at_once_and_a_single_rank(harness: Harness, undisturbed: Undisturbed) -> None:
    """A host gives one of its two slots to a host that was vacated before."""
    case = Case()
    finished = harness(*case.arguments(10), *vacate("b0,b1->b3,b4@4", "b2:0->b1@8"), np=10)
    result = completed(finished)
    assert_moves(result, [(4, [[0, 0, 6], [1, 1, 7], [2, 2, 8], [3, 3, 9]]), (8, [[4, 4, 2]])])
    assert_equal(case, undisturbed(case), finished.run)


def test_plan_says_it_beforehand(harness: Harness) -> None:
    """Without a job: who moves where, and the groups rebuilt and kept."""
    finished = harness("plan", "--profile", "tiny_TP2_PP1", "--hosts", "b0,b1,b2,b3", "--np", "8", "--vacate", "b1",
                       np=None)
    assert finished.rc == 0, finished.err
    for word in ("b1", "b3", "rebuilt", "kept"):
        assert word in finished.out, finished.out


def test_list_profiles(harness: Harness) -> None:
    finished = harness("--list-profiles", np=None)
    assert finished.rc == 0, finished.err
    assert all(name in finished.out for name in ("tiny_TP2_PP1", "tiny_TP1_PP2", "20B_TP4_PP2", "39B_TP4_PP2"))
