"""All slots end before one and the same iteration, whatever the order in which they train and hear of it."""
from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from migration.arms import boundary
from migration.deputy import Gate
from migration.errors import UserError
from migration.member import Member
from migration.options import Options
from migration.protocol import Phase
from migration.stopping import Stop, Stopping

NUM_SLOTS = 4
LAST = 60


class OneController(Stopping):
    """What Stopping needs of a controller, with records in lists instead of MPI."""

    def __init__(self, inbox: list[deque[dict[str, Any]]], *, checkpoints: str = "somewhere") -> None:
        self.options = Options(run="run", checkpoints=checkpoints)
        self.config = SimpleNamespace(iterations=LAST)
        self._tally = SimpleNamespace(roster=SimpleNamespace(holders=tuple(range(NUM_SLOTS))), phase=Phase.TRAINING)
        self._schedule = SimpleNamespace(drop_next=lambda: None)
        self.timeline = SimpleNamespace(add_event=lambda *_: None)
        self._positions, self._finished, self._inbox, self._gate = {}, set(), inbox, Gate()
        self.said: list[str] = []

    def _send(self, rank: int, kind: str, **fields: Any) -> None:
        self._inbox[rank].append({"kind": kind, **fields})

    def _say(self, text: str) -> None:
        self.said.append(text)

    @property
    def stop(self) -> Stop | None:
        return self._stop


def make_member(rank: int, outbox: deque[dict[str, Any]]) -> Member:
    world = SimpleNamespace(rank=rank, send=lambda _, record: outbox.append(record))
    return Member(world=world, groups=None, timeline=None, options=Options(run="run"), address="here")


def step(member: Member, iteration: int) -> int:
    """What the training loop does at a boundary, up to where it would wait. Returns the iteration it is at then."""
    member._stop, member._begun = boundary(iteration), False
    if member._must_wait(boundary(iteration)) or member.ends_before(iteration):
        return iteration
    member._begun = True
    return iteration + 1


@pytest.mark.parametrize("seed", range(100))
def test_every_slot_ends_before_the_same_iteration(seed: int) -> None:
    rng = random.Random(seed)
    inbox: list[deque[dict[str, Any]]] = [deque() for _ in range(NUM_SLOTS)]
    outbox: deque[dict[str, Any]] = deque()
    controller = OneController(inbox)
    members = [make_member(rank, outbox) for rank in range(NUM_SLOTS)]
    at, asked_at, lead = [0] * NUM_SLOTS, rng.randrange(LAST), rng.choice((0, 1, 3))
    for _ in range(20_000):
        choice = rng.random()
        rank = rng.randrange(NUM_SLOTS)
        if choice < 0.4 and at[rank] < LAST and at[rank] <= min(at) + lead:  # collectives keep them together, nearly
            before, at[rank] = at[rank], step(members[rank], at[rank])
            if at[rank] > before and rng.random() < 0.5:  # some reports of progress come late
                controller._positions[rank] = at[rank]
        elif choice < 0.6 and inbox[rank]:
            members[rank]._on_end_before(inbox[rank].popleft())
        elif choice < 0.8 and outbox:
            controller._on_end_answer(outbox.popleft())
        if controller.stop is None and min(at) >= asked_at:
            controller._request_stop(requeue=True)
            controller._propose_stop()
        if controller.stop and controller.stop.agreed and not any(inbox) and len(set(at)) == 1 \
                and at[0] in (controller.stop.iteration, LAST):
            break
    assert controller.stop is not None and controller.stop.agreed, "never agreed"
    assert not controller.stop.waiting and len(set(at)) == 1, at
    end = controller.stop.iteration or LAST
    assert all(position == end for position in at) and (end == LAST) == (controller.stop.iteration is None)
    assert all(member.ends_before(end) for member in members) or end == LAST


def test_a_slot_that_is_past_makes_a_later_proposal() -> None:
    inbox: list[deque[dict[str, Any]]] = [deque() for _ in range(NUM_SLOTS)]
    controller = OneController(inbox)
    controller._positions = dict.fromkeys(range(NUM_SLOTS), 5)
    controller._request_stop(requeue=False)
    controller._propose_stop()
    assert [inbox[rank].popleft()["iteration"] for rank in range(NUM_SLOTS)] == [7] * NUM_SLOTS
    controller._on_end_answer({"from": 0, "iteration": 7, "accepted": True, "position": 7})
    controller._on_end_answer({"from": 1, "iteration": 7, "accepted": False, "position": 8})
    assert [inbox[rank].popleft()["iteration"] for rank in range(NUM_SLOTS)] == [10] * NUM_SLOTS
    controller._on_end_answer({"from": 2, "iteration": 7, "accepted": True, "position": 7})  # of the first one
    assert controller.stop is not None and controller.stop.waiting == set(range(NUM_SLOTS))


def test_near_the_end_the_run_just_ends() -> None:
    inbox: list[deque[dict[str, Any]]] = [deque() for _ in range(NUM_SLOTS)]
    controller = OneController(inbox)
    controller._positions = {0: LAST - 2}
    controller._request_stop(requeue=True)
    controller._propose_stop()
    assert "ends before" in controller.said[0]
    assert all(record["iteration"] == LAST and not record["agreed"] for records in inbox for record in records)


def test_without_checkpoints_it_is_refused() -> None:
    with pytest.raises(UserError, match="--checkpoints DIR"):
        OneController([], checkpoints="")._request_stop(requeue=True)
