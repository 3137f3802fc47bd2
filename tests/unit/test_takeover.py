"""A controller lost at any moment of a move, a stop or the run's end: what its deputy says next, and to whom.

Two real controllers on fakes of MPI and the log: the first is brought to a phase by its members' reports, what it sends
its deputy is all that the second one gets.
"""
from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_move import JOINERS, LEAVERS, MEMBERS, ROSTER, STAYERS, digest, probes

from migration.checkpoint_files import Start
from migration.config import apply_settings
from migration.controller import Controller
from migration.deputy import Deputy
from migration.faults import Faults
from migration.move import Report
from migration.options import Options
from migration.roster import Roster
from migration.profiles import get_profile
from migration.protocol import Phase

CONFIG = apply_settings(get_profile("tiny_TP2_PP2"), ["iterations=60"])
DEPUTY = 7  # of the controller on c
ALL = tuple(range(8))


class Side:
    """A controller in the process of `rank`, and what it has sent: (to whom, record)."""

    def __init__(self, run: Path, rank: int, term: int = 0, roster: Roster = ROSTER, **options: Any) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.rank, self.ended, self.is_answered = rank, "", term > 0
        world = SimpleNamespace(rank=rank, size=8, urgent=False, send=lambda to, record: self.sent.append((to, record)))
        timeline = SimpleNamespace(clock=lambda: 0.0, add_event=lambda *_: None, add_move=lambda **_: None)
        self.controller = Controller(
            world=world, config=CONFIG, options=Options(run=str(run), report=False, **options), roster=roster,
            term=term, timeline=timeline, address="127.0.0.1", on_end=lambda _: None, start=Start(),
            faults=Faults((), lambda _: None), step_down=self.end)
        self.now_s = time.monotonic()

    def end(self, text: str) -> None:
        self.ended = text

    @property
    def tally(self) -> Any:
        return self.controller._tally

    def hear(self, kind: str, sender: int, **fields: Any) -> None:
        self.controller.on_record({"kind": kind, "from": sender, **fields})

    def report(self, report: Report, members: Iterable[int] = MEMBERS) -> None:
        values = {Report.PREPARED: probes, Report.ACCEPTED: lambda _: self.tally.first_stop, Report.VERIFIED: digest}
        more = {"arrived_s": 1.0, "resumed_s": 2.0, "bytes": 1, "groups": [1, 1]}
        for member in members:
            self.hear("REPORT", member, report=report.value, move=self.tally.number,
                      value=values.get(report, lambda _: None)(member),
                      **(more if report is Report.ACKNOWLEDGED and self.tally.phase is Phase.COMMITTED else {}))

    def tick(self, seconds: float = 0.0) -> None:
        """One poll, or as many as there are in that time, from now on."""
        self.now_s = max(self.now_s, time.monotonic()) if seconds else self.now_s
        for _ in range(max(1, round(seconds / 0.05))):
            self.now_s += 0.05 if seconds else 0.0
            for rank in ALL:  # all are heard
                self.controller._watch._heard_s[rank] = self.now_s
            self.controller.on_tick(self.now_s)
            for deputy, record in [*self.sent] if self.is_answered else ():
                if record["kind"] == "KEEP":
                    self.hear("KEPT", deputy, number=record["number"], num_moves=0)

    def take(self, *kinds: str) -> list[tuple[int, str]]:
        """Of what was sent since the last time: (to whom, kind)."""
        found, self.sent = [(to, record["kind"]) for to, record in self.sent if record["kind"] in kinds], []
        return found


    def begin_generation(self, recovery: int, changed: int | None = None, settles: bool = True) -> None:
        """All slots are ready and start, and have done an iteration, if it `settles`. What they say of their sums is
        fake, and another word for slot `changed`; before the run's first iteration they know nothing of them."""
        for rank in self.tally.roster.holders:
            self.hear("READY", rank, recovery=recovery)
        while not self.take("START"):
            self.tick()
        for slot, rank in enumerate(self.tally.roster.holders):
            self.hear("STARTED", rank, recovery=recovery, iteration=0, sums=fake_sums(slot, changed) if recovery else "")
        if settles:
            self.end_first_iteration(recovery, changed)

    def end_first_iteration(self, recovery: int, changed: int | None = None) -> None:
        for slot, rank in enumerate(self.tally.roster.holders):
            self.hear("SUMS", rank, recovery=recovery, sums=fake_sums(slot, changed))


def fake_sums(slot: int, changed: int | None) -> str:
    return f"fake digest {slot}{' changed' if slot == changed else ''}"


class Two:
    """The first controller, its deputy, and the second controller once the first is lost."""

    def __init__(self, run: Path, rank: int = 0, **options: Any) -> None:
        self.run, self.options = run, options
        self.first = Side(run, rank, **options)
        self.rank = {4: 7, 6: 5}.get(rank, 7)  # the last spare of another host
        self.deputy = Deputy(self.rank, 15.0)
        self.deputy.look(time.monotonic())
        for spare in ALL[4:]:
            self.first.hear("READY", spare, recovery=0)
        self.first.begin_generation(0, settles=False)
        self.settle()  # the deputy is appointed, and knows of no sums yet
        self.first.end_first_iteration(0)
        self.settle()

    def lose_other(self, rank: int) -> None:
        """Of the other processes: the controller decides on it, and the deputy has that."""
        self.first.controller._suspect(rank, "gone", has_died=True)
        self.first.tick(1.0)
        self.settle()

    def settle(self) -> None:
        """The deputy answers, for as long as there is something to answer."""
        self.first.tick()
        while (states := [record for to, record in self.first.sent if record["kind"] == "KEEP" and to == self.rank]):
            self.first.sent = [(to, record) for to, record in self.first.sent if record["kind"] != "KEEP"]
            for record in json.loads(json.dumps(states)):
                self.first.hear("KEPT", self.rank, number=record["number"],
                                num_moves=self.deputy.keep(record, self.first.now_s))

    def begin_move(self) -> None:
        self.first.controller.request_move("b->c", "test")
        while not self.first.take("PREPARE"):
            self.settle()

    def to_switching(self) -> None:
        self.begin_move()
        self.first.report(Report.PREPARED)
        self.first.report(Report.ACCEPTED)
        self.settle()
        assert self.first.tally.phase is Phase.SWITCHING

    def to_committed(self) -> None:
        """The deputy has the commit."""
        self.to_switching()
        self.first.report(Report.VERIFIED)
        self.settle()

    def to_retired(self) -> None:
        self.to_committed()
        self.first.report(Report.ACKNOWLEDGED)
        self.settle()

    def lose(self, *, standings: Iterable[int] | None = None, committed: Iterable[int] = (), generation: int = 0,
             part: int = -1, may_park: Iterable[int] = ()) -> Side:
        """The first one dies; the others say where they stand.

        `committed`: those that have heard the commit, `may_park`: those that were told to make room.
        """
        self.deputy.doubt(self.first.rank, has_died=True)
        loss = self.deputy.look(self.first.now_s)
        assert loss is not None
        roster = Roster.from_json(loss.state["tally"]["roster"])
        self.second = Side(self.run, self.rank, loss.term, roster, **self.options)
        self.second.controller.take_over(loss)
        living = [rank for rank in ALL if rank != self.first.rank]
        known = [rank for rank in living if rank not in self.second.tally.roster.lost]
        assert self.second.take("CONTROLLER") == [(rank, "CONTROLLER") for rank in known]
        for rank in known if standings is None else standings:
            has_heard = rank in tuple(committed)
            self.second.hear("STANDING", rank, slot=rank if rank < 4 else None, position=9, part=part,
                             generation=generation + has_heard, committed=self.second.tally.number if has_heard else -1,
                             may_park=rank in tuple(may_park))
        self.second.tick()
        return self.second


@pytest.fixture
def two(tmp_path: Path) -> Two:
    """World rank 4, a spare on c, is the controller: its loss costs no slot."""
    return Two(tmp_path, rank=4)


SPARE_LEFT = tuple(rank for rank in ALL if rank != 4)
WITHOUT = tuple(rank for rank in MEMBERS if rank != 4)


def to(members: Iterable[int], kind: str) -> list[tuple[int, str]]:
    return [(member, kind) for member in sorted(members)]


# ---- the first one says nothing before its deputy has it


def test_a_move_a_commit_and_the_end_wait_for_the_deputy(two: Two) -> None:
    first = two.first
    first.controller.request_move("b->d", "test")
    for _ in range(3):
        first.tick()
    assert first.take("PREPARE") == []
    while not first.take("PREPARE"):
        first.sent = []
        first.tick()
        number = first.controller._gate.number
        first.hear("KEPT", DEPUTY, number=number, num_moves=0)
    assert two.first.tally.phase is Phase.PREPARING


def test_a_commit_waits(two: Two) -> None:
    two.to_switching()
    two.first.take()
    two.first.report(Report.VERIFIED)
    assert two.first.tally.phase is Phase.COMMITTED and two.first.take("COMMIT") == []
    two.first.hear("KEPT", DEPUTY, number=two.first.controller._gate.number, num_moves=0)
    assert two.first.take("COMMIT") == to(MEMBERS, "COMMIT")


def test_the_verdict_on_the_run_waits(two: Two, tmp_path: Path) -> None:
    for slot in range(4):
        two.first.hear("FINISHED", slot, recovery=0)
    two.first.tick()
    assert not (tmp_path / "result.json").exists() and two.first.take("END") == []
    two.first.hear("KEPT", DEPUTY, number=two.first.controller._gate.number, num_moves=0)
    assert (tmp_path / "result.json").exists() and len(two.first.take("END")) == 8


def test_a_deputy_that_does_not_answer_is_replaced(two: Two) -> None:
    two.first.controller.request_move("b->c", "test")
    two.first.tick(4.0)
    keeps = [(rank, record) for rank, record in two.first.sent if record["kind"] == "KEEP"]
    assert [rank for rank, _ in keeps] == [7, 6], "the next one, still not on the controller's host"
    assert keeps[1][1]["num_known"] == 0 and not two.first.take("PREPARE")


# ---- lost while nothing is under way


def test_training_goes_on(two: Two) -> None:
    second = two.lose()
    assert second.tally.phase is Phase.TRAINING and second.tally.roster.lost == {4}
    assert second.controller._positions == dict.fromkeys(range(4), 9)
    assert second.take("RECOVER", "ABORT", "COMMIT", "END") == []
    second.tick(1.0)
    assert second.controller._gate.deputy == 5, "on another host than 7's, the last spare"


def test_nothing_is_decided_before_all_have_said_where_they_stand(two: Two) -> None:
    two.begin_move()
    second = two.lose(standings=SPARE_LEFT[:-1])
    assert second.take("ABORT") == []
    second.hear("STANDING", SPARE_LEFT[-1], slot=None, position=0, part=-1, generation=0, committed=-1, may_park=False)
    second.tick()
    assert second.take("ABORT") == to(WITHOUT, "ABORT")


def test_a_lost_slot_is_replaced(tmp_path: Path) -> None:
    two = Two(tmp_path, rank=0)
    second = two.lose()
    second.tick(1.0)
    assert second.tally.phase is Phase.RECOVERING and second.tally.roster.holders == (4, 5, 2, 3)
    assert [rank for rank, _ in second.take("RECOVER")] == [1, 2, 3, 4, 5, 6, 7]


def test_reports_that_come_once_more_decide_nothing(tmp_path: Path) -> None:
    """Until it is known whether others are lost with the slot's process, the move stands as it was."""
    two = Two(tmp_path)
    two.to_switching()
    two.first.report(Report.VERIFIED, [rank for rank in MEMBERS if rank != 0])
    second = two.lose(part=0)
    second.report(Report.VERIFIED, [rank for rank in MEMBERS if rank != 0])
    assert second.tally.phase is Phase.SWITCHING and not second.take("COMMIT", "ABORT")
    second.tick(1.0)
    assert second.tally.phase is Phase.RECOVERING


def test_a_lost_slot_without_recovery_ends_the_job_with_one_line(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    second = Two(tmp_path, rank=0, recover="off").lose()
    second.tick(1.0)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed" and "world rank 0 on a is lost: " in result["error"]
    assert capsys.readouterr().err.count("world rank 0") == 1


def test_queued_requests_and_records_are_known(two: Two) -> None:
    two.first.controller._schedule.add("b->c@50")
    two.first.controller._record.checkpoint({"iteration": 8, "folder": "f", "bytes": 1, "time_s": 1.0})
    assert two.first.controller.request_move("a->d@55", "test") == 1
    two.settle()
    second = two.lose()
    assert [pending.text for pending in second.controller._schedule.waiting] == ["b->c@50", "a->d@55"]
    assert second.controller._record.checkpoints[0]["iteration"] == 8


def test_a_record_that_comes_twice_counts_once(two: Two) -> None:
    fault = {"text": "kill@0:PREPARING", "fault": "kill", "slot": 0, "phase": "PREPARING", "told": 1}
    two.first.hear("FAULT", 2, **fault)
    two.first.controller._gate.close()
    two.settle()
    second = two.lose()
    second.hear("FAULT", 2, **fault)
    second.hear("FAULT", 2, **{**fault, "told": 2})
    assert [row["fired"] for row in second.controller._record.faults] == [2]


# ---- lost in a move


def test_in_preparing_the_move_aborts(two: Two) -> None:
    two.begin_move()
    second = two.lose()
    assert second.take("ABORT", "COMMIT") == to(WITHOUT, "ABORT") and second.tally.phase is Phase.ABORTED
    second.report(Report.ACKNOWLEDGED, WITHOUT)
    assert second.tally.phase is Phase.TRAINING and second.tally.generation == 0
    assert [move["outcome"] for move in second.controller._record.moves] == ["ABORTED"]


def test_what_members_say_meanwhile_waits(two: Two) -> None:
    """All have verified, as far as the next controller hears; but it hasn't heard where they stand."""
    two.to_switching()
    two.deputy.doubt(4, has_died=True)
    second = two.lose(standings=())
    second.report(Report.VERIFIED, MEMBERS)
    assert second.tally.phase is Phase.SWITCHING and second.take("COMMIT") == []


def test_a_commit_that_only_the_deputy_has_is_said_to_all(two: Two) -> None:
    two.to_committed()
    second = two.lose()
    # the lost one was a joiner, and holds a slot since: it is replaced, from the roster before the move
    second.tick(1.0)
    assert second.tally.phase is Phase.RECOVERING and second.tally.roster.holders == (0, 1, 2, 3)


@pytest.fixture
def beside(tmp_path: Path) -> Two:
    """The controller has no part in the move."""
    return Two(tmp_path, rank=6)


def test_a_commit_that_the_deputy_has_is_carried_out(beside: Two) -> None:
    beside.to_committed()
    second = beside.lose(committed=(0, 1), generation=0)
    assert second.take("COMMIT", "ABORT") == to(MEMBERS, "COMMIT")
    second.report(Report.ACKNOWLEDGED)
    assert second.take("RETIRE") == to(MEMBERS, "RETIRE") and second.tally.phase is Phase.TRAINING
    (move,) = second.controller._record.moves
    assert (move["outcome"], move["bytes"], second.tally.generation) == ("COMMITTED", len(MEMBERS), 1)
    assert second.tally.roster.holders == (0, 1, 4, 5)


def test_a_commit_that_a_member_has_heard_is_carried_out(beside: Two) -> None:
    """The deputy had been replaced, and doesn't know of the verdict."""
    beside.to_switching()
    second = beside.lose(committed=(JOINERS[0],))
    assert second.take("COMMIT", "ABORT") == to(MEMBERS, "COMMIT") and second.tally.generation == 1


def test_without_a_verdict_it_aborts(beside: Two) -> None:
    beside.to_switching()
    second = beside.lose()
    assert second.take("COMMIT", "ABORT") == to(MEMBERS, "ABORT")


def test_all_park_before_the_abort_if_one_has_been_told_to(beside: Two) -> None:
    """It is collective: who parks waits for all the others."""
    beside.to_switching()
    second = beside.lose(part=0, may_park=STAYERS[:1])
    told = second.take("PARK", "ABORT")
    assert [kind for _, kind in told] == ["PARK"] * len(MEMBERS) + ["ABORT"] * len(MEMBERS)
    assert {member for member, kind in told if kind == "PARK"} == set(MEMBERS)


def test_nobody_parks_who_was_told_to_in_another_move(beside: Two) -> None:
    beside.to_switching()
    second = beside.lose(part=-1, may_park=STAYERS[:1])
    assert second.take("PARK", "ABORT") == to(MEMBERS, "ABORT")


def test_a_commit_that_all_have_acknowledged_is_retired_again(beside: Two) -> None:
    beside.to_retired()
    second = beside.lose(generation=1)
    assert second.take("RETIRE") == to((rank for rank in ALL if rank != 6), "RETIRE")
    assert [move["outcome"] for move in second.controller._record.moves] == ["COMMITTED"]


def test_old_communicators_that_may_be_closed_need_a_recovery(beside: Two) -> None:
    """They are rebuilt over a store in the lost process."""
    beside.to_switching()
    beside.first.controller._may_be_closed = True
    beside.first.hear("REPORT", STAYERS[0], report="FAILED", move=0, value="no")
    beside.settle()
    second = beside.lose()
    assert second.tally.phase is Phase.RECOVERING and len(second.take("RECOVER")) == 7
    assert second.controller._record.recoveries[0]["lost"] == [6]


def test_a_leaver_that_was_the_controller_is_a_spare_after_the_commit(tmp_path: Path) -> None:
    two = Two(tmp_path, rank=LEAVERS[0])
    two.to_committed()
    second = two.lose(committed=STAYERS)
    left = [rank for rank in MEMBERS if rank != LEAVERS[0]]
    assert second.take("COMMIT", "RECOVER") == to(left, "COMMIT")
    second.report(Report.ACKNOWLEDGED, left)
    assert second.tally.phase is Phase.TRAINING and second.tally.generation == 1


@pytest.mark.parametrize("ahead", [{"generation": 1}, {"part": 3}])
def test_a_deputy_that_knows_too_little_ends_the_job(beside: Two, ahead: dict[str, int], tmp_path: Path) -> None:
    beside.lose(**ahead)
    assert "is too old" in json.loads((tmp_path / "result.json").read_text())["error"]


# ---- lost in a recovery, a stop, or at the end


def test_a_recovery_begins_once_more(tmp_path: Path) -> None:
    two = Two(tmp_path, rank=6)
    two.lose_other(3)
    assert two.first.tally.phase is Phase.RECOVERING
    second = two.lose(generation=1)
    found = [record["recovery"] for _, record in second.sent if record["kind"] == "RECOVER"]
    assert found == [2] * 6 and second.tally.generation == 2 and second.tally.roster.lost == {3, 6}


@pytest.mark.parametrize("changed", [None, 1])
def test_sums_are_compared_with_those_that_the_last_controller_was_told(tmp_path: Path, changed: int | None) -> None:
    two = Two(tmp_path, rank=6)
    two.lose_other(3)
    second = two.lose(generation=1)
    second.begin_generation(2, changed)
    assert second.tally.phase is Phase.TRAINING
    assert [row["keeps_bits"] for row in second.controller._record.recoveries] == [None, changed is None]


def test_the_next_controller_knows_the_sums_that_the_first_iteration_gave(tmp_path: Path) -> None:
    second = Two(tmp_path, rank=6).lose()
    second.tick(1.0)
    second.controller._suspect(3, "gone", has_died=True)
    second.tick(1.0)
    assert second.tally.phase is Phase.RECOVERING
    second.begin_generation(1)
    assert [row["keeps_bits"] for row in second.controller._record.recoveries] == [True]


def test_a_move_that_changes_sums_says_so_to_the_recovery_after_it(two: Two) -> None:
    two.to_switching()
    first = two.first
    first.report(Report.VERIFIED)
    two.settle()
    for rank in MEMBERS:
        slot = first.tally.roster.slot_of(rank)
        first.hear("REPORT", rank, report="ACKNOWLEDGED", move=0, value=None, arrived_s=1.0, resumed_s=2.0, bytes=1,
                   groups=[1, 1], sums=f"fake digest {'of who leaves' if slot is None else slot}"
                   + (" changed" if slot == 1 else ""))
    assert first.tally.phase is Phase.TRAINING
    two.lose_other(0)
    first.begin_generation(1, changed=1)
    assert [row["keeps_bits"] for row in first.controller._record.recoveries] == [True]


def test_a_slot_that_starts_after_the_controller_with_its_slot_is_lost_has_not_all_started(tmp_path: Path) -> None:
    """In a recovery: it isn't through by that, and the sums of before it are still those to compare with."""
    two = Two(tmp_path, rank=0)
    two.lose_other(3)
    second = two.lose(generation=1)
    second.hear("STARTED", 1, recovery=1, iteration=0, sums="fake digest 1")
    assert second.tally.phase is Phase.RECOVERING and second.take("BEGUN") == []
    second.tick(1.0)
    second.begin_generation(2)
    assert [row["keeps_bits"] for row in second.controller._record.recoveries] == [None, True]


# ---- it lives, and a process beside it is lost


def test_a_controller_that_leaves_its_slot_stands_by_and_hands_its_role_over(tmp_path: Path) -> None:
    """Not before the recovery is through."""
    two = Two(tmp_path, rank=0)
    first = two.first
    two.lose_other(1)
    told = {rank: record["slot"] for rank, record in first.sent if record["kind"] == "RECOVER"}
    assert told == {0: None, 2: 2, 3: 3, 4: 0, 5: 1, 6: None, 7: None}
    first.begin_generation(1)
    two.settle()
    holders = first.tally.roster.holders
    for rank in holders[:-1]:
        first.hear("PROGRESS", rank, recovery=1, iteration=1)
    assert first.controller.successor is None and first.controller.is_to_end
    first.hear("PROGRESS", holders[-1], recovery=1, iteration=1)
    assert first.controller.successor == 2 and not first.controller.is_to_end
    assert first.controller._record.recoveries[0]["keeps_bits"] is True


def test_who_falls_silent_in_a_recovery_is_noticed_though_the_role_will_leave_the_host(tmp_path: Path) -> None:
    """The host is to be left, so a successor is named at once; it doesn't come to that before the first iteration."""
    two = Two(tmp_path, rank=0)
    first = two.first
    two.lose_other(1)
    first.begin_generation(1)
    first.controller.successor = 2
    now_s = first.now_s + 1.0
    first.controller._watch._heard_s = dict.fromkeys(ALL, now_s) | {5: now_s - 60.0}
    first.controller.on_tick(now_s)
    assert 5 in first.controller._suspects.keys() | first.tally.roster.lost


def test_a_successor_says_once_more_what_may_come_too_late(beside: Two) -> None:
    """MPI keeps the order of one sender's records only."""
    beside.to_retired()
    second = Side(beside.run, 7, 1, beside.first.tally.roster)
    second.controller.inherit(json.loads(json.dumps(beside.first.controller._state(0))))
    told = second.take("CONTROLLER", "RETIRE")
    assert [kind for rank, kind in told if rank == 2] == ["CONTROLLER", "RETIRE"]
    assert {rank for rank, kind in told if kind == "RETIRE"} >= set(MEMBERS)


@pytest.mark.parametrize(("new", "kept"), [("sum", True), ("other", False), ("-", None)])
def test_whether_sums_kept_their_bits_is_known_to_the_next_controller(beside: Two, new: str, kept: bool | None) -> None:
    beside.begin_move()
    beside.first.report(Report.PREPARED, MEMBERS[:-1])
    beside.first.hear("REPORT", MEMBERS[-1], report=Report.PREPARED.value, move=0, value=probes(MEMBERS[-1], new))
    beside.first.report(Report.ACCEPTED)
    beside.settle()
    beside.first.report(Report.VERIFIED)
    beside.settle()
    assert beside.first.tally.bits_kept is kept
    assert beside.lose(committed=(0, 1)).tally.bits_kept is kept


def test_a_held_move_that_was_refused_is_proposed_at_its_hold_again(tmp_path: Path) -> None:
    """Training waits there: at another iteration nobody would arrive. Groups are connected later then."""
    two = Two(tmp_path, rank=4, vacate=("b->c@20",), hold=True)
    first = two.first
    for slot in range(4):
        first.hear("PROGRESS", slot, recovery=0, iteration=12)
    while not first.take("PREPARE"):
        two.settle()
    for member in MEMBERS:
        first.hear("REPORT", member, report=Report.PREPARED.value, move=0, value=probes(member),
                   connect=["1", "2", "3"], connect_s=0.1, position=12)
    hold = first.tally.position
    proposed = [record for _, record in first.sent if record["kind"] == "PROPOSE"]
    assert {at for record in proposed for _, at in record["connects"]} != {hold}, "some are connected before"
    first.sent.clear()
    refused = first.tally.first_stop
    first.hear("REPORT", 0, report=Report.REFUSED.value, move=0, value=refused)
    assert first.tally.phase is Phase.READY and first.tally.position == hold and first.tally.first_stop > refused
    assert {record["position"] for _, record in first.sent if record["kind"] == "PROPOSE"} == {hold}
    for _ in range(20):  # a slot that is faster than the controller, up to the hold
        if first.tally.first_stop >= 2 * hold - 1:
            break
        first.hear("REPORT", 0, report=Report.REFUSED.value, move=0, value=first.tally.first_stop)
    assert first.tally.phase is Phase.READY and first.tally.position == hold
    first.report(Report.ACCEPTED)
    assert first.tally.phase is Phase.SWITCHING


def test_a_stop_that_all_have_agreed_on_is_said_again(tmp_path: Path) -> None:
    two = Two(tmp_path, rank=6, checkpoints=str(tmp_path))
    two.first.controller._request_stop(requeue=True)
    two.settle()
    two.first.tick()
    (iteration,) = {record["iteration"] for _, record in two.first.sent if record["kind"] == "END_BEFORE"}
    for slot in range(4):
        two.first.hear("END_ANSWER", slot, iteration=iteration, accepted=True, position=0)
    two.settle()
    second = two.lose()
    told = [(record["iteration"], record["agreed"]) for _, record in second.sent if record["kind"] == "END_BEFORE"]
    assert told == [(iteration, True)] * 4


def test_the_end_of_the_run_is_said_again(two: Two, tmp_path: Path) -> None:
    for slot in range(4):
        two.first.hear("FINISHED", slot, recovery=0)
    two.settle()
    (tmp_path / "result.json").unlink()
    second = two.lose()
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "completed" and len(second.take("END")) == 7
