"""Which groups the controller has connected ahead of the pause: what members may connect, where all have the room."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from test_takeover import MEMBERS, Two, probes

from migration.move import Report


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
