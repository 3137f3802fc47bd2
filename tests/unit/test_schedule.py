"""Which move is due when, what training waits for, and at which boundary groups are connected."""
from __future__ import annotations

import pytest

from migration.arms import cut
from migration.schedule import MOST_BOUNDARIES, Schedule, connects_per_boundary, spread_connects

ARMS = ("two_stage",)


def due(schedule: Schedule, position: int) -> str | None:
    pending = schedule.pop_due(position)
    return pending.text if pending else None


def test_moves_come_in_the_order_of_their_iterations_and_requests_in_the_order_they_came() -> None:
    schedule = Schedule(["b1@30", "b2@12", "b3@12"], hold=False, lead=10, arms=ARMS)
    schedule.add("b5")
    schedule.add("b4")
    assert [due(schedule, 1) for _ in range(3)] == ["b5", "b4", None]
    assert [due(schedule, 2) for _ in range(3)] == ["b2@12", "b3@12", None]
    assert (due(schedule, 19), due(schedule, 20)) == (None, "b1@30")


def test_what_waits_can_be_dropped_requests_first() -> None:
    schedule = Schedule(["b1@30"], hold=False, lead=10, arms=ARMS)
    schedule.add("b2")
    assert [p.text for p in schedule.waiting] == ["b2", "b1@30"]
    assert [pending.text if (pending := schedule.drop_next()) else None for _ in range(3)] == ["b2", "b1@30", None]


def test_holds() -> None:
    schedule = Schedule(["b1@12", "b2@12", "b3@20"], hold=True, lead=0, arms=ARMS)
    schedule.add("b4@15")  # a request to a running job: training doesn't wait for it
    assert [schedule.next_hold(at) for at in (0, 12, 13, 21)] == [24, 24, 40, None]
    first = schedule.pop_due(12)
    assert first is not None and first.hold == 24 and schedule.is_held_for_another(24)
    second = schedule.pop_due(12)
    assert second is not None and not schedule.is_held_for_another(24)
    assert schedule.next_hold(0) == 40


def test_arms_are_taken_in_turn_and_say_where_training_waits() -> None:
    schedule = Schedule(["b1@12", "b2@12", "b3@0", "b4@20"], hold=True, lead=3, arms=("full", "naive"))
    assert {p.text: (p.arm_name, p.hold) for p in schedule.waiting} == {
        "b1@12": ("full", cut(11)), "b2@12": ("naive", 24), "b3@0": ("full", cut(0)), "b4@20": ("naive", 40)}
    assert schedule.holds == {cut(0), cut(11), 24, 40} and schedule.next_arm.name == "full"
    assert [due(schedule, at) for at in (0, 7, 8)] == ["b3@0", None, "b1@12"]
    assert [due(schedule, at) for at in (11, 12, 19)] == [None, "b2@12", None], "stopped before it is prepared"


@pytest.mark.parametrize("arms", [("naive", "full"), ("two_stage", "full"), ("full", "naive")])
def test_where_training_comes_first_is_the_first_to_be_prepared(arms: tuple[str, ...]) -> None:
    """Before one iteration, but the cut is inside the iteration before: training waits there for that one."""
    schedule = Schedule(["b@12", "c@12"], hold=True, lead=4, arms=arms)
    assert min(schedule.holds) == 23
    first = schedule.pop_due(11)
    assert first is not None and (first.arm_name, first.hold) == ("full", 23)


def test_naive_holds_without_being_asked_to() -> None:
    assert Schedule(["b1@12"], hold=False, lead=3, arms=("naive",)).holds == {24}
    assert not Schedule(["b1@12"], hold=False, lead=3, arms=("full",)).holds


def test_a_schedule_goes_on_elsewhere() -> None:
    schedule = Schedule(["b1@12"], hold=True, lead=3, arms=ARMS)
    schedule.add("b2")
    other = Schedule([], hold=True, lead=3, arms=ARMS)
    other.load_json(schedule.to_json())
    assert other.waiting == schedule.waiting
    assert other.add("b3").id == schedule.add("b3").id


@pytest.mark.parametrize(("names", "first", "position", "expected"), [
    (["10", "9", "11"], 5, 12, [("9", 9), ("10", 10), ("11", 11)]),  # one a boundary, the last just before the position
    (["10", "9", "11"], 11, 12, [("9", 11), ("10", 11), ("11", 11)]),  # fewer boundaries than groups
    (["9"], 14, 12, [("9", 12)]),  # no boundary is left: in the pause
    ([], 5, 12, []),
])
def test_connects_are_spread(names: list[str], first: int, position: int, expected: list[tuple[str, int]]) -> None:
    assert spread_connects(names, first, position) == expected


@pytest.mark.parametrize(("num_groups", "connect_s", "iteration_s", "expected"), [
    (7, 0.15, 0.3, 1),     # short iterations: one a boundary stalls more than is meant, and it can't be less
    (7, 0.15, 10.0, 2),    # 3% of 10 s
    (7, 0.15, 1000.0, 7),  # never more than there are
    (60, 0.15, 1.0, 6),    # ten boundaries must do
    (60, 0.15, 60.0, 12),
    (60, 0.0, 10.0, 6),    # unknown cost
    (60, 0.15, 0.0, 6),    # no iteration yet
    (0, 0.15, 10.0, 1),
])
def test_how_many_are_connected_at_a_boundary(num_groups: int, connect_s: float, iteration_s: float,
                                              expected: int) -> None:
    assert connects_per_boundary(num_groups, connect_s=connect_s, iteration_s=iteration_s) == expected


@pytest.mark.parametrize("num_groups", [1, 7, 20, 60])
@pytest.mark.parametrize("connect_s", [0.0, 0.01, 0.15, 5.0])
def test_several_groups_a_boundary(num_groups: int, connect_s: float) -> None:
    names = [str(i) for i in range(num_groups)]
    per_boundary = connects_per_boundary(num_groups, connect_s=connect_s, iteration_s=10.0)
    spread = spread_connects(names, 0, 100, per_boundary)
    assert [name for name, _ in spread] == names
    boundaries = [at for _, at in spread]
    assert boundaries == sorted(boundaries) and boundaries[-1] == 99 and len(set(boundaries)) <= MOST_BOUNDARIES
    assert max(boundaries.count(at) for at in boundaries) <= per_boundary
    assert boundaries[0] == 100 - -(-num_groups // per_boundary), "the controller's position leaves room for these"
