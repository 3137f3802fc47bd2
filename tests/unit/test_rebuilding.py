"""What a process does when the whole job is built anew: every wait ends, and what its threads still do is no matter."""
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from one_member import WAIT_S, FakeEnds, give_part, make_member

from migration.arms import boundary
from migration.errors import MoveFailed, Recovering
from migration.member import Member
from migration.part import Part


@pytest.fixture
def member() -> Member:
    made = make_member()
    made.slot, made.is_training = 1, True
    return made


def recover(member: Member, *, slot: int | None = 1, recovery: int = 1) -> None:
    member.on_record({"kind": "RECOVER", "term": 0, "slot": slot, "generation": 4, "recovery": recovery,
                      "holds": [boundary(7)]})


def join(member: Member) -> Part:
    """The member has a part in a move, as a joiner, whose threads are at work."""
    return give_part(member, role="joiner", num_busy=2, wire=FakeEnds())


def test_a_wait_ends_and_the_new_slot_is_taken(member: Member) -> None:
    ended = threading.Event()

    def train() -> None:
        with pytest.raises(Recovering):
            member.wait_for(lambda: False)
        ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    member.check()
    recover(member, slot=None)
    assert ended.wait(WAIT_S) and member.groups.calls == ["abort_all"]
    assert member.slot == 1 and member.is_recovering, "the training thread changes it, once it is out of everything"
    for wait in (member.check, lambda: member.at_boundary(SimpleNamespace(iteration=3))):
        with pytest.raises(Recovering):
            wait()
    member.begin_anew()
    assert (member.slot, member.generation, member.num_recoveries, member.position) == (None, 4, 1, -1)
    member.check()
    assert member._must_wait(boundary(7)), "a hold for a move that is still to come"


def test_what_the_controller_said_before_counts_no_more(member: Member) -> None:
    member.on_record({"kind": "START", "term": 0, "store": ["127.0.0.1", 1], "folder": "", "iteration": 0})
    member._on_end_before({"iteration": 9, "agreed": False})
    recover(member)
    with pytest.raises(Recovering):
        member.wait_for(lambda: member.started)
    assert not member._is_end_open(boundary(9))


def test_a_part_in_a_move_is_dropped_and_never_cleans_up(member: Member) -> None:
    """Its last thread may leave when the next generation is being built already."""
    part = join(member)
    part.verdict = "COMMIT"  # whatever it had come to
    recover(member)
    assert member.part is None and part.is_over and part.wire.calls == ["close"] and part.pair.calls == ["abort"]
    assert all(event.is_set() for event in (part.warm, part.among_joiners_prepared, part.stream_done))
    late = FakeEnds()
    with pytest.raises(MoveFailed, match="the move was over before its listener came to be used"):
        member.give(part, listener=late)
    assert late.calls == ["close"], "what comes too late is ended at once"
    member.leave(part)
    member.leave(part)
    assert member.groups.calls == ["abort_all"], "nothing was discarded"
    with pytest.raises(Recovering):
        member.wait_for(lambda: part.verdict in ("COMMIT", "ABORT"))


def test_a_thread_of_a_dropped_part_is_waited_for(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    part, goes_on = join(member), threading.Event()
    part.prepare_thread = threading.Thread(target=goes_on.wait, daemon=True)
    part.prepare_thread.start()
    recover(member)
    monkeypatch.setattr("migration.rebuilding._JOIN_S", 0.05)
    with pytest.raises(RuntimeError, match="prepare thread of move 0"):
        member.begin_anew()
    goes_on.set()


def test_a_second_recovery_while_the_first_is_carried_out(member: Member) -> None:
    recover(member, slot=1, recovery=1)
    member.begin_anew()
    recover(member, slot=2, recovery=2)
    with pytest.raises(Recovering):
        member.wait_for(lambda: member.started)
    member.begin_anew()
    assert (member.slot, member.num_recoveries) == (2, 2) and not member.is_recovering
