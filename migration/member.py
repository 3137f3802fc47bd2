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
from typing import Any

from migration import preparation, switchover
from migration.communicators.base import Communicator
from migration.costs import log_costs, take_costs
from migration.errors import MoveFailed
from migration.faults import Fault, Faults, hang
from migration.groups import Groups
from migration.launch import RUN_VARIABLE
from migration.move import Report
from migration.options import Options
from migration.part import Part
from migration.plan import MovePlan
from migration.timeline import Timeline
from migration.world import Record, World


_LAST_SENDS_S = 1.0


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
        self._ending: tuple[float, int] | None = None
        self.faults = Faults(options.faults, self._on_fault)

    @property
    def is_ending(self) -> bool:
        """Whether the controller has ended the run."""
        return self._ending is not None

    @property
    def position(self) -> int:
        """The iteration that the training thread is at, -1 without a slot."""
        return self._position

    # ---- speaking

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a record to the controller."""
        self.world.send(self.controller, {"kind": kind, "from": self.world.rank, **fields})

    def report(self, part: Part, report: Report, value: object = None, **fields: Any) -> None:
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
        if self._ending is not None and now_s > self._ending[0]:
            self.end_process("", self._ending[1])
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
        # MPI may still hold what this process has sent, such as everybody's END: keep it going for a while
        self._ending = (time.monotonic() + _LAST_SENDS_S, record["code"])
        if record["finalize"] and RUN_VARIABLE not in os.environ:
            # under one's own mpirun, which calls it a failure (exit code 9) if a process ends before MPI does; --np
            # looks at result.json instead
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
            preparation.start(self, self.part)

    def _on_propose(self, record: Record) -> None:
        part, position, connects = self.part, record["position"], [(n, at) for n, at in record["connects"]]
        if part is None or part.number != record["move"]:
            return
        first_stop = min([position, *(at for _, at in connects)])
        if part.role == "joiner":
            if not self._pass_ready_faults(part, position):
                return
        elif self._position > first_stop or (self._position == first_stop and self._begun):
            self.report(part, Report.REFUSED, self._position)
            return
        part.position, part.connects = position, tuple(connects)
        self.report(part, Report.ACCEPTED, position)

    def _pass_ready_faults(self, part: Part, position: int) -> bool:
        try:
            kind = self.faults.fire("READY", part.slot, part.number)
        except MoveFailed as error:
            self.report(part, Report.FAILED, str(error))
            return False
        if kind == "corrupt":
            self.report(part, Report.ACCEPTED, position + 1)
        if kind == "cancel":
            self.tell("CANCEL")
        return kind not in ("hang", "corrupt")

    def _on_switch(self, record: Record) -> None:
        if self.part is not None and self.part.number == record["move"] and not self.part.verdict:
            self.part.verdict, self.part.makes_room = "SWITCH", record["room"]

    def _on_park(self, record: Record) -> None:
        assert self.part is not None and self.part.number == record["move"], record
        self.part.may_park = True

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
        part.rebuild_store = tuple(record["store"]) if record["store"] else None
        self.world.urgent = False
        if part.pair is not None:
            part.pair.abort()  # ends a transfer under way
        if part.num_busy:
            self.groups.abort_next()  # ends a connection under way
        if part.num_busy == 0:
            self._clean_up(part)

    def _on_retire(self, record: Record) -> None:
        self.groups.retire()
        if self.part is not None and self.part.number == record["move"]:
            if self.part.pair is not None:
                self.groups.release_pair(self.part.pair)
            self.part = None

    def _on_release(self, record: Record) -> None:
        self._holds.discard(record["release"])

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

    def give_pair(self, part: Part, pair: Communicator) -> None:
        """Before it is prepared, so that an ABORT can end that too. Raises MoveFailed when one has come already."""
        with self._changed:
            if part.verdict == "ABORT":
                raise MoveFailed(f"{pair.name}: the move was aborted before it was prepared")
            part.pair = pair

    def _clean_up(self, part: Part) -> None:
        """Drop what was prepared for an aborted move, then acknowledge."""
        log_costs(self.timeline, take_costs(self.groups), move=part.number, slot=part.slot)
        self.groups.discard()
        if part.pair is not None:
            self.groups.release_pair(part.pair)
        self.part = None
        self.timeline.add_event("phase", f"ABORTED: {part.reason}", part.number)
        self.report(part, Report.ACKNOWLEDGED, rebuilt=part.rebuilt)

    def report_failure(self, part: Part, error: Exception) -> None:
        text = f"slot {part.slot} ({part.role}, world rank {self.world.rank}): {type(error).__name__}: {error}"
        self.timeline.add_event("error", text, part.number)
        if not part.verdict == "ABORT":  # afterwards errors are the consequence of the abort
            self.timeline.add_event("traceback", traceback.format_exc()[-500:], part.number)
        self.report(part, Report.FAILED, text.split("\n")[0][:300])

    # ---- waiting, by the training thread

    def wait_for(self, condition: Any) -> Any:
        """Block until `condition()` is true; returns its value. Burns nothing: the control thread notifies."""
        with self._changed:
            while not (value := condition()):
                self._changed.wait(1.0)
            return value

    # ---- the boundary

    def at_boundary(self, job: Any) -> bool:
        """Called by the training thread at the top of every iteration. Returns False if the slot has been handed over.

        Collective over the members of the move that switches here, if one does; otherwise it only takes a lock.
        """
        while (part := self._wait_for_part(job.iteration)) is not None:
            if part.position != job.iteration:
                switchover.connect_ahead(self, part, job.iteration)
                break
            if not switchover.switch(self, part, job):
                return False
            # once more: training may be held here for another move
        with self._changed:
            self._begun = True
        return True

    def _wait_for_part(self, iteration: int) -> Part | None:
        """The move for which something is to be done before `iteration`; None: the iteration has begun."""
        with self._changed:
            self._position, self._begun = iteration, False
            while self._must_wait(iteration):
                self._changed.wait(1.0)
            part = self.part
            if part is not None and part.verdict == "SWITCH" and (part.position == iteration or part.due(iteration)):
                part.num_busy += 1
                return part
            self._begun = True
            return None

    def _must_wait(self, iteration: int) -> bool:
        part = self.part
        if part is not None and part.first_stop == iteration and part.verdict == "":
            return True
        if part is not None and part.position == iteration and part.verdict == "SWITCH":
            return False
        return iteration in self._holds

    def wait_retired(self) -> None:
        """A leaver stays until every stayer has acknowledged: only then may its old communicators go."""
        self.wait_for(lambda: self.part is None or self.part.role != "leaver")

    def finished(self, num_iterations: int) -> None:
        """Training is over: no position is accepted any more."""
        with self._changed:
            self._position, self._begun = num_iterations, True

    def enter_generation(self, part: Part) -> None:
        """The move is committed: this process holds the slot now, or none, in the next generation."""
        with self._changed:
            self.generation = part.generation
            self.slot = None if part.role == "leaver" else part.slot
            if part.role == "joiner":
                self._position, self._begun = part.position, False
            part.num_busy -= 1

    def apply_fault(self, phase: str, part: Part) -> bool:
        """A joiner's fault point. Returns whether bits must be corrupted."""
        kind = self.faults.fire(phase, part.slot, part.number)
        if kind == "hang":
            hang()
        if kind == "cancel":
            self.tell("CANCEL")
        return kind == "corrupt"
