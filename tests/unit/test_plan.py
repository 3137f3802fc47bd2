"""The planner as a table: roster before, request, expected moves, roster after; then every request it refuses."""
from __future__ import annotations

import dataclasses
import json
import random

import pytest

from migration.config import Config
from migration.errors import UserError
from migration.plan import VacateRequest, initial_roster, parse_vacate, plan_move, spread_hosts, touched_groups
from migration.profiles import get_profile
from migration.roster import Assignment, MovePlan, Roster
from migration.topology import Grid, grid_of


def roster(hosts: str, holders: str, lost: str = "") -> Roster:
    """`hosts` names the host of each world_rank, `holders` the world_rank of each slot, both with spaces between."""
    return Roster(hosts=tuple(hosts.split()), holders=tuple(map(int, holders.split())),
                  lost=frozenset(map(int, lost.split())))


FOUR_HOSTS = "b0 b0 b1 b1 b2 b2 b3 b3"
FIVE_HOSTS = FOUR_HOSTS + " b4 b4"
UNEVEN = "b0 b0 b1 b2 b2 b2 s0 s0 s0 s1 s2 s2"  # hosts of 2, 1 and 3 slots; 3, 1 and 2 spares

# id: (hosts, holders, lost, request, moves as "slot:leaver>joiner", holders after)
MOVES = {
    "a host to the spare host": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1@12", "2:2>6 3:3>7", "0 1 6 7 4 5"),
    "the host of world rank 0": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b0@0", "0:0>6 1:1>7", "6 7 2 3 4 5"),
    "to a named host": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1->b4@12", "2:2>8 3:3>9", "0 1 8 9 4 5"),
    "the first of equal hosts": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1", "2:2>6 3:3>7", "0 1 6 7 4 5"),
    "targets in the order named": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b0,b1->b4,b3@5",
                                   "0:0>8 1:1>9 2:2>6 3:3>7", "8 9 6 7 4 5"),
    "sources in the order named": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1,b0->b3,b4@5",
                                   "0:0>8 1:1>9 2:2>6 3:3>7", "8 9 6 7 4 5"),
    "two hosts at once, anywhere": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b0,b1@5",
                                    "0:0>6 1:1>7 2:2>8 3:3>9", "6 7 8 9 4 5"),
    "more targets than needed": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1->b4,b3", "2:2>8 3:3>9", "0 1 8 9 4 5"),
    "onto a host vacated before": (FOUR_HOSTS, "0 1 6 7 4 5", "", "b0->b1", "0:0>2 1:1>3", "2 3 6 7 4 5"),
    "of a host that came later": (FOUR_HOSTS, "0 1 6 7 4 5", "", "b3", "2:6>2 3:7>3", "0 1 2 3 4 5"),
    "holders out of order": (FOUR_HOSTS, "1 0 3 2 5 4", "", "b1", "2:3>7 3:2>6", "1 0 7 6 5 4"),
    "one process": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1:0@7", "2:2>6", "0 1 6 3 4 5"),
    "one process, by local index": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1:1@7", "3:3>6", "0 1 2 6 4 5"),
    "two processes of a host stay together": ("b0 b0 b0 b1 b2 b2", "0 1 2", "", "b0:0,b0:2", "0:0>4 2:2>5", "4 1 5"),
    "one process of each of two hosts": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b0:1,b2:0", "1:1>6 4:4>7", "0 6 2 3 7 5"),
    "a process and a host": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b0:1,b1", "1:1>8 2:2>6 3:3>7", "0 8 6 7 4 5"),
    "one process prefers another host": ("b0 b0 b1 b1", "0 2", "", "b1:0", "1:2>1", "0 1"),
    "unless its own is named": ("b0 b0 b1 b1", "0 2", "", "b1:0->b1", "1:2>3", "0 3"),
    "a half empty host": (FOUR_HOSTS, "0 1 6 3 4 5", "", "b1", "3:3>7", "0 1 6 7 4 5"),
    "never a lost process": (FIVE_HOSTS, "0 1 2 3 4 5", "6", "b1", "2:2>8 3:3>9", "0 1 8 9 4 5"),
    "a lost leaver is replaced": (FOUR_HOSTS, "0 1 2 3 4 5", "2", "b1:0", "2:2>6", "0 1 6 3 4 5"),
    "fewest spares that suffice": (UNEVEN, "0 1 2 3 4 5", "", "b0", "0:0>10 1:1>11", "10 11 2 3 4 5"),
    "one into the smallest gap": (UNEVEN, "0 1 2 3 4 5", "", "b1", "2:2>9", "0 1 9 3 4 5"),
    "the largest part is placed first": (UNEVEN, "0 1 2 3 4 5", "", "b0,b1,b2",
                                         "0:0>10 1:1>11 2:2>9 3:3>6 4:4>7 5:5>8", "10 11 9 6 7 8"),
    "spread where no host has room": ("b0 b0 s0 s1", "0 1", "", "b0", "0:0>2 1:1>3", "2 3"),
    "what fits is placed before the rest is spread": ("b0 b0 b0 b1 b1 s0 s0 s1 s1 s2", "0 1 2 3 4", "", "b0,b1",
                                                      "0:0>7 1:1>8 2:2>9 3:3>5 4:4>6", "7 8 9 5 6"),
}


# id: (hosts, holders, vacated, request, moves): spares of a host that a move has left come after all others
AFTER_MOVES = {
    "a host never left before one that was": (FIVE_HOSTS, "0 1 6 7 4 5", "b1", "b0", "0:0>8 1:1>9"),
    "the one left longest ago": (FIVE_HOSTS, "8 9 6 7 4 5", "b1 b0", "b2", "4:4>2 5:5>3"),
    "also where it comes later": (FIVE_HOSTS, "8 9 6 7 4 5", "b0 b1", "b2", "4:4>0 5:5>1"),
    "rather than the closest fit": ("b0 b1 s0 s0 s0", "2 1", "b0", "b1", "1:1>3"),
    "but the user's word goes first": (FIVE_HOSTS, "0 1 6 7 4 5", "b1", "b0->b1,b4", "0:0>2 1:1>3"),
    "in one piece before anything": (FOUR_HOSTS + " b4", "0 1 6 7 4 5", "b1", "b0", "0:0>2 1:1>3"),
    "spread, and that last": ("b0 b0 a c d", "0 1 3", "a", "b0", "0:0>4 1:1>2"),
}


@pytest.mark.parametrize("hosts, holders, vacated, request_text, moves", AFTER_MOVES.values(), ids=AFTER_MOVES)
def test_hosts_left_last_are_taken_last(hosts: str, holders: str, vacated: str, request_text: str, moves: str) -> None:
    before = dataclasses.replace(roster(hosts, holders), vacated=tuple(vacated.split()))
    assert moves_text(plan_move(before, parse_vacate(request_text, need_iteration=False))) == moves


def test_the_roster_remembers_which_hosts_were_left() -> None:
    at = roster(FIVE_HOSTS, "0 1 2 3 4 5")
    for text, vacated in (("b1->b3", "b1"), ("b0->b4", "b1 b0"), ("b2->b1", "b1 b0 b2"), ("b1->b0", "b0 b2 b1")):
        at = at.after(plan_move(at, parse_vacate(text, need_iteration=False)))
        assert at.vacated == tuple(vacated.split()) and Roster.from_json(at.to_json()) == at


def moves_text(plan: MovePlan) -> str:
    return " ".join(f"{a.slot}:{a.leaver}>{a.joiner}" for a in plan.assignments)


@pytest.mark.parametrize("hosts, holders, lost, request_text, moves, after", MOVES.values(), ids=MOVES)
def test_moves(hosts: str, holders: str, lost: str, request_text: str, moves: str, after: str) -> None:
    before = roster(hosts, holders, lost)
    plan = plan_move(before, parse_vacate(request_text, need_iteration=False))
    assert moves_text(plan) == moves
    assert dataclasses.replace(before.after(plan), vacated=()) == roster(hosts, after, lost)


# id: (hosts, holders, lost, request, what the message must hold)
REFUSED = {
    "unknown host": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b9@12", "there is no host 'b9'; hosts are b0, b1, b2, b3"),
    "unknown target": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1->b9@12", "there is no host 'b9'"),
    "nothing on it": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b3@12", "b3 holds no slot.*hosts with slots: b0, b1, b2"),
    "vacated before": (FOUR_HOSTS, "0 1 6 7 4 5", "", "b1", "b1 holds no slot.*hosts with slots: b0, b2, b3"),
    "process without a slot": (FOUR_HOSTS, "0 1 6 3 4 5", "", "b1:0", "b1:0 holds no slot"),
    "process that isn't there": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1:2", "b1 has 2 processes, b1:0 to b1:1"),
    "onto itself": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1->b1", "b1 is both vacated and moved to"),
    "onto another source": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b0,b1->b1,b3", "b1 is both vacated and moved to"),
    "target in use": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1->b2", r"2 spare processes are needed on b2, 0 free;"),
    "target too small": (UNEVEN, "0 1 2 3 4 5", "", "b0->s1", r"2 .* needed on s1, 1 free \(s1: 1\)"),
    "too few anywhere": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b0,b1", r"4 .* needed .*, 2 free \(b3: 2\)"),
    "too few in several places": (UNEVEN, "0 1 2 3 4 5", "6 7 8", "b0,b1,b2",
                                  r"6 .* needed .*, 3 free \(s1: 1, s2: 2\)"),
    "the only spare is lost": (FOUR_HOSTS, "0 1 2 3 4 5", "6 7", "b1:0", "1 .* needed .*, 0 free;"),
    "spares only on the host to leave": ("b0 b0", "0", "", "b0:0", "1 .* needed outside the hosts to vacate, 0 free;"),
    "host twice": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1,b1", "b1 is named twice"),
    "process twice": (FIVE_HOSTS, "0 1 2 3 4 5", "", "b1,b1:0", "b1:0 is named twice"),
    "target twice": (FOUR_HOSTS, "0 1 2 3 4 5", "", "b1->b3,b3", "target b3 is named twice"),
}


@pytest.mark.parametrize("hosts, holders, lost, request_text, message", REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(hosts: str, holders: str, lost: str, request_text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan_move(roster(hosts, holders, lost), parse_vacate(request_text, need_iteration=False))
    assert str(caught.value).startswith(f"vacate {request_text}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text, sources, targets, iteration", [
    ("b1@12", "b1", "", 12), ("b1->b3@12", "b1", "b3", 12), ("b0,b1@5", "b0 b1", "", 5), ("b1", "b1", "", None),
    ("b0,b1->b3,b4@5", "b0 b1", "b3 b4", 5), ("b1:0@7", "b1:0", "", 7), (" b1@0 ", "b1", "", 0),
    ("node-1.rack-2->node-3", "node-1.rack-2", "node-3", None), ("b0:1,b2", "b0:1 b2", "", None),
])
def test_grammar(text: str, sources: str, targets: str, iteration: int | None) -> None:
    assert parse_vacate(text, need_iteration=False) == VacateRequest(
        text=text, sources=tuple(sources.split()), targets=tuple(targets.split()), iteration=iteration)


@pytest.mark.parametrize("text", ["", "@12", "b1@", "b1@x", "b1@-3", "b1@1.5", "b1@1@2", "b1->", "->b3", "b1,@4", ",b1",
                                  "b1:@3", "b1:x@3", "b1:-1@3", "b1->b3:0@3", "b1->b2->b3", "b1>b3@3", "b 1@3"])
def test_outside_the_grammar(text: str) -> None:
    with pytest.raises(UserError, match="such as b1@12") as caught:
        parse_vacate(text, need_iteration=False)
    assert "\n" not in str(caught.value)


def test_iteration_needed() -> None:
    with pytest.raises(UserError, match="vacate b1->b3: say before which iteration, such as b1->b3@12"):
        parse_vacate("b1->b3", need_iteration=True)
    assert parse_vacate("b1->b3@2", need_iteration=True).iteration == 2


def test_too_few_processes_for_the_grid() -> None:
    with pytest.raises(UserError) as caught:
        initial_roster(("b0", "b0", "b1", "b1"), get_profile("tiny_TP2_PP1"))
    assert str(caught.value) == ("profile tiny_TP2_PP1 needs 6 processes (TP2 x PP1 x DP3), 4 were started; start at "
                                 "least 6, and as many more as spares")


def test_first_processes_take_the_slots() -> None:
    start = initial_roster(spread_hosts(("b0", "b1", "b2", "b3"), 8), get_profile("tiny_TP2_PP1"))
    assert start == roster(FOUR_HOSTS, "0 1 2 3 4 5")
    assert start.host_names() == ("b0", "b1", "b2", "b3")
    assert (start.slots_on("b1"), start.slots_on("b3"), start.spares()) == ((2, 3), (), (6, 7))
    assert (start.host_of_slot(3), start.slot_of(3), start.slot_of(7)) == ("b1", 3, None)
    assert start.without(7).spares() == (6,) and start.without(2).slots_on("b1") == (2, 3)


@pytest.mark.parametrize("names, num_processes, message", [
    ((), 8, "give every host once"), (("b0", "b0"), 8, "give every host once"), (("b0", ""), 8, "give every host once"),
    (("b:0",), 8, "give every host once"), (("b0", "b1", "b2"), 8, "8 processes can't be shared evenly by 3 hosts"),
    (("b0",), 0, "0 processes"),
])
def test_hosts_that_cannot_be_spread(names: tuple[str, ...], num_processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        spread_hosts(names, num_processes)


@pytest.mark.parametrize("assignment", [Assignment(slot=2, leaver=3, joiner=6), Assignment(slot=2, leaver=2, joiner=1)])
def test_a_plan_for_another_roster_is_a_bug(assignment: Assignment) -> None:
    with pytest.raises(AssertionError, match="slot 2"):
        roster(FOUR_HOSTS, "0 1 2 3 4 5").after(MovePlan(assignments=(assignment,)))


def test_json_of_plan_and_roster() -> None:
    before = roster(FOUR_HOSTS, "0 1 2 3 4 5", "7 4")
    plan = MovePlan(assignments=(Assignment(slot=2, leaver=2, joiner=6), Assignment(slot=3, leaver=3, joiner=7)))
    assert plan.to_json() == "[[2,2,6],[3,3,7]]"
    assert (plan.slots, plan.leavers, plan.joiners) == ((2, 3), (2, 3), (6, 7))
    assert MovePlan.from_json(plan.to_json()) == plan
    assert Roster.from_json(before.to_json()) == before
    assert json.loads(before.to_json())["hosts"] == [["b0", 2], ["b1", 2], ["b2", 2], ["b3", 2]]
    assert Roster.from_json(roster("a b a", "2 0").to_json()) == roster("a b a", "2 0")


def test_seven_hosts_of_a_large_job_fit_into_a_log_row() -> None:
    """The log keeps 1024 bytes of assignments; HDF5 would cut off the rest without a word."""
    plan = MovePlan(assignments=tuple(Assignment(slot=s, leaver=s, joiner=s + 56) for s in range(1000, 1056)))
    assert len(plan.to_json()) <= 1024


def test_hardest_host_of_three() -> None:
    """TP4 PP2 DP3 on hosts of 8: where everything sits, and what vacating b1 touches."""
    config = get_profile("20B_TP4_PP2")
    grid, start = grid_of(config), initial_roster(spread_hosts(("b0", "b1", "b2", "b3"), 32), config)
    stages_and_dp = {host: {(grid.coordinates(s).pp, grid.coordinates(s).dp) for s in start.slots_on(host)}
                     for host in ("b0", "b1", "b2")}
    assert stages_and_dp == {"b0": {(0, 0), (0, 1)}, "b1": {(0, 2), (1, 0)}, "b2": {(1, 1), (1, 2)}}
    for group in grid.groups():
        if group.kind == "tp":
            assert len({start.host_of_slot(slot) for slot in group.slots}) == 1
    plan = plan_move(start, parse_vacate("b1", need_iteration=False))
    rebuilt, kept = touched_groups(grid.groups(), plan.slots)
    assert sum(group.kind == "dp" for group in rebuilt) == 8 and not any(group.kind == "dp" for group in kept)
    assert [group.slots for group in rebuilt if group.kind == "tp"] == [(8, 9, 10, 11), (12, 13, 14, 15)]


def test_touched_groups_part_the_groups_in_order() -> None:
    groups = Grid(tp=2, pp=1, dp=3).groups()
    rebuilt, kept = touched_groups(groups, (2, 3))
    assert sorted(rebuilt + kept, key=groups.index) == list(groups)
    assert [group.slots for group in kept if group.kind == "tp"] == [(0, 1), (4, 5)]
    assert touched_groups(groups, ()) == ((), groups)


def test_invariants_on_a_random_walk() -> None:
    """300 moves in a row: one holder a slot, all of them living, nobody left on the host that was vacated."""
    rng = random.Random(5)
    config = Config(profile="x", tp=2, pp=2, dp=3)
    hosts = tuple(f"b{i}" for i, size in enumerate((4, 2, 6, 3, 5, 4)) for _ in range(size))
    at = initial_roster(hosts, config)
    num_refused = 0
    for _ in range(300):
        request = parse_vacate(",".join(rng.sample(at.host_names(), rng.choice((1, 1, 2)))), need_iteration=False)
        try:
            plan = plan_move(at, request)
        except UserError:
            num_refused += 1
            continue
        assert plan.slots == tuple(sorted(slot for host in request.sources for slot in at.slots_on(host)))
        at = at.after(plan)
        assert len(set(at.holders)) == config.job_size and not any(at.slots_on(host) for host in request.sources)
    assert 0 < num_refused < 250
