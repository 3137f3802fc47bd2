"""Requests to the controller, from the command line and from outside, and what it answers; which one is begun next.

Between what the controller does for moves, recoveries, stops and nodes, and controller.py, which takes records and has
the clock. Control thread only.
"""
from __future__ import annotations

from typing import Any

from migration.acceptance import Acceptance
from migration.errors import UserError
from migration.leaving import Leaving
from migration.plan import parse_vacate, plan_move
from migration.protocol import Action, Event, Phase
from migration.record import MoveRecord
from migration.recovery import Recovery
from migration.schedule import Pending
from migration.stopping import Stopping


class Answering(Recovery, Stopping, Leaving):
    """What is asked of the job."""

    _asked_to_end = ""  # why

    # ---- moves

    def _begin_due(self) -> None:
        """Begin the next move, if there is one and the job is ready for it."""
        if self._can_move() and self.successor is None:
            if self._stop is not None:
                self._propose_stop()
                return
            furthest = max(self._positions.values(), default=0)
            if self._may_prepare and (pending := self._schedule.pop_due(furthest)) is not None:
                self._begin(pending)

    def _can_move(self) -> bool:
        return (self._tally.phase is Phase.TRAINING and len(self._started) == self.config.job_size
                and not self._finished and not self._suspects and self._failure is None)

    def _begin(self, pending: Pending) -> None:
        self._current = pending
        try:
            plan = plan_move(self._tally.roster, pending.request)
        except UserError as error:
            self._refuse(pending, str(error))
            self._release(self._hold_to_release())
            self._current = None
            return
        self._acceptance = Acceptance(plan, self._tally.roster.hosts, self.options.accept)
        self._move = MoveRecord(request=pending.text, arm=pending.arm_name, request_id=pending.id, plan=plan,
                                term=self.term, requested_s=self.timeline.clock())
        self._act(self._tally.request(plan))

    def request_move(self, text: str, origin: str) -> int:
        """Take a request; returns its number. Raises UserError if it can't be done as things stand."""
        request = parse_vacate(text, need_iteration=False)
        if self._stop is not None:
            raise UserError(f"vacate {text}: the run is about to stop")
        last = self.options.last_iteration(self.config.iterations) - 1
        if request.iteration is not None and request.iteration > last:
            raise UserError(f"vacate {text}: the last iteration of the run is {last}")
        if self._tally.phase is Phase.TRAINING:
            plan_move(self._tally.roster, request)
        if request.iteration is None and self._schedule.next_arm.stops_first:
            raise UserError(f"vacate {text}: arm {self._schedule.next_arm.name} needs an iteration that all know from "
                            "the start; give it with --vacate")
        self.timeline.add_event("request", f"{text} ({origin})")
        self._gate.close()
        return self._schedule.add(text).id

    # ---- from outside

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request from outside (requests.py). Its reply goes out once the deputy has what it promises."""
        try:
            if request["do"] == "vacate":
                return {"id": self.request_move(request["vacate"], "request"), "phase": self._tally.phase.value}
            if request["do"] == "end":
                self._asked_to_end = request.get("why", "asked to end")  # not yet: the answer goes out first
                return {"iteration": max(self._positions.values(), default=0)}
            if request["do"] == "stop":
                return self._request_stop(request["requeue"])
            return self._cancel() if request["do"] == "cancel" else self.status()
        except UserError as error:
            return {"error": str(error)}

    def _cancel(self) -> dict[str, Any]:
        """The move under way, if it can still be stopped, else the next one that waits."""
        if self._current is None and (dropped := self._schedule.drop_next()) is not None:
            self._gate.close()
            self._refuse(dropped, "cancelled")
            if not self._schedule.is_held_for_another(dropped.hold):
                self._release(dropped.hold)
            return {"cancelled": dropped.text}
        if Action.REFUSE_CANCEL in self._take_event(Event.CANCELLED, "cancelled"):
            return {"error": f"nothing to cancel: the job is in phase {self._tally.phase.value}"}
        return {"cancelled": self._current.text if self._current else ""}

    def status(self) -> dict[str, Any]:
        """What `harness.py status` shows."""
        roster = self._tally.roster
        spares = [roster.hosts[r] for r in roster.spares()]
        return {"phase": self._tally.phase.value, "progress": self._phase_text().strip(),
                "iteration": max(self._positions.values(), default=0),
                "num_iterations": self.options.last_iteration(self.config.iterations),
                "generation": self._tally.generation, "term": self.term, "controller": self.world.rank,
                "move": self._current.text if self._current else None,
                "queued": [p.text for p in self._schedule.waiting],
                "recoveries": self._record.recoveries,
                "lost": [r for r in sorted(roster.lost) if roster.hosts[r] not in roster.released],
                "leaving": self._departures.describe(),
                "hosts": {h: {"slots": list(roster.slots_on(h)), "spares": spares.count(h)}
                          for h in roster.host_names()}, "moves": self._record.moves}

    def _phase_text(self) -> str:
        if self._current is None:
            return ""
        num_members = len(self._tally.members)
        num_reported = num_members - len(self._tally.waiting)
        return f"  {self._tally.phase.value} {self._current.text} ({num_reported}/{num_members}{self._groups_text()})"

    def _groups_text(self) -> str:
        """How many groups are prepared where the most are missing; empty when none is."""
        slowest = max(self._prepared.values(), key=lambda counts: counts[1] - counts[0], default=(0, 0))
        is_preparing = self._tally.phase is Phase.PREPARING and slowest[0] < slowest[1]
        return f"; {slowest[0]} of {slowest[1]} groups" if is_preparing else ""
