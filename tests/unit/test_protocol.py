"""The protocol's table: every (phase, event) pair against a second table, written by hand from the design.

EXPECTED isn't derived from TABLE: it says in text what must happen, so that a slip in either shows. A pair that isn't
in it must raise and change nothing.
"""
from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from migration.errors import IllegalEvent
from migration.protocol import TABLE, Action, Event, Machine, Phase, draw

# phase: one line for each event that is legal there: EVENT [> NEXT_PHASE] [: ACTION, ...]
EXPECTED_TEXT = {
    "TRAINING": """
        REQUESTED > PREPARING : SEND_PREPARE
        CANCELLED : REFUSE_CANCEL
        JOB_ENDED
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
    "PREPARING": """
        REQUESTED : QUEUE_REQUEST
        ALL_PREPARED > READY : PROPOSE_POSITION
        DIGEST_DIFFERS > ABORTED : SEND_ABORT
        MEMBER_FAILED > ABORTED : SEND_ABORT
        DEADLINE_EXPIRED > ABORTED : SEND_ABORT
        CANCELLED > ABORTED : SEND_ABORT
        JOB_ENDED > ABORTED : SEND_ABORT
        JOINER_LOST > ABORTED : NOTE_LOSS, SEND_ABORT
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : DROP_MOVE, SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
    "READY": """
        REQUESTED : QUEUE_REQUEST
        POSITION_REFUSED : PROPOSE_POSITION
        ALL_ACCEPTED > SWITCHING : SEND_SWITCH
        MEMBER_FAILED > ABORTED : SEND_ABORT
        DEADLINE_EXPIRED > ABORTED : SEND_ABORT
        CANCELLED > ABORTED : SEND_ABORT
        JOB_ENDED > ABORTED : SEND_ABORT
        JOINER_LOST > ABORTED : NOTE_LOSS, SEND_ABORT
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : DROP_MOVE, SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
    # no JOB_ENDED: every member waits at the position, so none can come to the end of training
    "SWITCHING": """
        REQUESTED : QUEUE_REQUEST
        ALL_HANDED_OVER : SEND_PARK
        ALL_VERIFIED > COMMITTED : SEND_COMMIT
        DIGEST_DIFFERS > ABORTED : SEND_ABORT
        MEMBER_FAILED > ABORTED : SEND_ABORT
        DEADLINE_EXPIRED > ABORTED : SEND_ABORT
        CANCELLED > ABORTED : SEND_ABORT
        JOINER_LOST > ABORTED : NOTE_LOSS, SEND_ABORT
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : DROP_MOVE, SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
    # the old generation is gone: nothing can be aborted any more, and a joiner is a slot's process like any other
    "COMMITTED": """
        REQUESTED : QUEUE_REQUEST
        ALL_ACKNOWLEDGED > TRAINING : RETIRE_GENERATION, FINISH_MOVE
        CANCELLED : REFUSE_CANCEL
        MEMBER_FAILED : FAIL_JOB
        JOB_ENDED
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : DROP_MOVE, SEND_RECOVER
        SPARE_LOST : NOTE_LOSS, RECOUNT""",
    "ABORTED": """
        REQUESTED : QUEUE_REQUEST
        ALL_ACKNOWLEDGED > TRAINING : FINISH_MOVE
        CANCELLED : REFUSE_CANCEL
        MEMBER_FAILED
        JOB_ENDED
        JOINER_LOST : NOTE_LOSS, RECOUNT
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED > RECOVERING : DROP_MOVE, SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
    # no move is under way, and none can begin; reports of the one that was dropped come to nobody
    "RECOVERING": """
        REQUESTED : QUEUE_REQUEST
        CANCELLED : REFUSE_CANCEL
        ALL_RECOVERED > TRAINING : FINISH_RECOVERY
        DEADLINE_EXPIRED : FAIL_JOB
        SLOT_LOST : FAIL_JOB
        SLOT_REPLACED : SEND_RECOVER
        SPARE_LOST : NOTE_LOSS""",
}
BEFORE_COMMIT = (Phase.PREPARING, Phase.READY, Phase.SWITCHING)
ENDS_A_MOVE = (Event.CANCELLED, Event.MEMBER_FAILED, Event.DEADLINE_EXPIRED, Event.JOINER_LOST)
PAIRS = list(itertools.product(Phase, Event))


def read_expected() -> dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]]:
    table = {}
    for phase, text in EXPECTED_TEXT.items():
        for line in text.strip().splitlines():
            left, _, actions = line.partition(":")
            event, _, after = left.partition(">")
            table[Phase[phase], Event[event.strip()]] = (
                Phase[after.strip() or phase], tuple(Action[name.strip()] for name in actions.split(",") if name))
    return table


EXPECTED = read_expected()


def machine_in(phase: Phase) -> Machine:
    machine = Machine()
    machine.phase = phase
    return machine


@pytest.mark.parametrize("phase, event", PAIRS, ids=[f"{p.name}-{e.name}" for p, e in PAIRS])
def test_every_pair(phase: Phase, event: Event) -> None:
    machine = machine_in(phase)
    if (phase, event) in EXPECTED:
        after, actions = EXPECTED[phase, event]
        assert machine.handle(event) == actions
        assert machine.phase is after
        return
    with pytest.raises(IllegalEvent) as raised:
        machine.handle(event)
    assert machine.phase is phase
    before_legal, _, legal = str(raised.value).partition("legal there: ")
    assert event.name in before_legal and phase.name in before_legal
    assert sorted(legal.split(", ")) == sorted(e.name for p, e in EXPECTED if p is phase)


def test_hand_written_table_names_every_phase_and_event() -> None:
    assert set(EXPECTED_TEXT) == {phase.name for phase in Phase}
    assert {event for _, event in EXPECTED} == set(Event)
    assert {action for _, actions in EXPECTED.values() for action in actions} == set(Action)
    assert len(EXPECTED) == sum(len(text.strip().splitlines()) for text in EXPECTED_TEXT.values())


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
@pytest.mark.parametrize("event", ENDS_A_MOVE)
def test_trouble_before_the_commit_aborts(phase: Phase, event: Event) -> None:
    machine = machine_in(phase)
    assert Action.SEND_ABORT in machine.handle(event)
    assert machine.phase is Phase.ABORTED


@pytest.mark.parametrize("event", [e for e in Event if (Phase.COMMITTED, e) in EXPECTED])
def test_nothing_aborts_after_the_commit(event: Event) -> None:
    machine = machine_in(Phase.COMMITTED)
    assert Action.SEND_ABORT not in machine.handle(event)
    assert machine.phase in (Phase.COMMITTED, Phase.TRAINING, Phase.RECOVERING)


def test_commit_has_one_way_in_and_the_abort_one_way_out() -> None:
    assert [key for key, (after, _) in TABLE.items() if after is Phase.COMMITTED and key[0] is not after] == [
        (Phase.SWITCHING, Event.ALL_VERIFIED)]
    assert {event for (phase, event), (after, _) in TABLE.items()
            if phase is Phase.ABORTED and after is not phase} == {Event.ALL_ACKNOWLEDGED, Event.SLOT_REPLACED}


def test_a_recovery_begins_from_everywhere_and_drops_what_was_under_way() -> None:
    for phase in Phase:
        machine = machine_in(phase)
        actions = machine.handle(Event.SLOT_REPLACED)
        assert machine.phase is Phase.RECOVERING and actions[-1] is Action.SEND_RECOVER
        assert (Action.DROP_MOVE in actions) is (phase not in (Phase.TRAINING, Phase.RECOVERING))


def test_every_phase_is_reached_and_left() -> None:
    reached, frontier = {Phase.TRAINING}, [Phase.TRAINING]
    while frontier:
        phase = frontier.pop()
        new = {after for (p, _), (after, _) in TABLE.items() if p is phase} - reached
        reached |= new
        frontier += new
    assert reached == set(Phase)
    assert all(any(p is phase and after is not phase for (p, _), (after, _) in TABLE.items()) for phase in Phase)


def test_drawing_shows_every_change_of_phase_and_no_other() -> None:
    drawn = {}
    for line in draw().splitlines()[2:]:
        edge, _, names = line.strip().partition(": ")
        before, _, after = edge.partition(" --> ")
        drawn.update({(Phase[before], Event[name]): Phase[after] for name in names.split(", ")})
    assert drawn == {key: after for key, (after, _) in EXPECTED.items() if after is not key[0]}


def test_the_walk_through_a_move_has_this_drawing() -> None:
    text = (Path(__file__).resolve().parents[2] / "microbenchmark.md").read_text()
    assert draw() in text, "microbenchmark.md: put there what migration.protocol.draw() gives"


def test_a_machine_takes_the_table_it_is_given() -> None:
    table = dict(TABLE)
    del table[Phase.TRAINING, Event.REQUESTED]
    machine = Machine(table)
    with pytest.raises(IllegalEvent, match="REQUESTED"):
        machine.handle(Event.REQUESTED)
    assert machine.phase is Phase.TRAINING
