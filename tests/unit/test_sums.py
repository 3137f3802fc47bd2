"""Whether sums keep their bits in a recovery, by digests that are fake here: a word in the place of each."""
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from one_controller import ALL, ROSTER, OneController

from migration.config import Config
from migration.protocol import Action, Event
from migration.sums import Sums


class Began(OneController):
    """All slots have begun; what they say of their sums is no digest, but a word in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self._sums = Config(profile="p", tp=2, pp=1, dp=2), Sums()
        self._recovery, self._started, self._positions = None, set(), {}
        self.said: list[str] = []
        self._record.say = self.said.append
        self.start(ROSTER.holders, fake_digest="as ever")

    def _broadcast(self, kind: str, **_: Any) -> None:
        assert kind == "BEGUN"

    def _take_event(self, event: Event, reason: str = "") -> tuple[Action, ...]:
        return self._tally.event(event, reason)

    def start(self, holders: Iterable[int], fake_digest: str) -> None:
        for rank in holders:
            self._on_started({"from": rank, "recovery": len(self._record.recoveries), "iteration": 0,
                              "sums": f"{fake_digest}, slot {self._tally.roster.slot_of(rank)}"})

    def lose(self, rank: int) -> None:
        self._suspect(rank, "gone")
        self.wait(1.0, ALL)
        self._started.clear()  # as SEND_RECOVER does

    def keeps_bits(self) -> list[bool | None]:
        return [recovery["keeps_bits"] for recovery in self._record.recoveries]


def test_sums_that_keep_their_bits() -> None:
    controller = Began()
    assert controller.said == []
    controller.lose(3)
    controller.start((0, 1, 4, 5), "as ever")
    assert controller.keeps_bits() == [True]
    assert not any("sums" in line for line in controller.said), "it is said once the first iteration is done"


def test_sums_that_have_other_bits() -> None:
    """In all slots; then in one, by what was said last."""
    controller = Began()
    controller.lose(3)
    controller.start((0, 1, 4, 5), "another order")
    controller.lose(1)
    controller.start((6,), "a third one")
    controller.start((7, 4, 5), "another order")
    assert controller.keeps_bits() == [False, False]
    assert [line.partition(" have")[0] for line in controller.said if " other bits than before" in line] == [
        "recovery 0, generation 1: sums of all slots", "recovery 1, generation 2: sums of slot 0"]


def test_a_generation_that_does_not_come_about_is_nothing_to_compare_with() -> None:
    controller = Began()
    controller.lose(3)
    controller.start((0, 1, 4), "another order")
    controller.lose(5)
    controller.start(controller._tally.roster.holders, "as ever")
    assert controller.keeps_bits() == [None, True]


def test_sums_that_nobody_knows_of_are_not_known() -> None:
    sums = Sums()
    sums.begin(0, "a fake digest")
    assert sums.take_next() is None
    sums.begin(0, "a fake digest")
    assert sums.take_next() == []
    sums.note(0, "another, by a move")
    other = Sums()
    other.load_json(json.loads(json.dumps(sums.to_json())))
    other.begin(0, "a fake digest")
    assert other.take_next() == [0]
