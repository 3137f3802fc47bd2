"""A process that is slowed on purpose, without a clock: how long it sleeps, when, and that it stays with the process."""
from __future__ import annotations

import pytest

from migration import own_time
from migration.own_time import OwnTime
from migration.straggler import Slow


class NoWaits:
    """0.3 s an iteration are waited."""

    def take(self) -> float:
        return 0.3


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(own_time.time, "sleep", found.append)
    return found


def test_own_time_is_what_was_not_waited() -> None:
    own = OwnTime(NoWaits(), (), 2)
    assert own.take(0.5) == pytest.approx(0.2)
    assert own.take(0.1) == 0.0, "clocks differ a little"


def test_a_process_gets_slow_at_its_iteration_and_stays_so_elsewhere(slept_s: list[float]) -> None:
    own = OwnTime(NoWaits(), (Slow(slot=3, factor=3.0, iteration=2),), num_forwards=4)
    for iteration, slot, told in ((1, 3, False), (2, 3, True), (3, 3, False), (2, 5, False)):
        own.take(0.5)
        assert bool(own.begin(slot, iteration)) is told
        own.delay()
    assert slept_s == [pytest.approx((3.0 - 1) * 0.2 / 4)] * 3, "from iteration 2 on, whatever the slot"


def test_another_process_in_the_slot_is_not_slow(slept_s: list[float]) -> None:
    own = OwnTime(NoWaits(), (Slow(slot=3, factor=3.0, iteration=2),), num_forwards=4)
    own.take(0.5)
    assert own.begin(3, 7) == "", "it took the slot over later"
    assert own.begin(3, 2) and OwnTime(NoWaits(), (), 4).begin(3, 2) == ""
    own.delay()
    assert len(slept_s) == 1
