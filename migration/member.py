"""A process's part in moves: what it does when the controller says so, and where its training thread may stop.

Records come in on the control thread (`on_record`), communicators are built on a prepare thread, and the training
thread calls `at_boundary` at the top of every iteration, the only place where the membership may change. A position
is (iteration, at its start); it is checked and set under one lock. A member that has accepted a position waits there
for the verdict and never guesses one.

Knows nothing of MPI (world.py) and decides nothing (controller.py).
"""
from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from migration import state, transfer
from migration.communicators.base import Communicator
from migration.errors import MoveFailed
from migration.faults import Fault, Faults, hang
from migration.groups import Groups, connect_store
from migration.move import Report
from migration.options import Options
from migration.plan import MovePlan
from migration.timeline import Timeline
from migration.world import Record, World


@dataclass(slots=True, kw_only=True)
class Part:
    """This process's part in one move. Changed under the member's lock."""

    number: int
    generation: int  # after the move
    plan: MovePlan
    role: str  # leaver, joiner, stayer
    slot: int
    store: tuple[str, int]
    prepare_timeout_s: float
    position: int | None = None
    verdict: str = ""  # then SWITCH, then COMMIT or ABORT
    reason: str = ""
    retired: bool = False
    wrong_probe: bool = False  # by a fault
    num_busy: int = 0  # threads at work for it; the last one to leave an aborted part cleans up
    pair: Communicator | None = None
    thread: threading.Thread | None = None
    warm: threading.Event = field(default_factory=threading.Event)


class Member:
    """One process of the world, with a slot or as a spare."""

    def __init__(self, *, world: World, groups: Groups, timeline: Timeline, options: Options) -> None:
        self.world, self.groups, self.timeline, self.options = world, groups, timeline, options
        self.slot: int | None = None
        self.generation = 0
        self.term, self.controller = 0, 0
        self.part: Part | None = None
        self.started: Record | None = None
        self._changed = threading.Condition()
        self._position, self._begun = -1, False
        self._holds: set[int] = set()
        self._last_heard_s = time.monotonic()
        self._vacate_own_host = False
        self.faults = Faults(options.faults, self._on_fault)

    # ---- speaking

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a record to the controller."""
        self.world.send(self.controller, {"kind": kind, "from": self.world.rank, **fields})

    def _report(self, part: Part, report: Report, value: object = None, **fields: Any) -> None:
        self.tell("REPORT", report=report.value, move=part.number, value=value, **fields)

    def _on_fault(self, fault: Fault) -> None:
        self.timeline.add_event("fault", fault.text)
        self.tell("FAULT", text=fault.text, fault=fault.kind, slot=fault.slot, phase=fault.phase)

    def vacate_own_host(self) -> None:
        """SIGUSR2: from a signal handler, so it only leaves a note for the control thread."""
        self._vacate_own_host = True

    def hold_at(self, iterations: set[int]) -> None:
        """Training waits at these iterations until the controller has settled the move meant for each."""
        self._holds = set(iterations)

    # ---- the control thread

    def on_record(self, record: Record) -> None:
        """A record of the controller. One of an older term is refused and changes nothing."""
        if record["term"] < self.term:
            self.timeline.add_event("stale", f"refused {record['kind']} of term {record['term']}, now {self.term}")
            return
        self._last_heard_s = time.monotonic()
        with self._changed:
            getattr(self, "_on_" + record["kind"].lower())(record)
            self._changed.notify_all()

    def on_tick(self, now_s: float) -> None:
        if self._vacate_own_host:
            self._vacate_own_host = False
            self.tell("VACATE_MY_HOST")
        if now_s - self._last_heard_s > self.options.orphan_timeout_s:
            self.timeline.add_event("orphan", f"no word of the controller (world rank {self.controller})")
            self.end_process(f"world rank {self.world.rank} has heard no controller (world rank {self.controller}) for "
                             f"{self.options.orphan_timeout_s:.0f} s and ends itself", 1)

    def end_process(self, message: str, code: int) -> None:
        """End this process now, from any thread; MPI is not finalized, since that would wait for everybody."""
        if message:
            sys.stderr.write(f"harness: {message}\n")
        self.timeline.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _on_beat(self, _record: Record) -> None:
        self.tell("ALIVE")

    def _on_start(self, record: Record) -> None:
        self.started = record

    def _on_controller(self, record: Record) -> None:
        self.term, self.controller = record["term"], record["controller"]

    def _on_end(self, record: Record) -> None:
        if record["finalize"]:
            self.timeline.close()
            self.world.finalize()
        self.end_process("", record["code"])

    def _on_prepare(self, record: Record) -> None:
        plan = MovePlan.from_json(record["plan"])
        role, slot = "stayer", self.slot
        for a in plan.assignments:
            if self.world.rank in (a.leaver, a.joiner):
                role, slot = "leaver" if a.leaver == self.world.rank else "joiner", a.slot
        assert slot is not None, f"world rank {self.world.rank} has no part in {record['plan']}"
        self.part = Part(number=record["move"], generation=record["generation"], plan=plan, role=role, slot=slot,
                         store=tuple(record["store"]), prepare_timeout_s=record["timeout_s"])
        if role == "joiner":
            self.part.num_busy = 1  # its main thread, in standby.py, which starts the prepare thread
        else:
            self.start_prepare_thread(self.part)

    def _on_propose(self, record: Record) -> None:
        part, position = self.part, record["position"]
        if part is None or part.number != record["move"]:
            return
        if part.role == "joiner":
            if not self._pass_ready_faults(part, position):
                return
        elif self._position > position or (self._position == position and self._begun):
            self._report(part, Report.REFUSED, self._position)
            return
        part.position = position
        self._report(part, Report.ACCEPTED, position)

    def _pass_ready_faults(self, part: Part, position: int) -> bool:
        try:
            kind = self.faults.fire("READY", part.slot, part.number)
        except MoveFailed as error:
            self._report(part, Report.FAILED, str(error))
            return False
        if kind == "corrupt":
            self._report(part, Report.ACCEPTED, position + 1)
        if kind == "cancel":
            self.tell("CANCEL")
        return kind not in ("hang", "corrupt")

    def _on_switch(self, record: Record) -> None:
        if self.part is not None and self.part.number == record["move"] and not self.part.verdict:
            self.part.verdict = "SWITCH"

    def _on_commit(self, record: Record) -> None:
        assert self.part is not None and self.part.number == record["move"], record
        self.part.verdict = "COMMIT"
        self._holds.discard(record["release"])

    def _on_abort(self, record: Record) -> None:
        self._holds.discard(record["release"])
        part = self.part
        if part is None or part.number != record["move"]:
            self.tell("REPORT", report=Report.ACKNOWLEDGED.value, move=record["move"], value=None)
            return
        part.verdict, part.reason = "ABORT", record["reason"]
        self.world.urgent = False
        if part.pair is not None:
            part.pair.abort()  # ends a transfer under way
        if part.num_busy == 0:
            self._clean_up(part)

    def _on_retire(self, record: Record) -> None:
        self.groups.retire()
        if self.part is not None and self.part.number == record["move"]:
            self.part.retired = True
            if self.part.pair is not None:
                self.groups.release_pair(self.part.pair)
            self.part = None

    def _on_release(self, record: Record) -> None:
        self._holds.discard(record["release"])

    # ---- the prepare thread

    def start_prepare_thread(self, part: Part) -> None:
        with self._changed:
            part.num_busy += 1
        part.thread = threading.Thread(target=self._prepare, args=(part,), name="prepare", daemon=True)
        part.thread.start()

    def _prepare(self, part: Part) -> None:
        try:
            old, new = self._build(part)
            if part.role == "joiner":
                part.warm.wait()
                new = "a fault" if part.wrong_probe else new
            if not part.verdict:
                self._report(part, Report.PREPARED, [old, new], position=self._position)
        except Exception as error:  # whatever it is, the controller decides: the move aborts, training goes on
            self._report_failure(part, error)
        finally:
            self.leave(part)

    def _build(self, part: Part) -> tuple[str | None, str | None]:
        """Stage 1 of every group this process is in, and of its pair. Returns the (old, new) probe digests."""
        tags = {"move": part.number, "slot": part.slot, "generation": part.generation - 1}
        timeout_s = part.prepare_timeout_s
        store = connect_store(part.store, timeout_s)
        slots = part.plan.slots
        old = self.groups.live_probe(slots) if part.role != "joiner" else None
        new = None
        if part.role != "leaver":
            with self.timeline.span("prepare_groups", "PREPARING", **tags):
                new = self.groups.prepare(part.generation, store, slots, timeout_s)
        if part.role != "stayer":
            with self.timeline.span("prepare_pair", "PREPARING", **tags):
                part.pair = self.groups.prepare_pair(
                    f"g{part.generation}/pair{part.slot}", store, int(part.role == "joiner"), timeout_s,
                    self.options.switch_deadline_s)
        return old, new

    def leave(self, part: Part) -> None:
        """A thread is done with `part`; the last one cleans up if the move was aborted."""
        with self._changed:
            part.num_busy -= 1
            if part.num_busy == 0 and part.verdict == "ABORT":
                self._clean_up(part)
            self._changed.notify_all()

    def _clean_up(self, part: Part) -> None:
        """Drop what was prepared for an aborted move, then acknowledge."""
        self.groups.discard()
        if part.pair is not None:
            self.groups.release_pair(part.pair)
        self.part = None
        self.timeline.add_event("phase", f"ABORTED: {part.reason}", part.number)
        self._report(part, Report.ACKNOWLEDGED)

    def _report_failure(self, part: Part, error: Exception) -> None:
        text = f"slot {part.slot} ({part.role}, world rank {self.world.rank}): {type(error).__name__}: {error}"
        self.timeline.add_event("error", text, part.number)
        if not part.verdict == "ABORT":  # afterwards errors are the consequence of the abort
            self.timeline.add_event("traceback", traceback.format_exc()[-500:], part.number)
        self._report(part, Report.FAILED, text.split("\n")[0][:300])

    # ---- waiting, by the training thread

    def wait_for(self, condition: Any) -> Any:
        """Block until `condition()` is true; returns its value. Burns nothing: the control thread notifies."""
        with self._changed:
            while not (value := condition()):
                self._changed.wait(1.0)
            return value

    def wait_verdict(self, part: Part) -> str:
        """COMMIT or ABORT. Waits as long as it takes: only the controller decides."""
        return self.wait_for(lambda: part.verdict if part.verdict in ("COMMIT", "ABORT") else "")

    # ---- the boundary

    def at_boundary(self, job: Any) -> bool:
        """Called by the training thread at the top of every iteration. Returns False if the slot has been handed over.

        Collective over the members of the move that switches here, if one does; otherwise it only takes a lock.
        """
        with self._changed:
            self._position, self._begun = job.iteration, False
            while self._must_wait(job.iteration):
                self._changed.wait(1.0)
            part = self.part
            if part is None or part.position != job.iteration or part.verdict != "SWITCH":
                self._begun = True
                return True
            part.num_busy += 1
        stays = self._switch(part, job)
        with self._changed:
            self._begun = True
        return stays

    def _must_wait(self, iteration: int) -> bool:
        part = self.part
        if part is not None and part.position == iteration:
            return part.verdict == ""
        return iteration in self._holds

    def _switch(self, part: Part, job: Any) -> bool:
        arrived_s = self.timeline.clock()
        self.world.urgent = True  # only now: polling fast while everybody still trains would slow them down
        tags = {"move": part.number, "slot": part.slot, "iteration": job.iteration, "generation": self.generation}
        num_bytes = 0
        self.tell("ARRIVED", move=part.number)
        try:
            with self.timeline.span("drain", "SWITCHING", **tags):
                job.check_drained()
            digest = None
            if part.role == "leaver":
                digest, num_bytes = self._hand_over(part, job, tags)
            else:
                with self.timeline.span("activate", "SWITCHING", **tags):
                    self.groups.activate()
            self._report(part, Report.VERIFIED, digest)
        except Exception as error:  # before the commit nothing may end the job
            self._report_failure(part, error)
        with self.timeline.span("verdict", "SWITCHING", **tags):
            verdict = self.wait_verdict(part)
        if verdict == "ABORT":
            self.groups.resume()
            self.leave(part)
            return True
        self.commit(part, arrived_s, num_bytes)
        return part.role != "leaver"

    def _hand_over(self, part: Part, job: Any, tags: dict[str, Any]) -> tuple[str, int]:
        assert part.pair is not None
        own = state.capture(job, frozenset(self.options.omit_state))
        with self.timeline.span("transfer", "SWITCHING", **tags) as span:
            span.bytes = transfer.send_state(part.pair, own, job.device)
        with self.timeline.span("digest", "SWITCHING", **tags):
            return state.combined(state.digests(own)), span.bytes

    def commit(self, part: Part, arrived_s: float, num_bytes: int) -> None:
        """The verdict is COMMIT: this process goes on in the new generation, or without a slot."""
        num_rebuilt, num_kept = self.groups.adopt() if part.role != "leaver" else (0, 0)
        self.generation = part.generation
        resumed_s = self.timeline.clock()
        if part.role == "leaver":
            self.slot = None
        else:
            self.slot = part.slot
        self.timeline.add_span("switchover", "COMMITTED", arrived_s, resumed_s, move=part.number, slot=part.slot,
                               iteration=part.position, generation=part.generation, bytes=num_bytes)
        self.world.urgent = False
        with self._changed:
            part.num_busy -= 1
        self._report(part, Report.ACKNOWLEDGED, arrived_s=arrived_s, resumed_s=resumed_s, bytes=num_bytes,
                     groups=[num_rebuilt, num_kept])

    def wait_retired(self) -> None:
        """A leaver stays until every stayer has acknowledged: only then may its old communicators go."""
        self.wait_for(lambda: self.part is None or self.part.role != "leaver")

    def finished(self, num_iterations: int) -> None:
        """Training is over: no position is accepted any more."""
        with self._changed:
            self._position, self._begun = num_iterations, True

    # ---- for standby.py

    def enter_slot(self, part: Part) -> None:
        """A joiner begins its first iteration in the slot at `part.position`."""
        with self._changed:
            self._position, self._begun = part.position, False

    def apply_fault(self, phase: str, part: Part) -> bool:
        """A joiner's fault point. Returns whether bits must be corrupted."""
        kind = self.faults.fire(phase, part.slot, part.number)
        if kind == "hang":
            hang()
        if kind == "cancel":
            self.tell("CANCEL")
        return kind == "corrupt"

    def fail(self, part: Part, error: Exception) -> None:
        """A joiner can't go on: tell the controller, wait for the abort."""
        part.warm.set()
        self._report_failure(part, error)
