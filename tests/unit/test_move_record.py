"""What the log's row of a move says beside its figures."""
from __future__ import annotations

import math
from typing import Any

import pytest
from one_move import PLAN, advance_to, deliver, probes

from migration.move import MoveTally, Report
from migration.protocol import Event, Phase
from migration.record import MoveRecord

OTHER_BITS = "sums on the new communicators have other bits than on the old ones"
NOT_KNOWN = "whether sums keep their bits couldn't be told: it was prepared before the first iteration had ended"
REBUILT = "3 old groups, closed to make room (policy lazy), were rebuilt; all sum as before"


def ready(bits: str | None) -> MoveTally:
    """Ready, with other sums at a joiner, or ones that nobody can compare, or (None) all as before."""
    if bits is None:
        return advance_to(Phase.READY)
    move = advance_to(Phase.PREPARING)
    deliver(move, Report.PREPARED, [member for member in move.waiting if member != 5])
    move.report(Report.PREPARED, 5, 0, probes(5, bits))
    return move


@pytest.mark.parametrize(("bits", "committed", "rebuilt", "expected"), [
    (None, True, 0, ""), ("other sums", True, 0, OTHER_BITS), ("-", True, 0, NOT_KNOWN),
    (None, False, 0, "because"), (None, False, 3, f"because; {REBUILT}"),
    ("other sums", False, 3, f"because; {REBUILT}; {OTHER_BITS}"), ("-", False, 0, "because")])
def test_all_that_is_said_is_kept_apart(bits: str | None, committed: bool, rebuilt: int, expected: str) -> None:
    move = ready(bits)
    record = MoveRecord(request="b1", request_id=0, arm="full", plan=PLAN, term=0, requested_s=1.0, ready_s=2.0)
    told: dict[str, Any] = {"from": 0, "rebuilt": (rebuilt, 0)}
    if committed:
        told |= {"arrived_s": 3.0, "resumed_s": 4.0, "bytes": 0, "groups": (0, 0)}
    else:
        move.event(Event.CANCELLED, "because")
    record.take(Report.ACKNOWLEDGED, told, 5.0)
    row = record.columns(move)
    assert (row["reason"], row["outcome"]) == (expected, "COMMITTED" if committed else "ABORTED")


@pytest.mark.parametrize(("phase", "setup_s"), [(Phase.PREPARING, None), (Phase.READY, 4.0), (Phase.SWITCHING, 4.0)])
def test_the_setup_of_a_move_that_was_never_ready_is_not_known(phase: Phase, setup_s: float | None) -> None:
    move = advance_to(phase)
    record = MoveRecord(request="b1", request_id=0, arm="full", plan=PLAN, term=0, requested_s=1.0)
    record.take(Report.PREPARED, {"from": 0}, 5.0)
    move.event(Event.CANCELLED, "because")
    found = record.columns(move)["setup_s"]
    assert math.isnan(found) if setup_s is None else found == setup_s
