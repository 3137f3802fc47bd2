"""Whatever fails before the commit: the fault fires exactly once, and the job goes on equal, in a generation that fits.

One run for each kind of fault, with three moves, one for each phase in which it strikes. Every move goes to a host of
its own, since a fault may cost the joiner's process.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import Finished
from support import Case, Harness, Undisturbed, assert_equal, completed, outcomes, undisturbed, vacate  # noqa: F401

from analysis.log import read_run, text

KINDS = ("raise", "kill", "corrupt", "hang", "cancel")
# phase -> (slot at whose joiner the fault strikes, the move that it is to hit, the move's place in the run)
STRIKES = {"PREPARING": (2, "b1->b3@3", 0), "READY": (0, "b0->b4@7", 1), "SWITCHING": (4, "b2->b5@10", 2)}
CASE = Case()
NUM_PROCESSES = 12
DEADLINES = {"hang": ("--prepare-deadline", "8", "--switch-deadline", "6"), "kill": ("--heartbeat-timeout", "8")}
# Where the outcome is certain, what the log's reason must speak of. A cancel may come after the verdict, and what was
# corrupted before the transfer is overwritten by it: those may commit.
ABORTS = {("raise", "PREPARING"): "", ("raise", "READY"): "", ("raise", "SWITCHING"): "",
          ("kill", "PREPARING"): "", ("kill", "READY"): "", ("kill", "SWITCHING"): "",
          ("corrupt", "SWITCHING"): "digest", ("hang", "PREPARING"): "longer", ("hang", "SWITCHING"): "longer",
          ("cancel", "PREPARING"): "cancel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A run with a fault in each phase."""

    run: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def finished_runs() -> dict[str, Finished]:
    return {}


@pytest.fixture
def struck(kind: str, harness: Harness, finished_runs: dict[str, Finished],
           tmp_path_factory: pytest.TempPathFactory) -> Struck:
    """The run of this kind of fault, made by the first test that asks for it."""
    if kind not in finished_runs:
        faults = [a for phase, (slot, *_) in STRIKES.items() for a in ("--fault", f"{kind}@{slot}:{phase}")]
        moves = vacate(*(move for _, move, _ in STRIKES.values()))
        finished_runs[kind] = harness(*CASE.arguments(NUM_PROCESSES), *moves, *faults, *DEADLINES.get(kind, ()),
                                      np=NUM_PROCESSES, run=tmp_path_factory.mktemp("struck") / kind, timeout=180)
    return Struck(run=finished_runs[kind].run, result=completed(finished_runs[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_job_goes_on_equal(kind: str, struck: Struck, undisturbed: Undisturbed) -> None:
    assert_equal(CASE, undisturbed(CASE), struck.run)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_counts_the_commits(kind: str, struck: Struck) -> None:
    found = outcomes(struck.result)
    assert len(found) == len(STRIKES) and set(found) <= {"COMMITTED", "ABORTED"}
    assert struck.result["generation"] == found.count("COMMITTED")
    generation = 0
    for move in struck.result["moves"]:
        generation += move["outcome"] == "COMMITTED"
        assert move["generation"] == generation


@pytest.mark.parametrize("phase", STRIKES)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_in_each_phase(kind: str, phase: str, struck: Struck) -> None:
    slot, request, index = STRIKES[phase]
    (fault,) = [f for f in struck.result["faults"] if (f["kind"], f["slot"], f["phase"]) == (kind, slot, phase)]
    assert fault["fired"] == 1
    move = struck.result["moves"][index]
    assert move["request"] == request
    if (kind, phase) in ABORTS:
        assert move["outcome"] == "ABORTED"
    if move["outcome"] == "ABORTED":
        assert ABORTS.get((kind, phase), "") in move["reason"] and move["reason"], "the log must say why"
        (row,) = [row for row in read_run(struck.run).moves if text(row["request"]) == request]
        assert text(row["reason"]) and move["reason"].startswith(text(row["reason"]))  # the log cuts long ones


@pytest.mark.parametrize("kind", KINDS)
def test_vacated_slots_stay_where_they_were(kind: str, struck: Struck) -> None:
    """After an abort the leaver trains on: no joiner has logged an iteration of its slot."""
    rows = read_run(struck.run).iterations
    for move in struck.result["moves"]:
        if move["outcome"] == "ABORTED":
            for slot, leaver, _ in move["assignments"]:
                assert set(rows["world_rank"][rows["slot"] == slot]) == {leaver}


@pytest.mark.fast
def test_spares_of_an_aborted_move_can_join_later(harness: Harness, undisturbed: Undisturbed) -> None:
    """One move aborts because a joiner isn't fit, one in its pause; the third commits with the same two spares."""
    finished = harness(*CASE.arguments(8), *vacate("b1->b3@3", "b2->b3@6", "b0->b3@10"), "--fault", "slow@2:PREPARING",
                       "--fault", "raise@4:SWITCHING")
    result = completed(finished)
    assert outcomes(result) == ["ABORTED", "ABORTED", "COMMITTED"]
    assert [fault["fired"] for fault in result["faults"]] == [1, 1]
    unfit = result["moves"][0]["reason"]
    assert unfit.startswith("world rank 6 on b3 isn't fit for slot 2 of world rank 2 on b1: a matrix multiply runs at ")
    assert "less than 0.1 of its leaver's" in unfit and f"move b1->b3@3 aborted: {unfit}\n" in finished.out
    assert result["moves"][2]["assignments"] == [[0, 0, 6], [1, 1, 7]]
    judged = [text(row["text"]) for row in read_run(finished.run).events if text(row["kind"]) == "acceptance"]
    assert len(judged) >= 5 and all("GFLOP/s" in line and "GB/s" in line for line in judged)
    assert_equal(CASE, undisturbed(CASE), finished.run)
