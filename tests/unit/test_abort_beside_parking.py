"""An abort that comes while old communicators are being parked: it waits for that, on who has any."""
from __future__ import annotations

from typing import Any

import pytest
from one_member import give_part, make_member

from migration.member import Member


def begin(role: str) -> Member:
    """A member that is in the switchover of a move that makes room."""
    member = make_member()
    give_part(member, role=role, num_busy=1, verdict="SWITCH", makes_room=True)
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


@pytest.mark.parametrize("role, parks, ends", [
    ("stayer", False, False), ("stayer", True, True), ("joiner", True, False)])
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
