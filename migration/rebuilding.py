"""A process's part in a recovery: it leaves whatever it is at, and builds the slot that it has now, or stands by.

The control thread takes the controller's word and ends every operation under way; the training thread comes out of it
with whatever error that gives, or at its next stop, and begins anew. What is built then, and from which checkpoint, is
process.py's. recovery.py decides.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from migration.part import Part
from migration.stops import Stops

if TYPE_CHECKING:
    from migration.groups import Groups
    from migration.world import Record

_JOIN_S = 60.0  # for a thread of a dropped move, whose operations are aborted


class Rebuilding(Stops):
    """The half of a member that outlives its slot. `slot` and `generation` are the training thread's to change."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        self.slot: int | None = None
        self.generation = 0
        self.num_recoveries = 0  # that this process has come through: what it says of an earlier one is stale
        self.started: Record | None = None  # the controller's word that every slot of the generation is there
        self._dropped: list[Part] = []  # parts in moves whose threads may still be at work

    # ---- the control thread

    def _on_recover(self, record: Record) -> None:
        """Under the member's lock. What comes from now on is of the new generation."""
        self._recover = record
        self.started, self._end = None, None
        self.hold_at(set(record["holds"]))
        if self.part is not None:
            self.part.drop()
            self._dropped.append(self.part)
            self.part = None
        self._changed.notify_all()
        self.groups.abort_all()

    # ---- the training thread

    def await_recovery(self, timeout_s: float) -> bool:
        """Whether the controller builds the job anew, once it has said so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_recovering, timeout_s)

    def begin_anew(self) -> None:
        """Out of everything that it was at: take the new slot, or none. Raises RuntimeError if a thread doesn't end."""
        with self._changed:
            record, self._recover = self._recover, None
            assert record is not None, "nobody has told this process to begin anew"
            self.slot, self.generation, self.num_recoveries = record["slot"], record["generation"], record["recovery"]
            self._stop, self._begun, self.job = -1, False, None
            dropped, self._dropped = self._dropped, []
        for part in dropped:
            if part.prepare_thread is not None:
                part.prepare_thread.join(_JOIN_S)
                if part.prepare_thread.is_alive():
                    raise RuntimeError(f"the prepare thread of move {part.number} didn't end in {_JOIN_S:.0f} s")
            if part.pair is not None:
                self.groups.release_pair(part.pair)
