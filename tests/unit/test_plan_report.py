"""What a plan says before anything moves: places, bytes, groups and hosts, in words and as JSON."""
from __future__ import annotations

import json

import pytest

from migration.errors import UserError
from migration.plan import initial_roster, parse_vacate, spread_hosts
from migration.plan_report import describe_plan, plan_as_dict
from migration.profiles import get_profile
from migration.roster import Roster
from migration.sizes import gradient_buffer_bytes, slot_state_bytes


def start(profile: str, num_processes: int) -> Roster:
    return initial_roster(spread_hosts(("b0", "b1", "b2", "b3"), num_processes), get_profile(profile))


def test_dictionary_of_the_smallest_move() -> None:
    config = get_profile("tiny_TP2_PP1")
    told = plan_as_dict(config, start("tiny_TP2_PP1", 8), parse_vacate("b1@12", need_iteration=True))
    assert json.loads(json.dumps(told)) == told
    assert (told["profile"], told["request"], told["iteration"]) == ("tiny_TP2_PP1", "b1@12", 12)
    state, gradients = slot_state_bytes(config, 2), gradient_buffer_bytes(config, 2)
    assert told["moves"][0] == {
        "slot": 2, "tp": 0, "dp": 1, "pp": 0, "from_host": "b1", "from_world_rank": 2, "to_host": "b3",
        "to_world_rank": 6, "parameters_bytes": state.parameters,
        "optimizer_bytes": state.main_parameters + state.moments, "state_bytes": state.total,
        "gradient_buffer_bytes": gradients, "joiner_bytes": state.total + gradients}
    assert told["state_bytes"] == 2 * state.total
    assert told["groups"] == {"world": {"rebuilt": 1, "kept": 0}, "tp": {"rebuilt": 1, "kept": 2},
                              "dp": {"rebuilt": 2, "kept": 0}, "tp_pp": {"rebuilt": 1, "kept": 2},
                              "tp_dp": {"rebuilt": 1, "kept": 0}}
    assert (told["num_groups_rebuilt"], told["num_groups_kept"]) == (6, 4)
    assert told["hosts_after"] == {"b0": {"slots": [0, 1], "spares": []}, "b1": {"slots": [], "spares": [2, 3]},
                                   "b2": {"slots": [4, 5], "spares": []}, "b3": {"slots": [2, 3], "spares": []}}


def test_words_for_a_host_of_20b() -> None:
    text = describe_plan(get_profile("20B_TP4_PP2"), start("20B_TP4_PP2", 32), parse_vacate("b1", need_iteration=False))
    for expected in ("vacate b1, as soon as it is ready", "state moved: 123 GB in all", "memory of a joiner: 25.7 GB",
                     "15.4 GB (5.14 GB parameters, 10.3 GB optimizer)", "groups: 31 rebuilt, 13 kept",
                     "b1: spares 8 9 10 11 12 13 14 15"):
        assert expected in text
    assert "12  tp0 dp0 pp1    b1/w12          b3/w28" in text


def test_iteration_and_lost_processes_in_words() -> None:
    at = start("tiny_TP1_PP2", 8).without(6).without(7)
    text = describe_plan(get_profile("tiny_TP1_PP2"), at, parse_vacate("b0@3", need_iteration=True))
    assert "at the start of iteration 3" in text
    assert "b3: no living process" in text


def test_refused_like_the_move_itself() -> None:
    with pytest.raises(UserError, match="b3 holds no slot"):
        describe_plan(get_profile("tiny_TP2_PP1"), start("tiny_TP2_PP1", 8), parse_vacate("b3", need_iteration=False))
