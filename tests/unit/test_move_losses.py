"""The tally of one move when a process is lost: what the move comes to, and who holds the slots afterwards."""
from __future__ import annotations

import pytest
from one_move import BEFORE_COMMIT, advance_to, deliver

from migration.move import Report
from migration.plan import plan_recovery
from migration.protocol import Action, Event, Phase
from migration.roster import Assignment, MovePlan


def test_a_joiner_is_lost_while_aborting() -> None:
    move = advance_to(Phase.ABORTED)
    assert deliver(move, Report.ACKNOWLEDGED, (0, 1, 2, 3)) == ()
    assert move.lose(4) == (Action.NOTE_LOSS, Action.RECOUNT)
    assert move.recount() == (), "the other joiner is still waited for"
    assert move.lose(5) == (Action.NOTE_LOSS, Action.RECOUNT)
    assert move.recount() == (Action.FINISH_MOVE,)
    assert (move.phase, move.roster.holders, move.roster.spares()) == (Phase.TRAINING, (0, 1, 2, 3), (6, 7))


def test_a_leaver_is_lost_after_the_commit() -> None:
    move = advance_to(Phase.COMMITTED)
    assert deliver(move, Report.ACKNOWLEDGED, (0, 1, 3, 4, 5)) == ()
    assert move.lose(2) == (Action.NOTE_LOSS, Action.RECOUNT)
    assert move.recount() == (Action.RETIRE_GENERATION, Action.FINISH_MOVE)
    assert (move.generation, move.roster.holders, move.roster.spares()) == (1, (0, 1, 4, 5), (3, 6, 7))


@pytest.mark.parametrize("phase, rank", [(p, 0) for p in Phase] + [(p, 2) for p in BEFORE_COMMIT]
                         + [(Phase.COMMITTED, 4)])
def test_a_process_that_holds_a_slot_is_lost(phase: Phase, rank: int) -> None:
    """And there is no spare for it, or none may be used."""
    move = advance_to(phase)
    assert move.lose_slots([rank], "not heard", None) == (Action.FAIL_JOB,)
    assert move.phase is phase and move.reason == "not heard" and move.roster.lost == {rank}


@pytest.mark.parametrize("phase", list(Phase))
def test_a_spare_takes_the_slot_of_a_lost_process(phase: Phase) -> None:
    """Whatever the move had come to, it is over; its leavers keep their slots, and its joiners are spares again."""
    move = advance_to(phase)
    generation, plan = move.generation, plan_recovery(move.recoverable.without(0))
    why = f"{move.reason}; killed" if phase is Phase.ABORTED else "killed"  # where the move was over already
    assert why and plan is not None and plan.to_json() == "[[0,0,4],[1,1,5]]"
    drops = () if phase in (Phase.TRAINING, Phase.RECOVERING) else (Action.DROP_MOVE,)
    assert move.lose_slots([0], "killed", plan) == (*drops, Action.SEND_RECOVER)
    assert (move.phase, move.reason, move.generation) == (Phase.RECOVERING, why, generation + 1)
    assert (move.roster.holders, move.roster.spares(), move.roster.lost) == ((4, 5, 2, 3), (1, 6, 7), {0})
    assert move.waiting == [] and move.report(Report.FAILED, 1, move.number, "late") == ()
    assert move.event(Event.ALL_RECOVERED) == (Action.FINISH_RECOVERY,)
    assert move.request(MovePlan(assignments=(Assignment(slot=2, leaver=2, joiner=1),))) == (Action.SEND_PREPARE,)


def test_a_joiner_that_is_lost_before_all_have_acknowledged_gives_its_slot_back() -> None:
    move = advance_to(Phase.COMMITTED)
    assert move.roster.holders == (0, 1, 4, 5)
    plan = plan_recovery(move.recoverable.without(4))
    assert plan is not None and plan.assignments == ()
    assert move.lose_slots([4], "killed", plan) == (Action.DROP_MOVE, Action.SEND_RECOVER)
    assert (move.roster.holders, move.generation) == ((0, 1, 2, 3), 2)


def test_a_leaver_that_is_lost_after_the_commit_is_not_needed_unless_the_commit_is_undone() -> None:
    move = advance_to(Phase.COMMITTED)
    assert move.lose(2) == (Action.NOTE_LOSS, Action.RECOUNT)
    plan = plan_recovery(move.recoverable.without(1))
    assert plan is not None and plan.slots == (0, 1, 2, 3), "hosts a and b have lost one each"
    move.lose_slots([1], "killed", plan)
    assert move.roster.lost == {1, 2} and move.roster.lost.isdisjoint(move.roster.holders)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_spare_outside_the_move_is_lost(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.lose(6)[0] is Action.NOTE_LOSS
    assert move.phase is phase and 6 not in move.roster.spares()
