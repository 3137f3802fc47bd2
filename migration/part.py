"""One process's part in one move. Data only; member.py's lock guards every change."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from migration.arms import Arm, boundary
from migration.communicators.base import Communicator
from migration.roster import MovePlan
from migration.stream import Sender
from migration.wire import Listener, Wire


@dataclass(slots=True, kw_only=True)
class Part:
    """Made when the controller says PREPARE, dropped when the move is retired or aborted."""

    number: int
    generation: int  # after the move
    plan: MovePlan
    arm: Arm
    role: str  # leaver, joiner, stayer
    slot: int  # the own one, or the one to take
    store: tuple[str, int]
    prepare_timeout_s: float
    are_joiners_warm: bool = False  # every joiner has run its slot's pipeline role in its process
    rests_until_s: float = 0.0  # monotonic; until then the prepare thread may rest between groups
    prepared: tuple[int, int] = (0, 0)  # groups of the next generation, of how many that this process is in
    position: int | None = None  # once accepted: the first iteration that runs in the new generation as a whole
    connects: tuple[tuple[str, int], ...] = ()  # groups to connect ahead, and before which iteration each
    verdict: str = ""  # then SWITCH, then COMMIT or ABORT; DROPPED once the whole job is built anew
    reason: str = ""
    makes_room: bool = False  # said with SWITCH: old communicators are parked or closed before new ones are activated
    may_park: bool = False  # every member has handed over; it counts even if an ABORT has come since
    is_parking: bool = False  # with that, on who has old ones, until they are parked: an ABORT waits for it
    rebuild_store: tuple[str, int] | None = None  # said with ABORT, where old communicators may have been closed
    rebuilt: tuple[int, int] = (0, 0)  # groups rebuilt, and those of them whose sums have other bits now
    num_busy: int = 0  # threads at work for it; the last one to leave an aborted part cleans up
    pair: Communicator | None = None  # of leaver and joiner, for bytes
    listener: Listener | None = None  # a joiner's, until the wire is connected
    wire: Wire | None = None  # of the same two, for words
    sender: Sender | None = None  # a leaver's, where the state streams beside training
    stream_done: threading.Event = field(default_factory=threading.Event)  # the stream thread has ended, well or not
    prepare_thread: threading.Thread | None = None  # afterwards it is a leaver's stream thread
    warm: threading.Event = field(default_factory=threading.Event)  # a joiner's job is built and has run
    among_joiners: tuple[str, ...] = ()  # a joiner's groups that have joiners of its own host only
    among_joiners_prepared: threading.Event = field(default_factory=threading.Event)  # or never will be
    is_proven: bool = False  # a joiner has told what its first step gave (proof.py)
    bytes_per_s: float = 0.0  # from leaver to joiner, beside training
    wrong_probe: bool = False  # by a fault

    @property
    def stop(self) -> int | None:
        """Where the membership changes."""
        return None if self.position is None else self.arm.stop(self.position)

    @property
    def first_stop(self) -> int | None:
        """The first stop at which something is to be done; whoever comes there waits for the verdict."""
        if self.position is None:
            return None
        return min([self.arm.stop(self.position), *(boundary(at) for _, at in self.connects if at != self.position)])

    def due(self, stop: int) -> list[str]:
        """Groups to connect at `stop`, in order; in the pause itself it is done anyway."""
        return [name for name, at in self.connects if boundary(at) == stop and at != self.position]

    @property
    def is_over(self) -> bool:
        """Whether nothing may be begun for it any more."""
        return self.verdict in ("ABORT", "DROPPED")

    def drop(self) -> None:
        """The whole job is built anew: end what its threads are at, without a clean-up of its own. From any thread."""
        self.verdict = "DROPPED"
        self.end_pair()
        for event in (self.warm, self.among_joiners_prepared, self.stream_done):
            event.set()

    def end_pair(self) -> None:
        """End every wait of leaver and joiner for each other. From any thread."""
        if self.sender is not None:
            self.sender.stop_sending()
        if self.listener is not None:
            self.listener.close()
        if self.wire is not None:
            self.wire.close()
        if self.pair is not None:
            self.pair.abort()

    def tags(self, generation: int) -> dict[str, Any]:
        """What its spans carry; `generation` is the process's present one."""
        return {"move": self.number, "slot": self.slot, "generation": generation,
                "iteration": -1 if self.position is None else self.position}
