"""An abort that comes while old communicators are being parked: it waits for that, on who has any."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from migration.arms import ARMS
from migration.member import Member
from migration.options import Options
from migration.part import Part
from migration.roster import Assignment, MovePlan


class FakeEnds:
    """A pair or groups, as far as they can be ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def begin(role: str) -> Member:
    """A member that is in the switchover of a move that makes room."""
    world = SimpleNamespace(rank=1, send=lambda *_: None, urgent=False)
    timeline = SimpleNamespace(clock=lambda: 0.0, add_event=lambda *_: None)
    member = Member(world=world, groups=FakeEnds(), timeline=timeline, options=Options(run="run"), address="here")
    member.part = Part(number=0, generation=1, plan=MovePlan(assignments=(Assignment(slot=0, leaver=0, joiner=1),)),
                       role=role, slot=0, store=("127.0.0.1", 1), prepare_timeout_s=30.0, arm=ARMS["full"], num_busy=1,
                       verdict="SWITCH", makes_room=True, pair=FakeEnds())
    return member


def hear(member: Member, kind: str, **fields: Any) -> None:
    member.on_record({"kind": kind, "term": 0, "move": 0, **fields})


def abort(member: Member) -> None:
    hear(member, "ABORT", reason="why", release=None, store=None)


@pytest.mark.parametrize("role", ["stayer", "leaver"])
def test_it_waits_until_all_is_parked(role: str) -> None:
    member = begin(role)
    part = member.part
    hear(member, "PARK")
    abort(member)
    assert part.is_over and not member.groups.calls and not part.pair.calls
    member.end_parking(part)
    assert member.groups.calls == ["abort_next"] and part.pair.calls == ["abort"]
    member.end_parking(part)
    assert member.groups.calls == ["abort_next"]


@pytest.mark.parametrize("role, parks, ends", [("stayer", False, False), ("stayer", True, True), ("joiner", True, False)])
def test_else_it_ends_all_at_once(role: str, parks: bool, ends: bool) -> None:
    """Before anybody was told to park, after that is done, and on a joiner, which has nothing to park."""
    member = begin(role)
    if parks:
        hear(member, "PARK")
    if ends:
        member.end_parking(member.part)
    abort(member)
    assert member.groups.calls == ["abort_next"]


def test_no_abort_no_end() -> None:
    member = begin("stayer")
    hear(member, "PARK")
    member.end_parking(member.part)
    assert not member.groups.calls and not member.part.is_parking
