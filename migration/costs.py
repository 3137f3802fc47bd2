"""What the stages of communicators took, from the communicators into the log. Measures nothing itself."""
from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from migration.communicators.base import Communicator
from migration.groups import Groups
from migration.timeline import Timeline


def take_costs(groups: Groups, communicators: Iterable[Communicator]) -> list[dict[str, Any]]:
    """Columns of the log's `communicators`, for each stage of each of `communicators` since the last call."""
    return [{"communicator": communicator.name, "group": groups.description(communicator.name.rpartition("/")[2]),
             "num_members": len(communicator.slots), "switch": communicator.switch, "stage": stage,
             "time_s": cost.seconds, "device_bytes": cost.device_bytes}
            for communicator in communicators for stage, cost in communicator.take_costs()]


def log_costs(timeline: Timeline, costs: list[dict[str, Any]], *, move: int, slot: int) -> None:
    for columns in costs:
        timeline.add_communicator(move=move, slot=slot, **columns)


def median_connect_s(groups: Groups) -> float:
    """What connecting one communicator took here, with what goes along; 0.0 where nothing is known."""
    return median([sum(c.costs[stage].seconds for stage in ("unpark", "connect", "repark") if stage in c.costs)
                   for c in groups.communicators if "connect" in c.costs] or [0.0])
