"""How long a rest is: in proportion to the work, and never so long that a move fails for it."""
from __future__ import annotations

import random

import pytest

from migration.errors import UserError
from migration.pacing import MOST_CLOSE_PAUSE_S, all_rests_s, choose_share, close_pause_s, parse_share, rest_s

LONG_S = 1e6


@pytest.mark.parametrize("share, expected_s", [(0.05, 3.8), (0.5, 0.2), (1.0, 0.0)])
def test_work_takes_its_share_of_the_time(share: float, expected_s: float) -> None:
    assert rest_s(0.2, share, LONG_S, 3) == pytest.approx(expected_s)


def test_what_is_left_for_rests_is_divided_among_the_groups_left() -> None:
    assert rest_s(0.2, 0.05, 6.0, 3) == 2.0
    assert rest_s(0.2, 0.05, 0.0, 3) == rest_s(0.2, 0.05, -1.0, 3) == 0.0, "their time is over"


def test_none_after_the_last_group() -> None:
    assert rest_s(0.2, 0.05, LONG_S, 0) == 0.0


@pytest.mark.parametrize("deadline_s, training_left_s, expected_s", [(300.0, LONG_S, 150.0), (300.0, 20.0, 10.0)])
def test_rests_end_half_way_to_the_deadline_and_to_the_end_of_training(
        deadline_s: float, training_left_s: float, expected_s: float) -> None:
    assert all_rests_s(deadline_s, training_left_s) == expected_s


def test_whoever_waits_for_whom_all_rests_are_over_half_way() -> None:
    """Groups that overlap at random: a member that rests keeps others from their next group, which rest then."""
    chance = random.Random(7)
    for _ in range(50):
        num_members, work_s, deadline_s = 8, chance.uniform(0.01, 2.0), chance.uniform(1.0, 100.0)
        groups = [chance.sample(range(num_members), chance.randint(2, 4)) for _ in range(20)]
        left = [sum(member in group for group in groups) for member in range(num_members)]
        free_s = [0.0] * num_members  # when each member can come to its next group
        rests_s = [0.0]
        for group in groups:
            done_s = max(free_s[member] for member in group) + work_s
            for member in group:
                left[member] -= 1
                rest = rest_s(work_s, 0.01, all_rests_s(deadline_s, LONG_S) - done_s, left[member])
                free_s[member] = done_s + rest
                rests_s.append(free_s[member] if rest else 0.0)
        assert max(rests_s) <= deadline_s / 2 + 1e-9
        assert max(free_s) <= deadline_s / 2 + len(groups) * work_s + 1e-9


def test_a_pause_between_two_that_are_closed_is_bounded() -> None:
    assert close_pause_s(0.0, 0.05, 0.05) == close_pause_s(100.0, 1.0, 0.05) == 0.05
    assert close_pause_s(0.02, 0.05, 0.05) == pytest.approx(0.38)
    assert close_pause_s(100.0, 0.05, 0.05) == MOST_CLOSE_PAUSE_S
    assert close_pause_s(100.0, 0.05, 3600.0) == 3600.0


def test_shares_of_the_command_line() -> None:
    assert parse_share("auto") is None and parse_share("0.25") == 0.25 and parse_share("1") == 1.0
    for wrong in ("0", "-0.5", "1.01", "nan", "inf", "much"):
        with pytest.raises(UserError, match=f"--prepare-share {wrong}: must be auto, or above 0 and at most 1"):
            parse_share(wrong)
    assert choose_share(None, "cuda") < choose_share(None, "cpu") == 1.0 and choose_share(0.3, "cuda") == 0.3
