"""The ways to warm up, in whole runs: whatever a joiner or a standby ran before, the job's bits are the same."""
from __future__ import annotations

from pathlib import Path

import pytest
from support import (Case, Harness, Undisturbed, assert_equal, completed, outcomes, refused,  # noqa: F401
                     undisturbed, vacate)

from analysis.log import Run, read_run, text

PIPELINE = Case(profile="tiny_TP2_PP2", iterations=24)  # first and last stage, each on a host of its own


def texts(run: Run, kind: str) -> list[str]:
    return [text(event["text"]) for event in run.events if text(event["kind"]) == kind]


def span_ranks(run: Run, name: str) -> set[int]:
    return {int(span["world_rank"]) for span in run.spans if text(span["name"]) == name}


def test_recorded_on_standbys_that_are_warm(harness: Harness, undisturbed: Undisturbed) -> None:
    """The second move goes to processes that have trained, and as spares warmed the other role since."""
    moves = [*vacate("b1->b2@4", "b0->b1@16"), "--lead", "4"]  # nothing under way from 4 to 12
    finished = harness(*PIPELINE.arguments(6), *moves, "--warm-up", "recorded", "--standby", "warm",
                       "--require-bitwise", np=6)
    assert outcomes(completed(finished)) == ["COMMITTED"] * 2
    assert_equal(PIPELINE, undisturbed(PIPELINE), finished.run)
    run = read_run(finished.run)
    assert texts(run, "error") == []
    told = texts(run, "warm_up")
    assert sorted(line.split(":")[0] for line in told) == ["slot 0", "slot 1", "slot 2", "slot 3"]
    assert all("bit for bit the same loss" in line for line in told), told
    assert len(texts(run, "recording")) == PIPELINE.job_size
    standbys = {(int(s["world_rank"]), int(s["slot"])) for s in run.spans if text(s["name"]) == "standby"}
    assert {(2, 0), (3, 0)} <= standbys, "b1 has trained the last stage: the first is run between the moves"
    assert not standbys & {(2, 2), (3, 2)}, "and the last isn't run again"
    assert {path.name for path in (finished.run / "recordings").iterdir()} == {
        f"slot{slot:04d}.rec" for slot in range(PIPELINE.job_size)}


def test_off_without_real_traffic(harness: Harness, undisturbed: Undisturbed) -> None:
    finished = harness(*PIPELINE.arguments(6), *vacate("b1->b2@8"), "--warm-up", "off", "--standby", "warm",
                       np=6)
    assert outcomes(completed(finished)) == ["COMMITTED"]
    assert_equal(PIPELINE, undisturbed(PIPELINE), finished.run)
    run = read_run(finished.run)
    assert not span_ranks(run, "warm_up") and not span_ranks(run, "standby") and not span_ranks(run, "wait_joiners")


def test_a_recording_that_is_damaged_aborts_the_move_and_training_goes_on(harness: Harness, start_harness: object,
                                                                          undisturbed: Undisturbed) -> None:
    job = start_harness(*PIPELINE.arguments(6), *vacate("b1->b2@12"), "--lead", "4", "--warm-up", "recorded", np=6)
    path = job.run / "recordings" / "slot0002.rec"
    job.wait_for(path.exists, "the recording of slot 2")
    with path.open("ab") as file:
        file.write(b"x")
    result = completed(job.wait())
    (move,) = result["moves"]
    assert move["outcome"] == "ABORTED" and "slot0002.rec: the recording is damaged" in move["reason"], move
    assert_equal(PIPELINE, undisturbed(PIPELINE), job.run)


@pytest.mark.parametrize(("arguments", "words"), [
    (("--warm-up", "sometimes"), ("--warm-up", "synthetic")), (("--standby", "hot"), ("--standby", "cold")),
    (("--record-limit", "0"), ("--record-limit 0", "1 MiB"))])
def test_wrong_argument(harness: Harness, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    refused(harness(*PIPELINE.arguments(6), *arguments, np=6, timeout=60), *words)
