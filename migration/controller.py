"""Records and the clock become events; the table says what follows; actions.py carries it out.

A role of a control thread, not of a slot. World rank 0's process starts with it; when its host has been vacated the
role goes to a process that holds a slot (succession.py), and when it is lost to its deputy (takeover.py), under a new
term. Control thread only, so it needs no lock.
"""
from __future__ import annotations

import time
from typing import Any

from migration.acceptance import Figures
from migration.answering import Answering
from migration.errors import UserError
from migration.move import Report
from migration.protocol import Event, Phase
from migration.straggler import Detector, Straggler
from migration.takeover import Takeover
from migration.topology import grid_of
from migration.world import Record


class Controller(Takeover, Answering):
    """Decides; there is one at a time, and each of its records carries its term."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._stages = [grid_of(self.config).coordinates(slot).pp for slot in range(self.config.job_size)]
        self._detector = Detector(self._stages)

    @property
    def is_to_end(self) -> bool:
        """Whether the run may be about to be ended, or a recovery isn't through, which a successor wouldn't know."""
        return (self._failure is not None or bool(self._suspects) or self._recovery is not None
                or bool(self._asked_to_end) or self._taking is not None or self._ended)

    # ---- records in

    def on_record(self, record: Record) -> None:
        """A record of a member; its kind names the method."""
        self._watch.heard(record["from"])
        if self._takes(record):
            return
        is_lost = record["from"] in self._tally.roster.lost  # one that hung is told to end
        if record["kind"] == "KEPT":
            self._on_kept(record)
        elif not is_lost and not self._ended and self._is_new(record):
            getattr(self, "_on_" + record["kind"].lower())(record)
        self._send_due_state(time.monotonic())

    def _on_alive(self, record: Record) -> None:
        """That it came says that the process lives; and whether it is done with the last move, what it has run, and who
        beside it has died."""
        (self._idle.add if record["idle"] else self._idle.discard)(record["from"])
        self._warm_roles[record["from"]] = frozenset(record["roles"])
        for rank in record["gone"]:
            self._suspect(rank, f"its process has died, as world rank {record['from']} beside it sees", has_died=True)

    def _on_checkpoint(self, record: Record) -> None:
        self._record.checkpoint(record)

    def _on_progress(self, record: Record) -> None:
        if not self._is_current(record):
            return
        self._positions[record["from"]] = record["iteration"]
        self._note_iteration(record["from"])
        if "prepared" in record:
            self._prepared[record["from"]] = (record["prepared"][0], record["prepared"][1])
        if "loss" in record:
            self._times_s.append(record["time_s"])
            self._record.progress(record, self._tally.generation, self._phase_text())
        if self.options.find_stragglers:
            for found in self._detector.take(iteration=record["iteration"] - 1, slot=record["slot"],
                                             world_rank=record["from"], own_s=record["own_s"]):
                self._tell_straggler(found)

    def _tell_straggler(self, found: Straggler) -> None:
        host = self._tally.roster.hosts[found.world_rank]
        told = found.describe(host)
        self.timeline.add_event("straggler", told)
        self._say(told)
        asked = [pending.text for pending in (*self._schedule.waiting, self._current) if pending is not None]
        if self.options.auto_evict and host not in asked:  # two of a host may be slow
            try:
                self.request_move(host, "--auto-evict")
            except UserError as error:
                self._say(f"request refused: {error}")

    def _on_finished(self, record: Record) -> None:
        if not self._is_current(record):
            return
        self._finished.add(record["from"])
        self._note_iteration(record["from"])
        if self._tally.phase in (Phase.PREPARING, Phase.READY):
            self._take_event(Event.JOB_ENDED, "training ended before the move could take effect")

    def _on_fault(self, record: Record) -> None:
        self._record.fault(record)

    def _on_vacate_my_host(self, record: Record) -> None:
        host = self._tally.roster.hosts[record["from"]]
        try:
            self.request_move(host, f"SIGUSR2 to world rank {record['from']}")
        except UserError as error:
            self._say(f"request refused: {error}")

    def _on_cancel(self, record: Record) -> None:
        if record["move"] == self._tally.number:  # else it comes too late, and another one is under way
            self._take_event(Event.CANCELLED, "cancelled")

    def _on_arrived(self, record: Record) -> None:
        if record["move"] == self._tally.number and self._tally.phase is Phase.SWITCHING:
            self.world.urgent = True
            if not self._watch.has_deadline:
                self._hurry_deputy()
                self._watch.set_deadline(self.options.switch_deadline_s, "the switchover of every member")

    def _on_report(self, record: Record) -> None:
        member, report = record["from"], Report(record["report"])
        position = (record["value"] + 1) // 2 if report is Report.REFUSED else record.get("position", -1)
        self._positions[member] = max(self._positions.get(member, -1), position)
        if self._move is not None and record["move"] == self._tally.number:
            self._unconnected.update(record.get("connect", ()))
            self._cramped.update(record.get("cramped", ()))
            self._connect_s = max(self._connect_s, record.get("connect_s", 0.0))
            self._move.take(report, record, self.timeline.clock())
            slot = self._tally.roster.slot_of(member)
            if report is Report.ACKNOWLEDGED and slot is not None and "sums" in record:
                self._sums.note(slot, record["sums"])  # they may have changed, where that isn't refused
            if record.get("figures") and self._is_unfit(member, Figures(**record["figures"])):
                return
        self._act(self._tally.report(report, member, record["move"], record["value"],
                                     record.get("probes"), record.get("room", "")))

    def _is_unfit(self, member: int, figures: Figures) -> bool:
        """Whether a leaver's or joiner's figures have just ended the move."""
        if self._tally.phase is not Phase.PREPARING:
            return False
        told, wrong = self._acceptance.take(member, figures)
        if told:
            self.timeline.add_event("acceptance", told, self._tally.number)
        if wrong:
            self._take_event(Event.MEMBER_FAILED, wrong)
        return bool(wrong)

    # ---- the clock

    def on_tick(self, now_s: float) -> None:
        """Called at every poll of the control thread."""
        if self._watch.is_beat_due(now_s):
            self._beat(range(self.world.size))
        if self._taking is not None:
            self._look_at_takeover(now_s)
        else:
            self._turn(now_s)
            self._look_after_deputy(now_s)
        self._send_due_state(now_s)

    def _turn(self, now_s: float) -> None:
        self._take_store()
        if self._watch.is_look_due(now_s):
            if self._told_deputy is not None:
                self._beat([self._told_deputy])  # it must notice soon
            for rank, silent_s in self._watch.silent(now_s) if self.successor is None or self.is_to_end else ():
                self._suspect(rank, f"not heard for {silent_s:.1f} s")
        if not self._ended and self._asked_to_end and self._server.has_replied:
            self._end_job(self._asked_to_end)
        if not self._ended:
            self._look_around(now_s)
        if not self._ended and (reason := self._watch.pop_expired(now_s)) is not None:
            self._expire(reason)
        if not self._ended and self.successor is None:
            self._server.poll(self._answer, lambda: self._gate.is_open)
            self._look_after_nodes(now_s, self._can_move() and self._stop is None)
            self._begin_due()
        if len(self._finished) == self.config.job_size and self._tally.phase is Phase.TRAINING and not self._ended:
            self._finish_run()

    def _expire(self, reason: str) -> None:
        missing = self._tally.waiting
        if self._tally.phase is Phase.RECOVERING:
            self._expire_recovery(reason)
        elif self._tally.phase in (Phase.COMMITTED, Phase.ABORTED):
            for rank in missing:
                self._suspect(rank, f"{reason}, and its own is missing")
        else:
            self._take_event(Event.DEADLINE_EXPIRED, f"{reason}; missing: world ranks {missing}")

    def _send_recover(self) -> None:
        """What is known of processes at work counts no more."""
        super()._send_recover()
        self._detector = Detector(self._stages)
        self._idle.clear()

    def _finish_run(self) -> None:
        for pending in self._schedule.waiting:
            self._refuse(pending, "training ended before it was due")
        self._end_run()
