"""An ABORT ends what the prepare thread is at, whenever it comes: here the pair of a leaver and its joiner.

On fakes of everything that a prepare thread calls: only who can reach the pair, and when, is of interest.
"""
from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from migration import preparation
from migration.arms import ARMS
from migration.errors import MoveFailed
from migration.member import Member
from migration.part import Part
from migration.plan import Assignment, MovePlan

WAIT_S = 30.0


class StuckPair:
    """Its other end never comes: prepared until it is aborted, as in NCCL's init."""

    name = "g1/pair0"

    def __init__(self) -> None:
        self.begun, self.aborted = threading.Event(), threading.Event()

    def prepare(self) -> None:
        self.begun.set()
        assert self.aborted.wait(WAIT_S), "nobody could abort it"
        raise RuntimeError("aborted by another thread")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    pair = StuckPair()
    groups = SimpleNamespace(pair=pair, live_probe=lambda slots: "", learn_switches=lambda *_: None,
                             make_pair=lambda name, group_rank: pair, prepare_pair=lambda *_: pair.prepare())
    made = Member.__new__(Member)  # without a world: nothing here speaks
    made._changed = threading.Condition()
    made.groups, made.generation = groups, 0
    made.timeline = SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(preparation, "connect_store", lambda *_: None)
    return made


def leaver() -> Part:
    plan = MovePlan(assignments=(Assignment(slot=0, leaver=0, joiner=1),))
    return Part(number=0, generation=1, plan=plan, role="leaver", slot=0, store=("127.0.0.1", 1),
                prepare_timeout_s=WAIT_S, arm=ARMS["full"])


def test_an_abort_ends_a_pair_that_is_being_prepared(member: Member) -> None:
    part, errors = leaver(), []

    def build() -> None:
        try:
            preparation._build(member, part)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    assert member.groups.pair.begun.wait(WAIT_S)
    assert part.pair is member.groups.pair, "an ABORT finds it"
    part.pair.aborted.set()
    thread.join(WAIT_S)
    assert "aborted by another thread" in str(errors[0])


def test_after_an_abort_no_pair_is_prepared(member: Member) -> None:
    part: Any = leaver()
    part.verdict = "ABORT"
    with pytest.raises(MoveFailed, match="g1/pair0: the move was aborted before it was prepared"):
        preparation._build(member, part)
    assert not member.groups.pair.begun.is_set() and part.pair is None
