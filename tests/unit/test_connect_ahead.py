"""When the controller has a move prepared, and which groups connected ahead of the pause.

Members know after the first iteration which groups training uses. What they may connect ahead they say when they are
prepared, and for which of these they lack the room.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_takeover import ALL, MEMBERS, Side, Two, probes

from migration.move import Report
from migration.protocol import Phase


def prepared(two: Two, **of_one: Any) -> list[Any]:
    """All members report that they are prepared, two groups among them; returns what is connected ahead, when."""
    first = two.first
    two.begin_move()
    for member in MEMBERS:
        first.hear("REPORT", member, report=Report.PREPARED.value, move=first.tally.number, value=probes(member),
                   position=0, connect=["7", "41"], connect_s=0.0, **(of_one if member == MEMBERS[-1] else {}))
    proposals = [record for _, record in first.sent if record["kind"] == "PROPOSE"]
    assert len(proposals) == len(MEMBERS) and all(record == proposals[0] for record in proposals)
    return proposals[0]["connects"]


def test_groups_are_connected_one_an_iteration(tmp_path: Path) -> None:
    connects = prepared(Two(tmp_path))
    assert [name for name, _ in connects] == ["7", "41"] and connects[0][1] < connects[1][1]


def test_one_for_which_a_member_lacks_the_memory_is_connected_in_the_pause(tmp_path: Path) -> None:
    assert [name for name, _ in prepared(Two(tmp_path), cramped=["7"])] == ["41"]


def test_the_next_move_does_not_remember_it(tmp_path: Path) -> None:
    two = Two(tmp_path)
    prepared(two, cramped=["7"])
    two.first.report(Report.FAILED, [0])
    while two.first.tally.phase.value != "TRAINING":
        two.settle()
        two.first.report(Report.ACKNOWLEDGED)
    assert [name for name, _ in prepared(two)] == ["7", "41"]


def in_the_first_iteration(run: Path, **options: Any) -> Side:
    side = Side(run, 0, **options)
    for spare in ALL[4:]:
        side.hear("READY", spare, recovery=0)
    side.begin_generation(0, settles=False)
    return side


def is_begun(side: Side) -> bool:
    side.tick()
    return side.tally.phase is Phase.PREPARING


def test_a_move_waits_until_it_is_known_what_training_uses(tmp_path: Path) -> None:
    side = in_the_first_iteration(tmp_path)
    side.controller.request_move("b->c", "test")
    assert not is_begun(side)
    for rank in range(3):
        side.hear("SUMS", rank, recovery=0, sums=f"fake digest {rank}")
    assert not is_begun(side), "slot 3 doesn't know yet"
    side.hear("SUMS", 3, recovery=0, sums="fake digest 3")
    assert is_begun(side)


@pytest.mark.parametrize("iteration, begins", [(1, True), (2, False)])
def test_but_not_where_training_waits_for_it_before_that(tmp_path: Path, iteration: int, begins: bool) -> None:
    """The switch before iteration 1 is inside iteration 0, which shows what is used only when it is done."""
    assert is_begun(in_the_first_iteration(tmp_path, vacate=(f"b->c@{iteration}",), hold=True)) is begins


def test_a_controller_to_which_the_role_is_handed_waits_as_well(tmp_path: Path) -> None:
    first, second = in_the_first_iteration(tmp_path), Side(tmp_path, 4, term=1)
    second.controller.inherit(json.loads(json.dumps(first.controller._state(0))))
    second.controller.request_move("b->c", "test")
    assert not is_begun(second)
    for rank in range(4):
        second.hear("SUMS", rank, recovery=0, sums=f"fake digest {rank}")
    assert is_begun(second)
