"""The tally of one move: which reports count, and what they add up to.

Processes that are lost are in test_move_losses.py, the random walk is in test_move_walk.py.
"""
from __future__ import annotations

import pytest
from one_move import (BACK, BEFORE_COMMIT, JOINERS, LEAVERS, MEMBERS, OUTSIDERS, PLAN, POSITION, advance_to, deliver,
                      probes, say)

from migration.errors import IllegalEvent
from migration.move import MoveTally, Report
from migration.protocol import Action, Event, Phase
from migration.roster import Assignment, MovePlan



def test_a_committed_move() -> None:
    move = advance_to(Phase.SWITCHING)
    assert (move.generation, move.roster.holders, move.number) == (0, (0, 1, 2, 3), 0)
    assert deliver(move, Report.VERIFIED) == (Action.SEND_COMMIT,)
    assert (move.phase, move.generation, move.roster.holders) == (Phase.COMMITTED, 1, (0, 1, 4, 5))
    assert move.waiting == sorted(MEMBERS), "a leaver acknowledges too"
    assert deliver(move, Report.ACKNOWLEDGED) == (Action.RETIRE_GENERATION, Action.FINISH_MOVE)
    assert (move.phase, move.bits_kept, move.reason) == (Phase.TRAINING, True, "")


def test_and_back_again() -> None:
    move = advance_to(Phase.COMMITTED)
    deliver(move, Report.ACKNOWLEDGED)
    move.request(BACK)
    assert move.number == 1
    for report in (Report.PREPARED, Report.ACCEPTED, Report.VERIFIED, Report.ACKNOWLEDGED):
        for member in MEMBERS:
            move.report(report, member, 1, {Report.PREPARED: ("sum", "sum"), Report.ACCEPTED: 40}.get(report))
        if report is Report.PREPARED:
            move.propose(20, 40)
    assert (move.phase, move.generation, move.roster.holders) == (Phase.TRAINING, 2, (0, 1, 2, 3))


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
@pytest.mark.parametrize("event", [Event.CANCELLED, Event.DEADLINE_EXPIRED])
def test_cancel_or_deadline(phase: Phase, event: Event) -> None:
    move = advance_to(phase)
    assert move.event(event, "because") == (Action.SEND_ABORT,)
    assert_aborted(move, "because")


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
@pytest.mark.parametrize("member", [0, 2, 4])
def test_a_member_fails(phase: Phase, member: int) -> None:
    move = advance_to(phase)
    assert move.report(Report.FAILED, member, 0, "no memory") == (Action.SEND_ABORT,)
    assert move.report(Report.FAILED, 1, 0, "as a consequence") == ()
    assert_aborted(move, "no memory")


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_a_joiner_is_lost(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.lose(5) == (Action.NOTE_LOSS, Action.SEND_ABORT)
    assert 5 not in move.waiting and 5 not in move.roster.spares()
    assert_aborted(move, "world rank 5 on c", members=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.READY])
def test_training_ends_first(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.event(Event.JOB_ENDED) == (Action.SEND_ABORT,)
    assert_aborted(move, "training ends")


@pytest.mark.parametrize("wrong", [LEAVERS[1], JOINERS[0]])
def test_a_digest_differs(wrong: int) -> None:
    move = advance_to(Phase.SWITCHING)
    assert deliver(move, Report.VERIFIED, [m for m in MEMBERS if m != wrong]) == ()
    assert move.report(Report.VERIFIED, wrong, 0, "flipped") == (Action.SEND_ABORT,)
    assert_aborted(move, f"slot {2 if wrong == 4 else 3}: the state has digest")


def assert_aborted(move: MoveTally, reason: str, members: tuple[int, ...] = MEMBERS) -> None:
    """In ABORTED for `reason`, the old generation untouched; it ends when all of `members` have acknowledged."""
    assert (move.phase, move.generation, move.roster.holders) == (Phase.ABORTED, 0, (0, 1, 2, 3))
    assert reason in move.reason
    assert deliver(move, Report.ACKNOWLEDGED, members) == (Action.FINISH_MOVE,)
    assert (move.phase, move.generation, move.roster.holders) == (Phase.TRAINING, 0, (0, 1, 2, 3))
    assert move.request(PLAN if not move.roster.lost else MovePlan(
        assignments=(Assignment(slot=2, leaver=2, joiner=6),))) == (Action.SEND_PREPARE,), "the next one may begin"
    assert (move.number, move.reason) == (1, "")


@pytest.mark.parametrize("phase, report", [(p, r) for p in Phase for r in Report
                                           if r is not Report.FAILED or p is Phase.TRAINING])
def test_reports_of_another_move_or_stage_or_process_count_for_nothing(phase: Phase, report: Report) -> None:
    move = advance_to(phase)
    value = {Report.ACCEPTED: 2 * POSITION, Report.REFUSED: 2 * POSITION}.get(report, "x")
    foreign = [(0, move.number - 1), (0, move.number + 1), *((rank, move.number) for rank in OUTSIDERS)]
    expected_here = {Phase.PREPARING: (Report.PREPARED,), Phase.READY: (Report.ACCEPTED, Report.REFUSED),
                     Phase.SWITCHING: (Report.VERIFIED,), Phase.COMMITTED: (Report.ACKNOWLEDGED,),
                     Phase.ABORTED: (Report.ACKNOWLEDGED,)}.get(phase, ())  # RECOVERING: none
    if report not in expected_here:
        foreign.append((0, move.number))
    before = (move.phase, move.waiting, move.roster, move.generation)
    for member, number in foreign:
        assert move.report(report, member, number, value) == (), (member, number)
        assert (move.phase, move.waiting, move.roster, move.generation) == before


@pytest.mark.parametrize("phase", BEFORE_COMMIT + (Phase.COMMITTED,))
def test_a_failure_of_a_process_outside_the_move_counts_for_nothing(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.report(Report.FAILED, OUTSIDERS[0], 0, "mistaken") == ()
    assert move.report(Report.FAILED, 0, -1, "late") == ()
    assert move.phase is phase


def test_saying_it_twice_counts_once() -> None:
    move = advance_to(Phase.PREPARING)
    for _ in range(len(MEMBERS)):
        assert move.report(Report.PREPARED, 0, 0, probes(0)) == ()
    assert move.waiting == [1, 2, 3, 4, 5] and move.phase is Phase.PREPARING
    assert deliver(move, Report.PREPARED, MEMBERS[1:]) == (Action.PROPOSE_POSITION,)


def test_a_refusal_leads_to_another_proposal() -> None:
    move = advance_to(Phase.READY)
    deliver(move, Report.ACCEPTED, (1, 2, 3, 4))
    assert move.report(Report.REFUSED, 0, 0, 2 * POSITION + 1) == (Action.PROPOSE_POSITION,)
    move.propose(POSITION + 3, 2 * (POSITION + 3))
    assert move.waiting == sorted(MEMBERS), "whoever accepted the old position is asked again"
    assert move.report(Report.ACCEPTED, 5, 0, 2 * POSITION) == () and 5 in move.waiting, "late, of the old position"
    assert deliver(move, Report.ACCEPTED) == (Action.SEND_SWITCH,)
    assert move.position == POSITION + 3


def test_a_second_refusal_of_the_old_position_is_late() -> None:
    move = advance_to(Phase.READY)
    assert move.report(Report.REFUSED, 0, 0, 2 * POSITION + 1) == (Action.PROPOSE_POSITION,)
    move.propose(POSITION + 3, 2 * (POSITION + 3))
    assert move.report(Report.REFUSED, 1, 0, 2 * POSITION + 1) == (), "it isn't past the new position"
    assert move.report(Report.REFUSED, 1, 0, 2 * (POSITION + 3)) == (Action.PROPOSE_POSITION,), "now it is"


def test_a_member_past_the_first_stop_refuses_though_it_is_not_past_the_position() -> None:
    move = advance_to(Phase.READY)
    move.propose(POSITION, first_stop=2 * (POSITION - 3))  # groups are connected at the boundaries between
    assert move.report(Report.REFUSED, 0, 0, 2 * (POSITION - 4)) == (), "late, of an earlier proposal"
    assert move.report(Report.REFUSED, 1, 0, 2 * (POSITION - 2)) == (Action.PROPOSE_POSITION,)


def test_what_ends_the_job_is_its_reason() -> None:
    move = advance_to(Phase.COMMITTED)
    assert move.event(Event.MEMBER_FAILED, "this and no other") == (Action.FAIL_JOB,)
    assert move.reason == "this and no other"


@pytest.mark.parametrize("require_bitwise", [False, True])
def test_what_was_not_probed_before_is_not_vouched_for(require_bitwise: bool) -> None:
    move = advance_to(Phase.PREPARING, require_bitwise=require_bitwise)
    deliver(move, Report.PREPARED, MEMBERS[:-1])
    actions = move.report(Report.PREPARED, 5, 0, probes(5, "-"))
    if require_bitwise:
        assert actions == (Action.SEND_ABORT,)
        assert_aborted(move, "before the first iteration has shown which communicators are used: move later")
    else:
        assert move.bits_kept is None and actions == (Action.PROPOSE_POSITION,)


@pytest.mark.parametrize("require_bitwise", [False, True])
def test_probes_that_differ(require_bitwise: bool) -> None:
    move = advance_to(Phase.PREPARING, require_bitwise=require_bitwise)
    deliver(move, Report.PREPARED, MEMBERS[:-1])
    actions = move.report(Report.PREPARED, 5, 0, probes(5, "another sum"))  # the joiner of slot 3
    assert not move.bits_kept
    if require_bitwise:
        assert actions == (Action.SEND_ABORT,)
        assert_aborted(move, "differ in their bits at slots [3]")
        assert move.bits_kept, "said of one move only"
    else:
        assert actions == (Action.PROPOSE_POSITION,) and move.phase is Phase.READY


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.TRAINING, Phase.RECOVERING)])
def test_a_request_during_a_move_is_queued(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.request(BACK) == (Action.QUEUE_REQUEST,)
    assert (move.plan, move.number, move.phase) == (PLAN, 0, phase)


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.COMMITTED, Phase.ABORTED])
def test_too_late_to_cancel(phase: Phase) -> None:
    move = advance_to(phase)
    assert move.event(Event.CANCELLED) == (Action.REFUSE_CANCEL,)
    assert move.phase is phase


def test_an_event_that_cannot_come_changes_nothing() -> None:
    move = advance_to(Phase.SWITCHING)
    with pytest.raises(IllegalEvent, match="JOB_ENDED.*SWITCHING"):
        move.event(Event.JOB_ENDED)
    assert (move.phase, move.generation, move.reason) == (Phase.SWITCHING, 0, "")
    assert move.waiting == sorted(MEMBERS)


# ---- old communicators that make room for new ones


def switching(room: str, member: int = 0) -> MoveTally:
    """A move in SWITCHING, in which `member` alone has said that its old communicators make room."""
    move = advance_to(Phase.PREPARING)
    for other in MEMBERS:
        say(move, Report.PREPARED, other, room=room if other == member else "")
    move.propose(POSITION, 2 * POSITION)
    assert deliver(move, Report.ACCEPTED) == (Action.SEND_SWITCH,)
    return move


@pytest.mark.parametrize("member", [0, 2, 4])
def test_all_hand_over_before_anybody_parks(member: int) -> None:
    move = switching("parked", member)
    assert move.rooms == {"parked"}
    assert say(move, Report.VERIFIED, 0) == () and 0 in move.waiting, "it can't have parked yet"
    assert deliver(move, Report.HANDED_OVER) == (Action.SEND_PARK,)
    assert move.phase is Phase.SWITCHING and move.waiting == sorted(MEMBERS)
    assert say(move, Report.HANDED_OVER, 0) == () and 0 in move.waiting, "once is enough"
    assert deliver(move, Report.VERIFIED) == (Action.SEND_COMMIT,)


def test_nobody_is_told_to_park_when_one_fails_before() -> None:
    move = switching("lazy")
    for member in MEMBERS[1:]:
        assert say(move, Report.HANDED_OVER, member) == ()
    assert move.report(Report.FAILED, 0, 0, "lost its joiner") == (Action.SEND_ABORT,)
    assert say(move, Report.HANDED_OVER, 0) == ()


def test_where_nobody_makes_room_nobody_waits() -> None:
    move = advance_to(Phase.SWITCHING)
    assert move.rooms == set()
    assert say(move, Report.HANDED_OVER, 0) == () and 0 in move.waiting
    assert deliver(move, Report.VERIFIED) == (Action.SEND_COMMIT,)


def test_the_next_move_makes_room_only_if_it_must() -> None:
    move = switching("lazy")
    move.event(Event.CANCELLED)
    deliver(move, Report.ACKNOWLEDGED)
    move.request(PLAN)
    assert move.rooms == set()
