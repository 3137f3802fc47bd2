"""What is said of a job whose rank was killed: of one that recovers, and of one that doesn't."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from synthetic_run import ITERATION_S, make_run

from analysis.gpu_moves import RunFailed
from analysis.gpus_kill import describe, explain
from analysis.log import Run, read_run

RECOVERY = {"lost": [2], "hosts": ["b1"], "slots": [2, 3], "to": [6, 7], "detect_s": 0.25, "recovery_s": 4.5,
            "from_iteration": 8, "redone": 2, "checkpoint": "iteration00000008", "generation": 1, "keeps_bits": True}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "run", move=False))


def test_what_a_recovery_took(run: Run) -> None:
    killed_s = float(run.series(0)["start_s"][10]) - 2.0  # all of iteration 10 begins after it, and of none before
    ended = run.iterations["start_s"] < killed_s + 2.0
    run = dataclasses.replace(run, result={"recoveries": [RECOVERY]}, iterations=run.iterations[
        ~ended | (run.iterations["start_s"] < killed_s)])
    figures, told = describe(run, killed_s)
    assert [figure.value for figure in figures] == [0.25, 4.5, pytest.approx(2.0 + ITERATION_S), 2, "yes"]
    assert told == ("World ranks [2] lost, slots [2, 3] went to [6, 7]; went on from iteration 8 in generation 1. "
                    "Sums on the new communicators have the bits that they had on the old ones.")


@pytest.mark.parametrize(("keeps_bits", "value", "said"), [(False, "no", "have other bits"),
                                                           (None, "not known", "is not known")])
def test_sums_of_a_recovery(run: Run, keeps_bits: bool | None, value: str, said: str) -> None:
    run = dataclasses.replace(run, result={"recoveries": [RECOVERY | {"keeps_bits": keeps_bits}]})
    figures, told = describe(run, 0.0)
    assert (figures[-1].name, figures[-1].value) == ("sums keep their bits", value) and said in told


@pytest.mark.parametrize("recoveries", [[], [RECOVERY, RECOVERY]])
def test_one_signal_is_one_recovery(run: Run, recoveries: list[object]) -> None:
    with pytest.raises(RunFailed, match="one recovery was expected after the SIGKILL, result.json has"):
        describe(dataclasses.replace(run, result={"recoveries": recoveries}), 0.0)


def test_a_job_that_can_not_recover_says_so_in_one_line() -> None:
    lost = {"error": "world rank 2 died\nand much more"}
    assert explain(lost, "its last words", was_killed=True) == (
        "the job didn't recover: world rank 2 died")
    assert explain({}, "its last words", was_killed=True).endswith("recover: the job left no result")
    assert explain(lost, "its last words", was_killed=False) == "its last words"
    assert explain({"recoveries": [RECOVERY]}, "its last words", was_killed=True) == "its last words"
