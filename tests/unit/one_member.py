"""A member of a job, on fakes of MPI, the log and its groups, for tests of what records and threads do to it."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from migration.arms import ARMS
from migration.member import Member
from migration.options import Options
from migration.part import Part
from migration.roster import Assignment, MovePlan

WAIT_S = 30.0


class FakeEnds:
    """A pair, a wire or groups, as far as they can be ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def make_member() -> Member:
    """World rank 1, without a slot."""
    world = SimpleNamespace(rank=1, send=lambda *_: None, urgent=False)
    timeline = SimpleNamespace(clock=lambda: 0.0, add_event=lambda *_: None)
    return Member(world=world, groups=FakeEnds(), timeline=timeline, options=Options(run="run"), address="here")


def give_part(member: Member, **fields: Any) -> Part:
    """A part in a move of slot 0, from process 0 to 1, is the member's."""
    plan = MovePlan(assignments=(Assignment(slot=0, leaver=0, joiner=1),))
    member.part = Part(number=0, generation=1, plan=plan, slot=0, store=("127.0.0.1", 1), prepare_timeout_s=WAIT_S,
                       arm=ARMS["full"], pair=FakeEnds(), **fields)
    return member.part
