"""Which moves were asked for and when each is due. Pure: the controller keeps one and hands it to its successor."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from migration.arms import ARMS, Arm, boundary
from migration.plan import VacateRequest, parse_vacate


MOST_STALL = 0.03  # of an iteration, for connecting ahead of the pause
MOST_BOUNDARIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A move that was asked for. `hold`: the stop (arms.py) at which training waits for it, or None."""

    id: int
    text: str
    arm_name: str
    hold: int | None = None

    @property
    def request(self) -> VacateRequest:
        return parse_vacate(self.text, need_iteration=False)

    @property
    def arm(self) -> Arm:
        return ARMS[self.arm_name]

    @property
    def earliest(self) -> int:
        """The first position that it may have; the first cut is inside iteration 0."""
        return max(self.request.iteration or 0, int(self.arm.cuts))


def connects_per_boundary(num_groups: int, *, connect_s: float, iteration_s: float) -> int:
    """How many groups are connected at one boundary: what stalls an iteration by 3% at most, but at least one, and so
    many that `MOST_BOUNDARIES` boundaries do for all. 0.0 s: unknown, so one.
    """
    fitting = int(MOST_STALL * iteration_s / connect_s) if connect_s > 0 else 1
    return max(1, min(fitting, num_groups), -(-num_groups // MOST_BOUNDARIES))


def spread_connects(names: Iterable[str], first: int, position: int, per_boundary: int = 1) -> list[tuple[str, int]]:
    """At which boundary each prepared group is connected: `per_boundary` a boundary, the last just before `position`.

    Where there are fewer boundaries from `first` on than that takes, more share the first one; at `position` itself
    they are connected in the pause. Names are torch's running numbers, and their order is one on all members.
    """
    ordered = sorted(set(names), key=lambda name: (len(name), name))
    return [(name, max(position - 1 - (len(ordered) - 1 - i) // per_boundary, min(first, position)))
            for i, name in enumerate(ordered)]


class Schedule:
    """Moves with an iteration, in the order of their stops, and moves to be made as soon as possible, as they came."""

    def __init__(self, texts: Iterable[str], *, hold: bool, lead: int, arms: tuple[str, ...]) -> None:
        """`arms`: names of arms, which moves take in turn."""
        self._lead, self._arms = lead, arms
        self._scheduled: list[Pending] = []
        self._queue: list[Pending] = []
        self._num_requests = 0
        for text in texts:
            self.add(text, hold=hold)

    def add(self, text: str, *, hold: bool = False) -> Pending:
        """Take a request. Raises UserError if it can't be read."""
        iteration = parse_vacate(text, need_iteration=False).iteration
        pending = Pending(id=self._num_requests, text=text, arm_name=self.next_arm.name)
        if iteration is not None and (hold or pending.arm.stops_first):
            pending = replace(pending, hold=pending.arm.stop(pending.earliest))
        self._num_requests += 1
        if iteration is None:
            self._queue.append(pending)
        else:
            self._scheduled.append(pending)
            # In the order in which training comes there, which depends on the arm too. Stable: first asked, first made.
            self._scheduled.sort(key=lambda p: p.arm.stop(p.earliest))
        return pending

    @property
    def next_arm(self) -> Arm:
        """The arm of the next request."""
        return ARMS[self._arms[self._num_requests % len(self._arms)]]

    @property
    def holds(self) -> set[int]:
        """Stops at which training waits."""
        return {p.hold for p in self._scheduled if p.hold is not None}

    def pop_due(self, position: int) -> Pending | None:
        """The next move to prepare when the furthest slot is at iteration `position`, or None."""
        if self._scheduled:
            first = self._scheduled[0]
            lead = 0 if first.arm.stops_first else self._lead
            if position + first.arm.cuts >= first.earliest - lead:
                return self._scheduled.pop(0)
        return self._queue.pop(0) if self._queue else None

    def drop_next(self) -> Pending | None:
        """Take the next move out, due or not: it is cancelled."""
        waiting = self._queue or self._scheduled
        return waiting.pop(0) if waiting else None

    @property
    def waiting(self) -> list[Pending]:
        return [*self._queue, *self._scheduled]

    def is_held_for_another(self, hold: int | None) -> bool:
        """Whether training must go on waiting at the stop `hold` for a move that is still to come."""
        return any(p.hold == hold for p in self._scheduled)

    def next_hold(self, furthest: int) -> int | None:
        """The next stop at which training waits for a move still to come, the furthest slot being at iteration
        `furthest`.

        A move that began before that one must take effect there at the latest, or each would wait for the other.
        """
        holds = (p.hold for p in self._scheduled if p.hold is not None and p.hold >= boundary(furthest))
        return min(holds, default=None)

    def to_json(self) -> dict[str, Any]:
        return {"scheduled": [asdict(p) for p in self._scheduled], "queue": [asdict(p) for p in self._queue],
                "num_requests": self._num_requests}

    def load_json(self, value: dict[str, Any]) -> None:
        self._scheduled = [Pending(**p) for p in value["scheduled"]]
        self._queue = [Pending(**p) for p in value["queue"]]
        self._num_requests = value["num_requests"]
