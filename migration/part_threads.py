"""What the threads at work for a part in a move call: they enter and leave, report, and hand over what can be ended.

These are the training thread and the prepare thread, which becomes a leaver's stream thread. What an ABORT must be able
to end is given to the part, under the member's lock, before it is begun; the last thread to leave an aborted part
cleans up. Records that come in are member.py's.
"""
from __future__ import annotations

import traceback
from typing import Any

from migration.communicators.base import Communicator
from migration.costs import log_costs, take_costs
from migration.errors import MoveFailed
from migration.faults import Fault, Faults, hang
from migration.groups import Groups
from migration.move import Report
from migration.options import Options
from migration.part import Part
from migration.rebuilding import Rebuilding
from migration.stream import Sender
from migration.timeline import Timeline
from migration.told import Told
from migration.wire import Listener, Wire
from migration.world import World


class PartThreads(Rebuilding):
    """The half of a member that speaks and works for the part in the move under way. `options` have the faults."""

    def __init__(self, *, world: World, groups: Groups, timeline: Timeline, options: Options) -> None:
        super().__init__(groups)
        self.world, self.timeline, self.options = world, timeline, options
        self.controller = 0  # its world rank
        self.deputy: int | None = None  # the controller's, as it has said last
        self._told = Told()
        self.part: Part | None = None
        self.faults = Faults(options.faults, self._on_fault)

    # ---- speaking

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a record to the controller."""
        with self._told.lock:
            self.world.send(self.controller, self._told.note({"kind": kind, "from": self.world.rank, **fields}))
        if kind == "FATAL":
            self._doubt(has_died=False)  # perhaps since the controller's process is lost

    def _doubt(self, *, has_died: bool) -> None:
        """Tell the deputy that the controller may be lost."""
        if self.deputy is not None:
            self.world.send(self.deputy, {"kind": "DOUBT", "controller": self.controller, "has_died": has_died})

    def report(self, part: Part, report: Report, value: object = None, **fields: Any) -> None:
        self.tell("REPORT", report=report.value, move=part.number, value=value, **fields)

    def _on_fault(self, fault: Fault) -> None:
        self.timeline.add_event("fault", fault.text)
        self.tell("FAULT", text=fault.text, fault=fault.kind, slot=fault.slot, phase=fault.phase)

    # ---- threads at work for a part

    def enter(self, part: Part) -> None:
        """A thread begins work for `part`."""
        with self._changed:
            part.num_busy += 1

    def leave(self, part: Part) -> None:
        """A thread is done with `part`; the last one cleans up if the move was aborted."""
        with self._changed:
            part.num_busy -= 1
            if part.num_busy == 0 and part.verdict == "ABORT":
                self._clean_up(part)
            self._changed.notify_all()

    def end_parking(self, part: Part) -> None:
        """The training thread has parked the old communicators, or failed: an abort that has come meanwhile goes on.

        It waits, because parking waits for every member, and new communicators, which are parked still, are not to be
        freed beside it.
        """
        with self._changed:
            was_parking, part.is_parking = part.is_parking, False
            if was_parking and part.verdict == "ABORT":
                self._end_work(part)

    def _end_work(self, part: Part) -> None:
        """The move aborted: end what threads are at, or clean up if there are none."""
        part.end_pair()  # and a transfer under way
        if part.num_busy:
            self.groups.abort_next()  # ends a connection under way
        else:
            self._clean_up(part)

    def give(self, part: Part, **made: Communicator | Listener | Wire | Sender) -> None:
        """What a thread is about to wait in, by the name of its field: `part.end_pair` can end it from now on.

        Raises MoveFailed where the move is over already, and ends it. Training may be waiting at a stop for it.
        """
        with self._changed:
            for name, value in made.items():
                setattr(part, name, value)
            if part.is_over:
                part.end_pair()
                raise MoveFailed(f"slot {part.slot}: the move was over before its {' and '.join(made)} came to be used")
            self._changed.notify_all()

    def _release_pair(self, part: Part) -> None:
        if part.wire is not None:
            part.wire.close()
        if part.pair is not None:
            self.groups.release_pair(part.pair)

    def _clean_up(self, part: Part) -> None:
        """Drop what was prepared for an aborted move, then acknowledge."""
        log_costs(self.timeline, take_costs(self.groups, self.groups.communicators), move=part.number, slot=part.slot)
        self.groups.discard()
        self._release_pair(part)
        self.part = None
        self.timeline.add_event("phase", f"ABORTED: {part.reason}", part.number)
        self.report(part, Report.ACKNOWLEDGED, rebuilt=part.rebuilt, sums=self.groups.sums_digest())

    def report_failure(self, part: Part, error: Exception) -> None:
        text = f"slot {part.slot} ({part.role}, world rank {self.world.rank}): {type(error).__name__}: {error}"
        self.timeline.add_event("error", text, part.number)
        if not part.is_over:  # afterwards errors are the consequence of the abort
            self.timeline.add_event("traceback", traceback.format_exc()[-500:], part.number)
        self.report(part, Report.FAILED, text.split("\n")[0][:300])

    # ---- the slot

    def enter_generation(self, part: Part) -> None:
        """The move is committed: this process holds the slot now, or none, in the next generation."""
        with self._changed:
            self.generation = part.generation
            self.slot = None if part.role == "leaver" else part.slot
            if part.role == "leaver":
                self.job = None
            if part.role == "joiner":
                self._stop, self._begun = part.stop, False
            part.num_busy -= 1

    def apply_fault(self, phase: str, part: Part) -> str:
        """A fault point. Returns the kind of fault that the caller must bring about: corrupt, slow, or ''."""
        kind = self.faults.fire(phase, part.slot, part.number)
        if kind == "hang":
            hang()
        if kind == "cancel":
            self.tell("CANCEL", move=part.number)
        return kind
