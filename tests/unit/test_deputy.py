"""The deputy: who it is, that nothing goes out before it has what it follows from, and when it takes over."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from migration.deputy import ANSWER_S, Deputy, Gate, Loss, choose_deputy, is_fit
from migration.plan import Roster
from migration.told import Told
from migration.watch import LONGEST_TICK_S, LOOK_AROUND_S

# hosts a, b with slots 0..3; c and d with spares 4..7
ROSTER = Roster(hosts=("a", "a", "b", "b", "c", "c", "d", "d"), holders=(0, 1, 2, 3))
TIMEOUT_S = 15.0


def without(*lost: int) -> Roster:
    return dataclasses.replace(ROSTER, lost=frozenset(lost))


@pytest.mark.parametrize(("roster", "controller", "unfit", "expected"), [
    (ROSTER, 0, (), 7),  # the last spare is the last to be given a slot
    (ROSTER, 7, (), 5),  # on another host
    (ROSTER, 0, (7,), 6),
    (without(4, 5, 6), 7, (), 0),  # better with a slot on another host than a spare here
    (without(4, 5, 6, 7), 0, (), 2),
    (dataclasses.replace(ROSTER, leaving=frozenset("d")), 0, (), 5),
    (dataclasses.replace(without(4, 5), leaving=frozenset("d")), 0, (), 2),
    (without(2, 3, 4, 5, 6, 7), 0, (), 1),  # on its own host, if no other lives
    (without(1, 2, 3, 4, 5, 6, 7), 0, (), None)])
def test_who_it_is(roster: Roster, controller: int, unfit: tuple[int, ...], expected: int | None) -> None:
    assert choose_deputy(roster, controller, unfit) == expected


def test_it_stays_unless_another_host_is_better() -> None:
    assert is_fit(ROSTER, 0, 7, ()) and is_fit(ROSTER, 0, 2, ()), "one with a slot is as good, once it is"
    assert not is_fit(without(7), 0, 7, ()) and not is_fit(ROSTER, 0, 7, (7,))
    assert not is_fit(ROSTER, 0, 1, ()), "on the controller's host"
    assert not is_fit(dataclasses.replace(ROSTER, leaving=frozenset("d")), 0, 7, ())
    assert is_fit(without(2, 3, 4, 5, 6, 7), 0, 1, ())


# ---- the controller's side


def closed_gate() -> tuple[Gate, list[str]]:
    """A gate whose deputy has been sent state 1, and what has gone out."""
    gate, out = Gate(), []
    gate.appoint(7)
    gate.put(lambda: out.append("first"))
    gate.sent(0.0)
    return gate, out


def test_without_a_deputy_nothing_waits() -> None:
    gate, out = Gate(), []
    gate.close()
    gate.put(lambda: out.append("said"))
    assert out == ["said"] and gate.is_open and not gate.is_due


def test_what_is_put_after_a_state_waits_for_its_acknowledgement() -> None:
    gate, out = closed_gate()
    gate.close()  # another turn
    gate.close()
    gate.put(lambda: out.append("second"))
    gate.put(lambda: out.append("third"))
    assert (out, gate.number, gate.is_due) == ([], 2, True), "one state for all of a turn"
    gate.sent(1.0)
    assert not gate.answered(6, 2) and out == [], "another process's word"
    assert gate.answered(7, 1) and out == ["first"]
    gate.put(lambda: out.append("fourth"))
    assert gate.answered(7, 2) and out == ["first", "second", "third", "fourth"] and gate.is_open


def test_a_deputy_that_does_not_answer_is_overdue_and_another_gets_everything() -> None:
    gate, out = closed_gate()
    assert not gate.is_overdue(ANSWER_S - 0.1) and gate.is_overdue(ANSWER_S + 0.1)
    gate.appoint(5)
    assert gate.is_due and not gate.is_overdue(99.0)
    gate.sent(10.0)
    gate.answered(7, 1)
    assert out == [], "it was replaced"
    gate.answered(5, gate.number)
    assert out == ["first"]


def test_with_nobody_left_nothing_waits_any_more() -> None:
    gate, out = closed_gate()
    gate.appoint(None)
    assert out == ["first"] and gate.is_open


# ---- the deputy's


def state(*moves: str, verdict: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"record": {"moves": list(moves)}, "verdict": verdict}


def keep(deputy: Deputy, *moves: str, now_s: float = 100.0, num_known: int = 0, successor: int | None = None,
         term: int = 0, verdict: dict[str, Any] | None = None) -> int:
    return deputy.keep({"kind": "KEEP", "from": 0, "term": term, "num_known": num_known, "successor": successor,
                        "state": state(*moves, verdict=verdict)}, now_s)


def beat(deputy: Deputy, now_s: float, *, term: int = 0, named: int | None = 7) -> None:
    deputy.hear({"kind": "BEAT", "term": term, "deputy": named}, now_s)


def look(deputy: Deputy, since_s: float, seconds: float) -> Loss | None:
    """Ticks from `since_s` on, up to the first that finds the controller lost."""
    ticks = (since_s + 0.05 * number for number in range(int(seconds / 0.05) + 1))
    return next((loss for tick_s in ticks if (loss := deputy.look(tick_s)) is not None), None)


@pytest.fixture
def deputy() -> Deputy:
    made = Deputy(7, TIMEOUT_S)
    made.look(100.0)
    return made


def test_a_process_that_keeps_nothing_never_takes_over(deputy: Deputy) -> None:
    deputy.doubt(0, has_died=True)
    assert look(deputy, 100.0, 60.0) is None


def test_moves_that_are_known_are_not_sent_again(deputy: Deputy) -> None:
    assert keep(deputy, "a", "b") == 2
    assert keep(deputy, "b", "c", num_known=1) == 3
    deputy.doubt(0, has_died=True)
    loss = deputy.look(100.0)
    assert loss is not None and loss.state["record"]["moves"] == ["a", "b", "c"]
    assert (loss.rank, loss.term, loss.has_died, loss.heard_s) == (0, 1, True, 100.0)
    assert deputy.look(200.0) is None, "once"


def test_silence_of_the_controller(deputy: Deputy) -> None:
    keep(deputy)
    assert look(deputy, 100.0, TIMEOUT_S - 1.0) is None
    beat(deputy, 114.0)
    assert look(deputy, 114.0, TIMEOUT_S - 1.0) is None
    loss = look(deputy, 128.0, 2.0)
    assert loss is not None and "not heard for 15" in loss.why and not loss.has_died


def test_a_deputy_that_stood_still_itself_holds_nobody_for_lost(deputy: Deputy) -> None:
    keep(deputy)
    assert deputy.look(160.0) is None
    assert look(deputy, 160.0, TIMEOUT_S - 1.0) is None and look(deputy, 174.0, 2.0) is not None


def test_a_controller_that_has_ended_the_run_may_be_busy_and_may_not_die(deputy: Deputy) -> None:
    keep(deputy, verdict={"status": "completed"})
    assert look(deputy, 100.0, 60.0) is None
    deputy.doubt(0, has_died=True)
    assert deputy.look(160.0) is not None


def test_another_process_in_trouble_and_the_controller_silent(deputy: Deputy) -> None:
    keep(deputy)
    deputy.doubt(0, has_died=False)
    assert look(deputy, 100.0, LOOK_AROUND_S - 0.2) is None
    beat(deputy, 101.6)
    assert look(deputy, 101.6, 5.0) is None, "it lives, and decides itself"
    deputy.doubt(0, has_died=False)
    assert LONGEST_TICK_S < LOOK_AROUND_S and deputy.look(110.0) is None, "a long tick counts for little"
    assert look(deputy, 110.0, LOOK_AROUND_S + 0.2) is not None


def test_doubts_about_another_process(deputy: Deputy) -> None:
    keep(deputy)
    deputy.doubt(3, has_died=True)
    assert deputy.look(100.1) is None


@pytest.mark.parametrize("record", [{"kind": "BEAT", "deputy": 5, "term": 0}, {"kind": "CONTROLLER", "term": 1}])
def test_with_another_deputy_or_another_controller_it_keeps_nothing(deputy: Deputy, record: dict[str, Any]) -> None:
    keep(deputy)
    deputy.hear(record, 100.0)
    deputy.doubt(0, has_died=True)
    assert deputy.look(100.0) is None


def test_what_is_said_in_an_older_term_counts_for_nothing(deputy: Deputy) -> None:
    keep(deputy, term=2)
    assert look(deputy, 100.0, 10.0) is None
    beat(deputy, 110.0, term=1, named=5)
    assert look(deputy, 110.0, 6.0) is not None


def test_in_a_hand_over_the_successor_may_be_lost_and_has_a_term(deputy: Deputy) -> None:
    keep(deputy, successor=3)
    loss = look(deputy, 100.0, TIMEOUT_S + 1.0)
    assert loss is not None and (loss.rank, loss.term) == (3, 2)
    keep(deputy, now_s=200.0, successor=3)
    deputy.doubt(0, has_died=True)
    loss = deputy.look(200.0)
    assert loss is not None and (loss.rank, loss.term) == (0, 2)


# ---- what a controller must hear once


def test_lasting_records_are_told_again_from_where_the_controller_knows_them() -> None:
    told = Told()
    for kind in ("READY", "CHECKPOINT", "PROGRESS", "FAULT", "REPORT", "REPORT", "FATAL"):
        told.note({"kind": kind})
    assert [record["kind"] for record in told.again(0)] == ["CHECKPOINT", "FAULT", "FATAL", "REPORT"]
    assert [record["kind"] for record in told.again(2)] == ["FATAL", "REPORT"]
    assert [record.get("told") for record in told.again(2)] == [3, None]
