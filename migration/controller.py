"""Requests become events, actions become records to the members. A role of a control thread, not of a slot.

World rank 0's process starts with it; when its host has been vacated the role goes to a process that holds a slot,
under a new term. What is decided stands in protocol.py and move.py; here it is carried out. Runs on the control thread
only, so it needs no lock.
"""
from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from migration.config import Config
from migration.errors import UserError
from migration.groups import start_store
from migration.move import MoveTally, Report
from migration.options import Options
from migration.plan import Roster, VacateRequest, parse_vacate, plan_move
from migration.protocol import Action, Event, Phase
from migration.record import MoveRecord, RunRecord
from migration.requests import RequestServer
from migration.timeline import Timeline
from migration.world import Record, World

_BEAT_S = 0.5


@dataclass(slots=True, kw_only=True)
class Pending:
    """A move that was asked for. `hold` is the iteration at which training waits for it, or None."""

    id: int
    text: str
    hold: int | None = None

    @property
    def request(self) -> VacateRequest:
        return parse_vacate(self.text, need_iteration=False)


class Controller:
    """Decides; there is one at a time, and each of its records carries its term."""

    def __init__(self, *, world: World, config: Config, options: Options, roster: Roster, timeline: Timeline,
                 address: str, term: int = 0, on_end: Callable[[str], None]) -> None:
        self.world, self.config, self.options, self.timeline = world, config, options, timeline
        self.term = term
        self._tally = MoveTally(roster, require_bitwise=options.require_bitwise)
        self._record = RunRecord(config=config, run=options.run, timeline=timeline, progress_s=options.progress_s)
        self._on_end = on_end
        self._address = address
        self._store: Any = None
        self._scheduled = deque(sorted(
            (Pending(id=i, text=text, hold=parse_vacate(text, True).iteration if options.hold else None)
             for i, text in enumerate(options.vacate)), key=lambda p: p.request.iteration))
        self._num_requests = len(options.vacate)
        self._queue: deque[Pending] = deque()
        self._current: Pending | None = None
        self._move: MoveRecord | None = None
        self._deadline: tuple[float, str] | None = None
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._positions: dict[int, int] = {}
        self._heard_s = {r: time.monotonic() for r in range(world.size)}
        self._beaten_s = 0.0
        self._ended = False
        self.successor: int | None = None
        self._server = RequestServer(options.run, address, term, world.rank)

    # ---- records in

    def on_record(self, record: Record) -> None:
        """A record of a member; its kind names the method."""
        self._heard_s[record["from"]] = time.monotonic()
        getattr(self, "_on_" + record["kind"].lower())(record)

    def _on_alive(self, _record: Record) -> None:
        """The time it came is all it says."""

    def _on_ready(self, record: Record) -> None:
        self._ready.add(record["from"])
        if len(self._ready) == self.world.size:
            self._store = start_store(self._address)
            self._broadcast("START", store=[self._address, self._store.port], holders=self._tally.roster.holders)

    def _on_started(self, record: Record) -> None:
        self._started.add(record["from"])

    def _on_progress(self, record: Record) -> None:
        self._positions[record["from"]] = record["iteration"]
        if "loss" in record:
            self._record.progress(record, self._tally.generation, self._phase_text())

    def _on_finished(self, record: Record) -> None:
        self._finished.add(record["from"])
        if self._tally.phase in (Phase.PREPARING, Phase.READY):
            self._act(self._tally.event(Event.JOB_ENDED, "training ended before the move could take effect"))

    def _on_fatal(self, record: Record) -> None:
        self._fail_job(record["message"])

    def _on_fault(self, record: Record) -> None:
        self._record.fault(record)

    def _on_vacate_my_host(self, record: Record) -> None:
        host = self._tally.roster.hosts[record["from"]]
        try:
            self._request(host, f"SIGUSR2 to world rank {record['from']}")
        except UserError as error:
            self._say(f"request refused: {error}")

    def _on_cancel(self, _record: Record) -> None:
        self._act(self._tally.event(Event.CANCELLED, "cancelled"))

    def _on_arrived(self, record: Record) -> None:
        if record["move"] == self._tally.number and self._tally.phase is Phase.SWITCHING and self._deadline is None:
            self._set_deadline(self.options.switch_deadline_s, "the switchover of every member")

    def _on_report(self, record: Record) -> None:
        member, report = record["from"], Report(record["report"])
        if "position" in record:
            self._positions[member] = max(self._positions.get(member, -1), record["position"])
        if report is Report.REFUSED:
            self._positions[member] = max(self._positions.get(member, -1), record["value"])
        if self._move is not None and record["move"] == self._tally.number:
            self._move.take(report, record, self.timeline.clock())
        self._act(self._tally.report(report, member, record["move"], record["value"]))

    # ---- the clock

    def on_tick(self, now_s: float) -> None:
        """Called at every poll of the control thread."""
        if self._ended or self.successor is not None:
            return
        if now_s - self._beaten_s > _BEAT_S:
            self._beaten_s = now_s
            self._broadcast("BEAT")
            self._find_lost(now_s)
        if self._deadline is not None and now_s > self._deadline[0]:
            self._expire()
        if self._ended:
            return
        self._server.poll(self._answer)
        self._start_due()
        if len(self._finished) == self.config.job_size and self._tally.phase is Phase.TRAINING:
            self._finish_run()

    def _find_lost(self, now_s: float) -> None:
        for rank, heard_s in self._heard_s.items():
            if now_s - heard_s > self.options.heartbeat_timeout_s and rank not in self._tally.roster.lost:
                self._lose(rank, f"not heard for {now_s - heard_s:.1f} s")

    def _lose(self, rank: int, why: str) -> None:
        text = f"world rank {rank} on {self._tally.roster.hosts[rank]} is lost: {why}"
        self.timeline.add_event("lost", text)
        self._say(text)
        actions = self._tally.lose(rank)
        if rank not in self._tally.roster.holders:
            self._send(rank, "END", code=1, finalize=False)  # if it only hangs, it must not stay behind
        self._act(actions)

    def _set_deadline(self, seconds: float, what: str) -> None:
        self._deadline = (time.monotonic() + seconds, f"{what} took longer than {seconds:g} s")

    def _expire(self) -> None:
        assert self._deadline is not None
        reason, self._deadline = self._deadline[1], None
        missing = self._tally.waiting
        spares = [r for r in missing if r not in self._tally.roster.holders]
        if self._tally.phase is Phase.ABORTED and spares == missing:
            for rank in spares:
                self._lose(rank, "it doesn't acknowledge the abort")
            return
        self._act(self._tally.event(Event.DEADLINE_EXPIRED, f"{reason}; missing: world ranks {missing}"))

    # ---- requests

    def _start_due(self) -> None:
        """Take the next scheduled move when its preparation is due, else the next request."""
        if self._tally.phase is not Phase.TRAINING or len(self._started) < self.config.job_size or self._finished:
            return
        if self._scheduled:
            iteration = self._scheduled[0].request.iteration
            if max(self._positions.values(), default=0) >= iteration - self.options.lead:
                self._begin(self._scheduled.popleft())
                return
        if self._queue:
            self._begin(self._queue.popleft())

    def _request(self, text: str, origin: str) -> int:
        """Take a request. Raises UserError if it can't be done as things stand. Returns its number."""
        request = parse_vacate(text, need_iteration=False)
        if self._tally.phase is Phase.TRAINING:
            plan_move(self._tally.roster, request)
        pending = Pending(id=self._num_requests, text=text)
        self._num_requests += 1
        self.timeline.add_event("request", f"{text} ({origin})")
        if request.iteration is None:
            self._queue.append(pending)
        else:
            self._scheduled = deque(sorted([*self._scheduled, pending], key=lambda p: p.request.iteration))
        return pending.id

    def _begin(self, pending: Pending) -> None:
        self._current = pending
        try:
            plan = plan_move(self._tally.roster, pending.request)
        except UserError as error:
            self._record.refuse(pending.text, str(error), self._tally.generation, self.term)
            self._say(f"move {pending.text} refused: {error}")
            self._release_hold()
            return
        self._move = MoveRecord(request=pending.text, plan=plan, term=self.term, requested_s=self.timeline.clock())
        self._act(self._tally.request(plan))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request from outside (requests.py)."""
        try:
            if request["do"] == "vacate":
                return {"id": self._request(request["vacate"], "request"), "phase": self._tally.phase.value}
            if request["do"] == "cancel":
                return self._cancel()
            return self.status()
        except UserError as error:
            return {"error": str(error)}

    def _cancel(self) -> dict[str, Any]:
        if self._tally.phase is Phase.TRAINING and (self._queue or self._scheduled):
            dropped = (self._queue or self._scheduled).popleft()
            self._release(dropped.hold)
            return {"cancelled": dropped.text}
        refused = Action.REFUSE_CANCEL in self._apply(Event.CANCELLED, "cancelled")
        if refused:
            return {"error": f"nothing to cancel: the job is in phase {self._tally.phase.value}"}
        return {"cancelled": self._current.text if self._current else ""}

    def _apply(self, event: Event, reason: str) -> tuple[Action, ...]:
        actions = self._tally.event(event, reason)
        self._act(actions)
        return actions

    def status(self) -> dict[str, Any]:
        """What `harness.py status` shows."""
        roster = self._tally.roster
        return {"phase": self._tally.phase.value, "iteration": max(self._positions.values(), default=0),
                "num_iterations": self.options.last_iteration(self.config.iterations), "generation": self._tally.generation, "term": self.term,
                "controller": self.world.rank, "move": self._current.text if self._move and self._current else None,
                "queued": [p.text for p in [*self._queue, *self._scheduled]],
                "hosts": {h: {"slots": list(roster.slots_on(h)),
                              "spares": len([r for r in roster.spares() if roster.hosts[r] == h])}
                          for h in roster.host_names()},
                "lost": sorted(roster.lost), "moves": self._record.moves}

    # ---- actions out

    def _act(self, actions: tuple[Action, ...]) -> None:
        if actions and self._tally.phase is not Phase.TRAINING:
            self.timeline.add_event("phase", self._tally.phase.value, self._tally.number)
        for action in actions:
            getattr(self, "_" + action.name.lower())()

    def _send(self, rank: int, kind: str, **fields: Any) -> None:
        self.world.send(rank, {"kind": kind, "term": self.term, **fields})

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for rank in range(self.world.size):
            if rank not in self._tally.roster.lost:
                self._send(rank, kind, **fields)

    def _to_members(self, kind: str, **fields: Any) -> None:
        for rank in sorted(self._tally.members):
            self._send(rank, kind, move=self._tally.number, **fields)

    def _send_prepare(self) -> None:
        assert self._tally.plan is not None
        self._store = start_store(self._address)
        self._set_deadline(self.options.prepare_deadline_s, "preparation")
        self._to_members("PREPARE", plan=self._tally.plan.to_json(), generation=self._tally.generation + 1,
                         store=[self._address, self._store.port], timeout_s=self.options.prepare_deadline_s)

    def _propose_position(self) -> None:
        self._store = None
        furthest = max(self._positions.get(r, 0) for r in self._tally.roster.holders)
        wanted = self._current.request.iteration if self._current else None
        last = self.options.last_iteration(self.config.iterations) - 1
        if self._current and self._current.hold is not None and self._tally.position is None:
            position = self._current.hold
        else:
            position = min(max(furthest + 2, wanted or 0), last)
        if position > last or (self._tally.position is not None and position <= self._tally.position):
            self._act(self._tally.event(Event.JOB_ENDED, "training ends before the move could take effect"))
            return
        self._set_deadline(self.options.switch_deadline_s, "agreeing on the position")
        self._tally.propose(position)
        self._to_members("PROPOSE", position=position)

    def _send_switch(self) -> None:
        self._deadline = None  # starts anew with the first arrival: until then everybody trains
        self._to_members("SWITCH", position=self._tally.position)

    def _send_commit(self) -> None:
        assert self._move is not None
        self._move.committed_s = self.timeline.clock()
        self._set_deadline(self.options.switch_deadline_s, "the acknowledgement of the commit")
        self._to_members("COMMIT", release=self._hold_to_release())

    def _send_abort(self) -> None:
        self._store = None  # ends every member's wait for a communicator
        self._set_deadline(self.options.switch_deadline_s, "the acknowledgement of the abort")
        self._say(f"move {self._current.text} aborted: {self._tally.reason}")
        self._to_members("ABORT", reason=self._tally.reason, release=self._hold_to_release())

    def _retire_generation(self) -> None:
        self._to_members("RETIRE")

    def _finish_move(self) -> None:
        assert self._move is not None
        self._deadline = None
        self._record.finish(self._move, self._tally)
        self._release_hold()
        self._current = self._move = None
        self._choose_successor()

    def _hold_to_release(self) -> int | None:
        hold = self._current.hold if self._current else None
        return None if any(p.hold == hold for p in self._scheduled) else hold

    def _release_hold(self) -> None:
        self._release(self._hold_to_release())

    def _release(self, hold: int | None) -> None:
        if hold is not None:
            self._broadcast("RELEASE", release=hold)

    def _queue_request(self) -> None:
        raise AssertionError("requests are only begun in phase TRAINING")

    def _refuse_cancel(self) -> None:
        self._say(f"nothing to cancel: phase {self._tally.phase.value}")

    def _note_loss(self) -> None:
        """`_lose` has logged it."""

    def _recount(self) -> None:
        self._act(self._tally.recount())

    def _fail_job(self, message: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        message = message or self._tally.reason or "a process that holds a slot is lost"
        sys.stderr.write(f"harness: {message}\n")
        sys.stderr.flush()
        self._record.end("failed", message, self._tally, self.term)
        self._end(1)

    def _finish_run(self) -> None:
        self._ended = True
        for pending in [*self._scheduled, *self._queue]:
            self._record.refuse(pending.text, "training ended before it was due", self._tally.generation, self.term)
        self._record.end("completed", None, self._tally, self.term)
        self.timeline.close()  # HDF5 doesn't let a process read the file that it writes
        self._on_end(self.options.run)
        self._end(0)

    def _end(self, code: int) -> None:
        self._server.close()
        # plain mpirun calls it a failure if a process ends without MPI_Finalize, which needs every process
        self._broadcast("END", code=code, finalize=code == 0 and not self._tally.roster.lost)

    # ---- the role moves on

    def _choose_successor(self) -> None:
        """Leave a host that holds no slot any more: it may be given back."""
        roster = self._tally.roster
        if not roster.slots_on(roster.hosts[self.world.rank]):
            self.successor = min(roster.holders)

    def resign(self) -> None:
        """Hand the role to `successor`, with all that it must know, under the next term."""
        self._server.close()
        self.world.send(self.successor, {
            "kind": "INHERIT", "term": self.term + 1, "roster": self._tally.roster.to_json(),
            "generation": self._tally.generation, "num_moves": self._tally.number + 1,
            "record": self._record.to_json(), "num_requests": self._num_requests,
            "scheduled": [asdict(p) for p in self._scheduled], "queue": [asdict(p) for p in self._queue],
            "positions": list(self._positions.items()), "finished": sorted(self._finished)})

    def inherit(self, record: Record) -> None:
        """Go on where the last controller resigned, and tell everybody."""
        self._tally = MoveTally(Roster.from_json(record["roster"]), generation=record["generation"],
                                num_moves=record["num_moves"], require_bitwise=self.options.require_bitwise)
        self._record.load_json(record["record"])
        self._num_requests = record["num_requests"]
        self._scheduled = deque(Pending(**p) for p in record["scheduled"])
        self._queue = deque(Pending(**p) for p in record["queue"])
        self._positions = {int(rank): position for rank, position in record["positions"]}
        self._finished = set(record["finished"])
        self._started = set(self._tally.roster.holders)
        self.timeline.add_event("controller", f"world rank {self.world.rank} is the controller, term {self.term}")
        self._broadcast("CONTROLLER", controller=self.world.rank)

    def _phase_text(self) -> str:
        if self._move is None or self._current is None:
            return ""
        text = f"  {self._tally.phase.value} {self._current.text}"
        num_members = len(self._tally.members)
        return text + f" ({num_members - len(self._tally.waiting)}/{num_members})"

    def _say(self, text: str) -> None:
        self._record.say(text)
