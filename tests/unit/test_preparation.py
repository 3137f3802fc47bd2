"""An ABORT ends what the prepare thread is at, whenever it comes: the pair of a leaver and its joiner, or a rest.

On fakes of everything that a prepare thread calls: only who can reach the pair, and when, is of interest.
"""
from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from migration import preparation
from migration.arms import ARMS
from migration.communicators.gloo import GlooCommunicator
from migration.errors import MoveFailed
from migration.leaving import Leaving
from migration.member import Member
from migration.options import Options
from migration.part import Part
from migration.roster import Assignment, MovePlan
from migration.schedule import Pending
from migration.stops import Stops

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

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def member() -> Member:
    pair = StuckPair()
    groups = SimpleNamespace(pair=pair, meeting=lambda *_: contextlib.nullcontext(dist.HashStore()), used=None,
                             live_probe=lambda slots: "", learn_switches=lambda *_: None,
                             make_pair=lambda name, group_rank: pair, prepare_pair=lambda *_: pair.prepare())
    made = Member.__new__(Member)  # without a world: nothing here speaks
    Stops.__init__(made)
    made.groups, made.generation = groups, 0
    made.timeline = SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
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
    with pytest.raises(MoveFailed, match="slot 0: the move was over before its pair came to be used"):
        preparation._build(member, part)
    assert not member.groups.pair.begun.is_set() and member.groups.pair.aborted.is_set()


# ---- rests between groups


class Prepared(GlooCommunicator):
    """A group that was prepared and took some work."""

    def __init__(self) -> None:
        super().__init__("g1/tp", (0, 1), 0)
        self.work_s = 1.0


def resting(member: Member, role: str) -> tuple[Part, Prepared, threading.Thread]:
    """A prepare thread after the first of two groups, which would rest for an hour if nothing ended that."""
    member.options = Options(run="", prepare_share=1 / 3601)
    member.groups.device = torch.device("cpu")
    part, made = dataclasses.replace(leaver(), role=role, rests_until_s=time.monotonic() + 7200.0), Prepared()
    member.part = part
    thread = threading.Thread(target=preparation._after_group, args=(member, part, made, 1), daemon=True)
    thread.start()
    return part, made, thread


def begins_to_wait(member: Member, thread: threading.Thread) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not member._changed._waiters:  # of threading.Condition
        assert thread.is_alive() and time.monotonic() < ends_s, "it doesn't rest"
        time.sleep(0.001)


def test_an_abort_ends_a_rest(member: Member) -> None:
    part, made, thread = resting(member, "stayer")
    begins_to_wait(member, thread)
    with member._changed:
        part.verdict = "ABORT"
        member._changed.notify_all()
    thread.join(WAIT_S)
    assert not thread.is_alive() and part.prepared == (1, 2)
    assert [stage for stage, _ in made.take_costs()] == ["rest"]


def test_training_that_comes_to_its_hold_ends_a_rest(member: Member) -> None:
    part, made, thread = resting(member, "stayer")
    begins_to_wait(member, thread)
    member.hold_at({4})
    training = threading.Thread(target=member._wait_for_part, args=(4,), daemon=True)
    training.start()
    thread.join(WAIT_S)
    assert not thread.is_alive() and training.is_alive()
    member.hold_at(set())


@pytest.mark.parametrize("role, changes", [("joiner", {}), ("stayer", {"rests_until_s": 0.0})])
def test_who_does_not_train_or_has_no_time_left_does_not_rest(member: Member, role: str,
                                                              changes: dict[str, Any]) -> None:
    member.options = Options(run="", prepare_share=1 / 3601)
    member.groups.device = torch.device("cpu")
    part, made = dataclasses.replace(leaver(), role=role, rests_until_s=time.monotonic() + 7200.0), Prepared()
    for name, value in changes.items():
        setattr(part, name, value)
    preparation._after_group(member, part, made, 1)
    assert made.take_costs() == [] and part.prepared == (1, 2)


@pytest.mark.parametrize("arm, asked, expected_s", [("full", -1, 20.0), ("naive", -1, 0.0), ("full", 7, 0.0)])
def test_how_long_members_are_told_to_rest(arm: str, asked: int, expected_s: float) -> None:
    """For half of the 80 iterations left, at the pace of the fastest one. Not where training stands still meanwhile,
    nor for a move that the controller asked for since a node is in trouble."""
    actions: Any = Leaving.__new__(Leaving)
    actions._current, actions._asked = Pending(id=7, text="b1", arm_name=arm), asked
    actions._positions, actions._tally = {0: 20, 1: 19}, SimpleNamespace(roster=SimpleNamespace(holders=(0, 1)))
    actions.options, actions.config = Options(run="", prepare_deadline_s=300.0), SimpleNamespace(iterations=100)
    actions._times_s = [0.9, 0.5, 0.7]
    assert actions._all_rests_s() == expected_s
