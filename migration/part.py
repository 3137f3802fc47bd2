"""One process's part in one move. Data only; member.py's lock guards every change."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from migration.communicators.base import Communicator
from migration.plan import MovePlan


@dataclass(slots=True, kw_only=True)
class Part:
    """Made when the controller says PREPARE, dropped when the move is retired or aborted."""

    number: int
    generation: int  # after the move
    plan: MovePlan
    role: str  # leaver, joiner, stayer
    slot: int  # the own one, or the one to take
    store: tuple[str, int]
    prepare_timeout_s: float
    position: int | None = None  # the boundary, once accepted
    connects: tuple[tuple[str, int], ...] = ()  # groups to connect ahead, and before which iteration each
    verdict: str = ""  # then SWITCH, then COMMIT or ABORT
    reason: str = ""
    makes_room: bool = False  # said with SWITCH: old communicators are parked or closed before new ones are activated
    may_park: bool = False  # every member has handed over; it counts even if an ABORT has come since
    rebuild_store: tuple[str, int] | None = None  # said with ABORT, where old communicators may have been closed
    rebuilt: tuple[int, int] = (0, 0)  # groups rebuilt, and those of them whose sums have other bits now
    num_busy: int = 0  # threads at work for it; the last one to leave an aborted part cleans up
    pair: Communicator | None = None  # leaver and joiner
    prepare_thread: threading.Thread | None = None
    warm: threading.Event = field(default_factory=threading.Event)  # a joiner's job is built and has run
    wrong_probe: bool = False  # by a fault

    @property
    def first_stop(self) -> int | None:
        """The first boundary at which something is to be done; whoever comes there waits for the verdict."""
        return None if self.position is None else min([self.position, *(at for _, at in self.connects)])

    def due(self, iteration: int) -> list[str]:
        """Groups to connect before `iteration`, in order; at the position itself the pause does it."""
        return [name for name, at in self.connects if at == iteration != self.position]

    def tags(self, generation: int) -> dict[str, Any]:
        """What its spans carry; `generation` is the process's present one."""
        return {"move": self.number, "slot": self.slot, "generation": generation,
                "iteration": -1 if self.position is None else self.position}
