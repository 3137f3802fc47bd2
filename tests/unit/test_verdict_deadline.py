"""A verdict that a member never acknowledges: it is held for lost, and nothing else of the job is."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_move import JOINERS, LEAVERS, MEMBERS, STAYERS
from test_takeover import Side, Two

from migration.move import Report
from migration.protocol import Event, Phase

WAIT_S = 20.0
SPARE, HOLDER = 5, STAYERS[1]  # a joiner; a process that holds a slot


def abort_without(run: Path, silent: int, **options: Any) -> Two:
    """A move aborts in its switchover, and all acknowledge but one; then the deadline passes."""
    two = Two(run, switch_deadline_s=WAIT_S, **options)
    two.to_switching()
    two.first.controller._take_event(Event.MEMBER_FAILED, "some reason")
    return wait_in_vain(two, silent, Phase.ABORTED)


def commit_without(run: Path, silent: int, **options: Any) -> Two:
    """The same of a commit."""
    two = Two(run, switch_deadline_s=WAIT_S, **options)
    two.to_switching()
    two.first.report(Report.VERIFIED)
    return wait_in_vain(two, silent, Phase.COMMITTED)


def wait_in_vain(two: Two, silent: int, phase: Phase) -> Two:
    two.settle()
    two.first.report(Report.ACKNOWLEDGED, [rank for rank in MEMBERS if rank != silent])
    assert two.first.tally.phase is phase and two.first.tally.waiting == [silent]
    two.first.tick(WAIT_S / 2)
    assert two.first.tally.phase is phase and not two.first.tally.roster.lost
    two.first.tick(WAIT_S)
    two.settle()
    return two


def outcome(side: Side) -> tuple[Phase, int, set[int]]:
    return side.tally.phase, side.tally.generation, set(side.tally.roster.lost)


def test_a_spare_that_does_not_acknowledge_is_lost_and_the_move_is_over(tmp_path: Path) -> None:
    first = abort_without(tmp_path, SPARE).first
    assert outcome(first) == (Phase.TRAINING, 0, {SPARE})
    assert first.take("END") == [(SPARE, "END")] and not first.take("RECOVER")
    first.controller.request_move("b->d", "test")
    first.tick()
    assert first.tally.phase is Phase.PREPARING, "the next move is made without it"


def test_a_slot_s_process_that_does_not_acknowledge_is_replaced(tmp_path: Path) -> None:
    first = abort_without(tmp_path, HOLDER).first
    assert outcome(first) == (Phase.RECOVERING, 1, {HOLDER})
    (record,) = first.controller._record.recoveries
    assert record["lost"] == [HOLDER]
    assert "the acknowledgement of the abort took longer than 20 s, and its own is missing" in record["why"]
    assert set(first.tally.roster.holders) > {*LEAVERS} and HOLDER not in first.tally.roster.holders


def test_without_recovery_it_ends_the_job(tmp_path: Path) -> None:
    first = abort_without(tmp_path, HOLDER, recover="off").first
    assert first.controller._ended and f"world rank {HOLDER} on a is lost" in first.controller._verdict["error"]


@pytest.mark.parametrize("silent", [SPARE, HOLDER])
def test_who_acknowledges_in_time_is_kept(tmp_path: Path, silent: int) -> None:
    two = Two(tmp_path, switch_deadline_s=WAIT_S)
    two.to_switching()
    two.first.controller._take_event(Event.MEMBER_FAILED, "some reason")
    two.settle()
    two.first.tick(WAIT_S / 2)
    two.first.report(Report.ACKNOWLEDGED, sorted({*MEMBERS} - {silent}))
    two.first.report(Report.ACKNOWLEDGED, [silent])
    two.first.tick(2 * WAIT_S)
    assert outcome(two.first) == (Phase.TRAINING, 0, set())


def test_a_joiner_that_does_not_acknowledge_the_commit_has_taken_nothing_over(tmp_path: Path) -> None:
    first = commit_without(tmp_path, JOINERS[0]).first
    assert outcome(first) == (Phase.RECOVERING, 2, {JOINERS[0]}), "the commit was generation 1"
    (record,) = first.controller._record.recoveries
    assert record["lost"] == [JOINERS[0]] and record["slots"] == []
    assert "the acknowledgement of the commit took longer than 20 s, and its own is missing" in record["why"]
    assert first.tally.roster.holders == (*STAYERS, *LEAVERS)
    assert not first.controller._ended


def test_a_stayer_that_does_not_acknowledge_the_commit_is_replaced(tmp_path: Path) -> None:
    first = commit_without(tmp_path, HOLDER).first
    assert outcome(first) == (Phase.RECOVERING, 2, {HOLDER}) and HOLDER not in first.tally.roster.holders


def test_a_leaver_that_does_not_acknowledge_the_commit_is_a_lost_spare(tmp_path: Path) -> None:
    first = commit_without(tmp_path, LEAVERS[0]).first
    assert outcome(first) == (Phase.TRAINING, 1, {LEAVERS[0]}) and not first.take("RECOVER")
    assert first.tally.roster.holders == (*STAYERS, *JOINERS)


def test_a_commit_without_recovery_ends_the_job(tmp_path: Path) -> None:
    first = commit_without(tmp_path, HOLDER, recover="off").first
    assert first.controller._ended and f"world rank {HOLDER} on a is lost" in first.controller._verdict["error"]
