"""The start of a generation by all slots together: that of a run, or one in which every slot is built anew.

All are READY, the controller serves a store, all have STARTED. The controller's part; slot_work.py has a slot's. A
recovery (recovery.py) says who is awaited and from which checkpoint. Control thread only.
"""
from __future__ import annotations

from typing import Any

from migration.actions import Actions
from migration.arms import cut
from migration.checkpoint_files import Start
from migration.checkpoint_writing import give_up_unfinished
from migration.protocol import Event, Phase
from migration.sums import Sums
from migration.world import Record


class Starting(Actions):
    """Who is ready, and who has started."""

    def __init__(self, *, start: Start, **fields: Any) -> None:
        """`start`: where the run began."""
        super().__init__(**fields)
        self._run_start = start
        self._ready: set[int] = set()
        self._awaited = set(range(self.world.size))  # who must be ready before the generation is built
        self._is_starting = self.term > 0  # it is being built, or has been
        self._started: set[int] = set()
        self._has_begun = self.term > 0  # every slot has been there once
        self._sums = Sums()
        self._begins_at = 0  # the iteration at which all slots begin
        self._to_settle: set[int] = set()  # slots whose first iteration since has not yet shown which groups it uses
        self._to_finish_one: set[int] = set()  # world ranks whose first iteration since is awaited

    def _is_current(self, record: Record) -> bool:
        """Whether its sender is through all recoveries that there were."""
        return record["recovery"] == len(self._record.recoveries)

    def _on_ready(self, record: Record) -> None:
        if self._is_current(record):
            self._ready.add(record["from"])
            self._start_if_ready()

    def _start_if_ready(self) -> None:
        """Once all that are awaited are ready; of a spare that was lost before, nobody waits."""
        if not self._is_starting and self._awaited <= self._ready | self._tally.roster.lost:
            self._is_starting = True
            self._start_store(self._tell_to_start)

    def _choose_start(self) -> Start:
        """Where all slots begin. Nobody has written a checkpoint since they left the last generation, or will."""
        if self.options.checkpoints:
            give_up_unfinished(self.options.checkpoints)
        return self._run_start

    def _tell_to_start(self) -> None:
        start = self._choose_start()
        # what slots have said of their last generation is no more
        self._positions.clear()
        self._finished.clear()
        self._to_finish_one = set(self._tally.roster.holders)
        self._to_settle, self._begins_at = set(range(self.config.job_size)), start.iteration
        self._broadcast("START", store=[self._address, self._store.port], folder=start.folder,
                        iteration=start.iteration)

    def _take_sums(self, others: list[int] | None) -> None:
        """All have started. `others`: slots whose sums have other bits than in the generation before, if known."""

    def _on_sums(self, record: Record) -> None:
        """After the first iteration: nobody knew before what training uses."""
        slot = self._tally.roster.slot_of(record["from"])
        if slot is None or not self._is_current(record):
            return
        note = self._sums.note if len(self._started) == self.config.job_size else self._sums.begin
        note(slot, record["sums"])
        self._to_settle.discard(slot)
        if not self._to_settle and self._sums.are_known:
            self._gate.close()  # the deputy can't ask for them

    @property
    def _may_prepare(self) -> bool:
        """Whether members know which groups to connect, or training waits for a move before they can."""
        hold = self._schedule.next_hold(self._begins_at)
        return not self._to_settle or (hold is not None and hold <= cut(self._begins_at))

    def _on_started(self, record: Record) -> None:
        if not self._is_current(record):
            return
        self._started.add(record["from"])
        self._sums.begin(self._tally.roster.holders.index(record["from"]), record["sums"])
        self._positions[record["from"]] = record["iteration"]
        if len(self._started) == self.config.job_size:
            self._has_begun = True
            self._take_sums(self._sums.take_next())
            if self._tally.phase is Phase.RECOVERING:
                self._take_event(Event.ALL_RECOVERED)
            self._broadcast("BEGUN")
