"""Old communicators that make room for new ones: equal after a commit, after an abort before it, and after one beyond.

On a CPU nothing is gained by it, but the protocol is that of GPUs: who waits for whom, what is closed and rebuilt.
"""
from __future__ import annotations

import numpy as np
from support import (Case, Harness, Undisturbed, assert_equal, completed, outcomes, refused,  # noqa: F401
                     undisturbed, vacate)

from analysis.log import Run, read_run

CASE = Case()


def stages(run: Run, move: int) -> set[str]:
    """What communicators went through in a move, from the log."""
    rows = run.communicators[run.communicators["move"] == move]
    assert np.all(rows["time_s"] > 0) and np.all(rows["num_members"] > 1)
    return {stage.decode() for stage in rows["stage"]}


def test_closed_ones_are_rebuilt_when_the_move_aborts(harness: Harness, undisturbed: Undisturbed) -> None:
    """The digests differ only when the old ones are closed already; the next move commits, from the rebuilt ones."""
    finished = harness(*CASE.arguments(8), *vacate("b1->b3@3", "b1->b3@8"), "--nccl-switch", "lazy", "--allow-lazy",
                       "--fault", "corrupt@2:SWITCHING#0")
    result = completed(finished)
    assert outcomes(result) == ["ABORTED", "COMMITTED"]
    weaker = "10 old groups, closed to make room (policy lazy), were rebuilt; all sum as before"
    assert "digest" in result["moves"][0]["reason"] and weaker in result["moves"][0]["reason"]
    assert weaker in finished.out and "may have to rebuild the old ones (--allow-lazy)" in finished.out
    run = read_run(finished.run)
    assert stages(run, 0) == {"prepare", "park", "rebuild"} and stages(run, 1) == {"prepare", "park"}
    assert_equal(CASE, undisturbed(CASE), finished.run)


def test_nobody_parks_before_all_have_handed_over(harness: Harness, undisturbed: Undisturbed) -> None:
    """A joiner hangs before the state is there: the others wait in vain, and have touched nothing when they go on."""
    finished = harness(*CASE.arguments(10), *vacate("b1->b3@3", "b0->b4@8"), "--nccl-switch", "parked",
                       "--switch-deadline", "6", "--fault", "hang@2:SWITCHING#0", np=10)
    result = completed(finished)
    assert outcomes(result) == ["ABORTED", "COMMITTED"]
    assert "rebuilt" not in result["moves"][0]["reason"]
    spans = read_run(finished.run).spans
    parks = spans[spans["name"] == b"park"]
    assert set(parks["move"]) == {1}
    waits = spans[spans["name"] == b"wait_transfers"]
    assert set(waits["move"]) == {0, 1}
    assert_equal(CASE, undisturbed(CASE), finished.run)


def test_lazy_must_be_allowed(harness: Harness) -> None:
    refused(harness(*CASE.arguments(8), "--nccl-switch", "lazy"), "--nccl-switch lazy", "--allow-lazy")
