"""Who is named a straggler, and who isn't: made-up reports, with noise and without."""
from __future__ import annotations

import random

import pytest

from migration.errors import UserError
from migration.straggler import Detector, Straggler, parse_slow

ONE_STAGE = [0] * 6


def feed(detector: Detector, times_s: list[list[float | None]], ranks: list[int] | None = None,
         first: int = 0) -> list[Straggler]:
    """`times_s`: own seconds of each slot, by iteration."""
    ranks = ranks or list(range(len(times_s[0])))
    return [found for number, row in enumerate(times_s) for slot, own_s in enumerate(row)
            for found in detector.take(iteration=first + number, slot=slot, world_rank=ranks[slot], own_s=own_s)]


def with_slow(slot: int, factor: float, num_iterations: int, num_slots: int = 6) -> list[list[float | None]]:
    return [[0.2 * (factor if at == slot else 1.0) for at in range(num_slots)] for _ in range(num_iterations)]


def test_a_slow_process_is_named_once_with_its_evidence() -> None:
    found, = feed(Detector(ONE_STAGE, in_a_row=4), with_slow(3, 2.0, 20))
    assert (found.slot, found.world_rank, found.iteration, found.num_iterations) == (3, 3, 3, 4)
    assert found.describe("b1") == ("slot 3 (world rank 3) on b1 is slow: 0.400 s of own work an iteration, the "
                                    "others' median is 0.200 s, 4 undisturbed iterations in a row up to 3")


def test_nobody_is_named_a_turn_too_early_nor_below_the_factor() -> None:
    assert feed(Detector(ONE_STAGE, in_a_row=4), with_slow(3, 2.0, 3)) == []
    assert feed(Detector(ONE_STAGE, factor=2.0, in_a_row=4), with_slow(3, 1.9, 50)) == []


def test_one_good_iteration_begins_the_count_anew() -> None:
    rows = with_slow(3, 2.0, 3) + with_slow(3, 1.0, 1) + with_slow(3, 2.0, 3)
    detector = Detector(ONE_STAGE, in_a_row=4)
    assert feed(detector, rows) == []
    assert [found.iteration for found in feed(detector, with_slow(3, 2.0, 1), first=7)] == [7]


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_names_nobody(seed: int) -> None:
    """A process in four takes two to five times as long, another one each time, as on cores shared with other work."""
    noise = random.Random(seed)
    rows: list[list[float | None]] = [[0.2 * noise.choice((1.0, 1.0, 1.0, 1.0, 1.1, 1.3, 2.0, 5.0)) for _ in ONE_STAGE]
                                      for _ in range(300)]
    assert feed(Detector(ONE_STAGE), rows) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_straggler_is_named_through_noise(seed: int) -> None:
    noise = random.Random(seed)
    rows: list[list[float | None]] = [[0.2 * noise.uniform(0.8, 1.3) * (3.0 if slot == 5 else 1.0)
                                       for slot in range(6)] for _ in range(30)]
    assert [found.slot for found in feed(Detector(ONE_STAGE), rows)] == [5]


def test_disturbed_iterations_count_for_nobody_and_break_no_row() -> None:
    disturbed: list[list[float | None]] = [[None, 0.2, 0.2, 5.0, 0.2, 0.2]]
    rows = with_slow(3, 2.0, 2) + disturbed * 3 + with_slow(3, 2.0, 2)
    assert [found.iteration for found in feed(Detector(ONE_STAGE, in_a_row=4), rows)] == [6]
    assert feed(Detector(ONE_STAGE, in_a_row=4), disturbed * 50) == []


def test_stages_are_compared_within_themselves() -> None:
    """The last stage always works three times as long; only the process that is slow within it is named."""
    stages = [0, 0, 0, 1, 1, 1]
    usual: list[float | None] = [0.2, 0.2, 0.2, 0.6, 0.6, 0.6]
    assert feed(Detector(stages), [usual] * 50) == []
    assert [found.slot for found in feed(Detector(stages), [[*usual[:4], 1.2, 0.6]] * 10)] == [4]


def test_too_small_stages_are_compared_with_all() -> None:
    assert [found.slot for found in feed(Detector([0, 0, 1, 1]), [[0.2, 0.2, 0.2, 0.6]] * 10)] == [3]


def test_of_two_slots_nobody_is_named() -> None:
    assert feed(Detector([0, 0]), [[0.1, 9.0]] * 50) == []


def test_a_new_process_in_the_slot_begins_anew() -> None:
    detector = Detector(ONE_STAGE, in_a_row=4)
    assert feed(detector, with_slow(3, 2.0, 3)) == []
    assert feed(detector, with_slow(3, 2.0, 3), ranks=[0, 1, 2, 7, 4, 5], first=3) == []
    assert [f.world_rank for f in feed(detector, with_slow(3, 2.0, 1), ranks=[0, 1, 2, 7, 4, 5], first=6)] == [7]


def test_a_report_that_never_comes_holds_up_nobody() -> None:
    detector = Detector(ONE_STAGE, in_a_row=4)
    for slot in range(5):
        assert detector.take(iteration=0, slot=slot, world_rank=slot, own_s=0.2) == []
    assert [found.slot for found in feed(detector, with_slow(3, 2.0, 4), first=1)] == [3]


@pytest.mark.parametrize("text", ["3", "3:2", "3:1@4", "3:0.5@4", "x:2@4", "3:2@0", "3:2@-1", "6:2@4", "3:nan@4"])
def test_what_to_slow_is_checked(text: str) -> None:
    with pytest.raises(UserError, match=f"--slow {text}"):
        parse_slow(text, 6)


def test_what_to_slow_is_read() -> None:
    slow = parse_slow("5:2.5@10", 6)
    assert (slow.slot, slow.factor, slow.iteration) == (5, 2.5, 10)
