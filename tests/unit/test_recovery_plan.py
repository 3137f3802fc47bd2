"""Which spares take the slots of a host on which a process was lost."""
from __future__ import annotations

import dataclasses
import json

import pytest
from one_controller import ROSTER, without

from migration.plan import parse_vacate, plan_move, plan_recovery
from migration.roster import Roster


@pytest.mark.parametrize(("roster", "lost", "expected"), [
    (ROSTER, (3,), [[2, 2, 4], [3, 3, 5]]),  # the whole host
    (ROSTER, (2, 3), [[2, 2, 4], [3, 3, 5]]),
    (ROSTER, (3, 4), [[2, 2, 6], [3, 3, 7]]),  # not to a host that has lost a spare
    (ROSTER, (3, 4, 6), [[3, 3, 5]]),  # no host has room for two: just the slot, as for a move
    (ROSTER, (1, 2), [[0, 0, 4], [1, 1, 5], [2, 2, 6], [3, 3, 7]]),  # two hosts, a host for each
    (ROSTER, (0, 1, 2, 3), [[0, 0, 4], [1, 1, 5], [2, 2, 6], [3, 3, 7]]),
    (ROSTER, (1, 2, 7), [[0, 0, 4], [1, 1, 5], [2, 2, 6]]),  # room for one of two hosts
    (ROSTER, (1, 2, 6, 7), [[1, 1, 4], [2, 2, 5]]),  # whole, one would take the other's spare
    (ROSTER, (1, 2, 4, 6, 7), None),
    (dataclasses.replace(ROSTER, leaving=frozenset("c")), (3,), [[2, 2, 6], [3, 3, 7]]),
    (dataclasses.replace(ROSTER, leaving=frozenset("cd")), (3,), None),
    (dataclasses.replace(ROSTER, vacated=("c",)), (3,), [[2, 2, 6], [3, 3, 7]]),  # c was left for a reason
    (dataclasses.replace(ROSTER, hosts=tuple("aabbcccd")), (3,), [[2, 2, 4], [3, 3, 5]]),
    (dataclasses.replace(ROSTER, hosts=tuple("aabbcccdd")), (3,), [[2, 2, 7], [3, 3, 8]]),
    (dataclasses.replace(ROSTER, hosts=tuple("aabbcd")), (3,), [[3, 3, 4]]),  # room for two, not on one host
    (dataclasses.replace(ROSTER, hosts=tuple("aabbbcccd"), holders=(0, 1, 2, 3, 4)), (0, 4),
     [[0, 0, 8], [2, 2, 5], [3, 3, 6], [4, 4, 7]]),  # the large one first
    (dataclasses.replace(ROSTER, hosts=tuple("aabbbccc"), holders=(0, 1, 2, 3, 4)), (0, 4),
     [[0, 0, 5], [1, 1, 6], [4, 4, 7]]),  # the large one would take all
    (dataclasses.replace(ROSTER, holders=(0, 1, 2, 4)), (2, 5, 6, 7), [[2, 2, 3]]),  # on its own host, if no other
    (dataclasses.replace(ROSTER, holders=(0, 1, 2, 4)), (2, 4, 6), [[2, 2, 7], [3, 4, 3]]),
])
def test_spares_for_lost_processes(roster: Roster, lost: tuple[int, ...], expected: list[list[int]] | None) -> None:
    plan = plan_recovery(without(roster, *lost))
    assert (None if plan is None else json.loads(plan.to_json())) == expected
    if plan is not None:
        after = without(roster, *lost).replaced(plan)
        assert after.lost == set(lost) and after.lost.isdisjoint(after.holders)


def test_just_the_lost_slots_if_asked_to() -> None:
    plan = plan_recovery(without(ROSTER, 3), whole_hosts=False)
    assert plan is not None and plan.to_json() == "[[3,3,4]]"


def test_who_survived_on_a_lost_host_is_the_last_to_be_used() -> None:
    roster = without(ROSTER, 3)
    plan = plan_recovery(roster)
    assert plan is not None
    roster = roster.replaced(plan)  # slots 0, 1 on a, 2, 3 on c
    assert roster.spares() == (2, 6, 7) and roster.vacated == ("b",)
    later = roster.after(plan_move(roster, parse_vacate("a", need_iteration=False)))  # to d: 0 and 1 are spares
    (assignment,) = plan_move(later, parse_vacate("d:0", need_iteration=False)).assignments
    assert assignment.joiner == 0, "a was left later, but nothing was lost there"
    second = plan_recovery(without(roster, 0))
    assert second is not None and second.joiners == (6, 7)
    third = plan_recovery(without(roster, 0, 7))
    assert third is not None and third.to_json() == "[[0,0,6]]", "another host's spare first"
    fourth = plan_recovery(without(roster, 0, 6, 7))
    assert fourth is not None and fourth.to_json() == "[[0,0,2]]", "when nothing else is left"


def test_too_few_spares() -> None:
    assert plan_recovery(without(ROSTER, 2, 3, 4, 5, 6)) is None
    assert plan_recovery(dataclasses.replace(without(ROSTER, 2), leaving=frozenset("bcd"))) is None


def test_nobody_to_replace() -> None:
    plan = plan_recovery(without(ROSTER, 5))
    assert plan is not None and plan.assignments == ()
