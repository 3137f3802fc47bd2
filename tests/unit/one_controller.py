"""What Recovery needs of a controller: what it does is kept in a list, and it has a clock of its own."""
from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from migration.deputy import Gate
from migration.move import MoveTally
from migration.options import Options
from migration.protocol import Action
from migration.recovery import Failure, Recovery
from migration.roster import Roster
from migration.watch import Watch

# hosts a, b with slots 0..3; c and d with spares 4..7
ROSTER = Roster(hosts=("a", "a", "b", "b", "c", "c", "d", "d"), holders=(0, 1, 2, 3))
ALL = tuple(range(8))


def without(roster: Roster, *lost: int) -> Roster:
    for rank in lost:
        roster = roster.without(rank)
    return roster


class OneController(Recovery):
    """World rank 0 on a; `done`: its actions."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(run="run", **options)
        self.sent: list[int] = []
        self.world = SimpleNamespace(size=8, rank=0, send=lambda rank, _record: self.sent.append(rank))
        self.term = 0
        self.timeline = SimpleNamespace(add_event=lambda *_: None, clock=lambda: 0.0)
        self._tally, self._watch = MoveTally(ROSTER), Watch(8, beat_s=5.0, heartbeat_timeout_s=15.0)
        self._record = SimpleNamespace(recoveries=[], checkpoints=[], say=lambda _: None)
        self._has_begun, self._ended, self._is_starting, self._suspects = True, False, True, {}
        self._failure: Failure | None = None
        self._dead: set[int] = set()
        self._gate = Gate()
        self._step_down = lambda text: self.done.append(text)
        self._ticked_s, self._replace_at_s = time.monotonic(), 0.0
        self.done: list[Any] = []

    def _act(self, actions: tuple[Action, ...]) -> None:
        self.done += actions
        if Action.SEND_RECOVER in actions:
            self._failure = None

    def _end_job(self, error: str, code: int = 1, requeue: bool = False) -> None:
        self._ended = True
        self.done.append((error, code))

    def wait(self, seconds: float, living: tuple[int, ...]) -> None:
        """Ticks as the control thread has them, on a clock of their own, with `living` heard meanwhile."""
        until_s = self._ticked_s + seconds
        while self._ticked_s < until_s:
            for rank in living:
                self._watch._heard_s[rank] = self._ticked_s
            self._look_around(self._ticked_s + 0.05)
            if self._ended:
                return
