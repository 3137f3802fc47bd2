"""Requests and records become events; the table says what follows; actions.py carries it out.

A role of a control thread, not of a slot. World rank 0's process starts with it; when its host has been vacated the
role goes to a process that holds a slot, under a new term. Control thread only, so it needs no lock.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from migration.acceptance import Acceptance, Figures
from migration.checkpoint_files import Start
from migration.config import Config
from migration.errors import UserError
from migration.leaving import Leaving
from migration.move import MoveTally, Report
from migration.options import Options
from migration.plan import Roster, parse_vacate, plan_move
from migration.protocol import Action, Event, Phase
from migration.record import MoveRecord
from migration.recovery import Recovery
from migration.schedule import Pending
from migration.stopping import Stop, Stopping
from migration.straggler import Detector, Straggler
from migration.timeline import Timeline
from migration.topology import grid_of
from migration.world import Record, World


class Controller(Recovery, Stopping, Leaving):
    """Decides; there is one at a time, and each of its records carries its term."""

    def __init__(self, *, world: World, config: Config, options: Options, roster: Roster, timeline: Timeline,
                 address: str, term: int, on_end: Callable[[str], None], start: Start) -> None:
        super().__init__(world=world, config=config, options=options, roster=roster, timeline=timeline,
                         address=address, term=term, on_end=on_end, start=start)
        self._stages = [grid_of(config).coordinates(slot).pp for slot in range(config.job_size)]
        self._detector = Detector(self._stages)
        self._asked_to_end = ""

    @property
    def is_to_end(self) -> bool:
        """Whether the run may be about to be ended, or a recovery isn't through, which a successor wouldn't know."""
        return (self._failure is not None or bool(self._suspects) or self._recovery is not None
                or bool(self._asked_to_end))

    # ---- records in

    def on_record(self, record: Record) -> None:
        """A record of a member; its kind names the method."""
        self._watch.heard(record["from"])
        if not self._ended and record["from"] not in self._tally.roster.lost:  # one that hung is told to end
            getattr(self, "_on_" + record["kind"].lower())(record)

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

    def _on_finished(self, record: Record) -> None:
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
                self._watch.set_deadline(self.options.switch_deadline_s, "the switchover of every member")

    def _on_report(self, record: Record) -> None:
        member, report = record["from"], Report(record["report"])
        position = (record["value"] + 1) // 2 if report is Report.REFUSED else record.get("position", -1)
        self._positions[member] = max(self._positions.get(member, -1), position)
        if self._move is not None and record["move"] == self._tally.number:
            self._unconnected.update(record.get("connect", ()))
            self._connect_s = max(self._connect_s, record.get("connect_s", 0.0))
            self._move.take(report, record, self.timeline.clock())
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
        self._take_store()
        if self.successor is None and self._watch.is_beat_due(now_s):
            self._broadcast("BEAT")
        if self.successor is None and self._watch.is_look_due(now_s):
            for rank, silent_s in self._watch.silent(now_s):
                self._suspect(rank, f"not heard for {silent_s:.1f} s")
        if not self._ended and self._asked_to_end:
            self._end_job(self._asked_to_end)
        if not self._ended:
            self._look_around(now_s)
        if not self._ended and (reason := self._watch.pop_expired(now_s)) is not None:
            self._expire(reason)
        if not self._ended and self.successor is None:
            self._server.poll(self._answer)
            self._look_after_nodes(now_s, self._can_move() and self._stop is None)
            self._begin_due()
        if len(self._finished) == self.config.job_size and self._tally.phase is Phase.TRAINING and not self._ended:
            self._finish_run()

    def _expire(self, reason: str) -> None:
        missing = self._tally.waiting
        if self._tally.phase is Phase.RECOVERING:
            self._expire_recovery(reason)
        elif self._tally.phase is Phase.ABORTED and not set(missing) & set(self._tally.roster.holders):
            for rank in missing:
                self._suspect(rank, "it doesn't acknowledge the abort")
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

    # ---- requests

    def _begin_due(self) -> None:
        """Begin the next move, if there is one and the job is ready for it."""
        if self._can_move() and self.successor is None:
            if self._stop is not None:
                self._propose_stop()
                return
            pending = self._schedule.pop_due(max(self._positions.values(), default=0))
            if pending is not None:
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
        return self._schedule.add(text).id

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request from outside (requests.py)."""
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

    # ---- the role moves on

    def resign(self) -> None:
        """Hand the role to `successor`, with all that it must know, under the next term."""
        assert self.successor is not None
        self._server.close()
        self._stop_watch()
        self.world.send(self.successor, {
            "kind": "INHERIT", "term": self.term + 1, "roster": self._tally.roster.to_json(),
            "generation": self._tally.generation, "num_moves": self._tally.number + 1,
            "record": self._record.to_json(), "schedule": self._schedule.to_json(),
            "positions": list(self._positions.items()), "finished": sorted(self._finished),
            "times_s": list(self._times_s),
            "stop": None if self._stop is None else self._stop.requeue,
            "departures": self._departures.to_json()})

    def inherit(self, record: Record) -> None:
        """Go on where the last controller resigned, and tell everybody."""
        self._tally = MoveTally(Roster.from_json(record["roster"]), generation=record["generation"],
                                num_moves=record["num_moves"], require_bitwise=self.options.require_bitwise)
        self._record.load_json(record["record"])
        self._schedule.load_json(record["schedule"])
        self._positions = {int(rank): position for rank, position in record["positions"]}
        self._finished = set(record["finished"])
        self._times_s.extend(record["times_s"])
        self._stop = None if record["stop"] is None else Stop(requeue=record["stop"])
        self._departures.load_json(record["departures"])
        self._started = set(self._tally.roster.holders)
        self.timeline.add_event("controller", f"world rank {self.world.rank} is the controller, term {self.term}")
        self._broadcast("CONTROLLER", controller=self.world.rank)
