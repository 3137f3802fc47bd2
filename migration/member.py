"""A process's part in moves: what it does when the controller says so.

Records come in on the control thread (`on_record`); what other threads do for a move is in part_threads.py, and where
the training thread may stop in stops.py. Knows nothing of MPI (world.py) and decides nothing (controller.py).
"""
from __future__ import annotations

import os
import sys
import time

from migration import preparation
from migration.acceptance import Figures
from migration.arms import ARMS, boundary
from migration.errors import MoveFailed
from migration.groups import Groups
from migration.move import Report
from migration.neighbours import Neighbours
from migration.options import Options
from migration.part import Part
from migration.part_threads import PartThreads
from migration.roster import MovePlan
from migration.timeline import Timeline
from migration.watch import FIRST_WORD_S, HEARTBEAT_S
from migration.world import Record, World
from migration.zygote import RUN_VARIABLE

_LAST_SENDS_S = 1.0


class Member(PartThreads):
    """One process of the world, with a slot or as a spare."""

    def __init__(self, *, world: World, groups: Groups, timeline: Timeline, options: Options, address: str) -> None:
        """`address` is where other processes reach this one."""
        super().__init__(world=world, groups=groups, timeline=timeline, options=options)
        self.address = address
        self.term = 0  # of the controller
        self._committed = -1  # number of the last move whose commit this process has heard
        self.is_training = False  # every slot has started
        self.warm_roles: set[str] = set()  # of pipelines, that this process has run; see warmup.py
        self.figures: Figures | None = None  # of this process, measured last; None: nobody wants them
        self._last_heard_s = time.monotonic() + max(0.0, FIRST_WORD_S - options.orphan_timeout_s)
        self._told_s = 0.0
        self._neighbours: Neighbours | None = None  # once all have left their footprints
        self._vacate_own_host = False
        self._ending: tuple[float, int] | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the controller has ended the run."""
        return self._ending is not None

    def vacate_own_host(self) -> None:
        """SIGUSR2: from a signal handler, so it only leaves a note for the control thread."""
        self._vacate_own_host = True

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
        if now_s - self._told_s > HEARTBEAT_S:
            self._told_s = now_s
            self._tell_alive()
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

    def _on_beat(self, record: Record) -> None:
        """That it came says that the controller lives."""
        self.deputy = record["deputy"]

    def _tell_alive(self) -> None:
        if self._neighbours is None and self.is_training:
            machines = [hello["machine"] for hello in self.world.hellos]
            self._neighbours = Neighbours(self.options.run, self.world.rank, machines)
        gone = self._neighbours.gone() if self._neighbours is not None else []
        if self.controller in gone:
            self._doubt(has_died=True)
        is_idle = self.part is None and not self.is_recovering and not self.groups.is_closing
        self.tell("ALIVE", idle=is_idle, gone=gone, roles=sorted(self.warm_roles))

    def _on_start(self, record: Record) -> None:
        self.started = record

    def _on_begun(self, _record: Record) -> None:
        self.is_training = True

    def _on_controller(self, record: Record) -> None:
        """Another one, which must hear where this process stands, and what the last one may have heard alone."""
        with self._told.lock:  # what other threads tell meanwhile comes to it after what it must hear again
            self.term, self.controller, self.deputy = record["term"], record["controller"], None
            self.is_training = True
            self.hold_at(set(record["holds"]))
            self.tell("STANDING", slot=self.slot, position=self.position, generation=self.generation,
                      part=-1 if self.part is None else self.part.number, committed=self._committed,
                      may_park=self.part is not None and self.part.may_park)
            for told in self._told.again(record["heard"]):
                self.world.send(self.controller, told)

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
                         arm=ARMS[record["arm"]], store=tuple(record["store"]), prepare_timeout_s=record["timeout_s"],
                         are_joiners_warm=record["are_joiners_warm"],
                         rests_until_s=time.monotonic() + record["rests_s"])
        if role == "joiner":
            self.part.num_busy = 1  # its main thread, in standby.py, which starts the prepare thread
        else:
            preparation.start(self, self.part)

    def _on_propose(self, record: Record) -> None:
        part, position, connects = self.part, record["position"], [(n, at) for n, at in record["connects"]]
        if part is None or part.number != record["move"]:
            return
        before = part.position, part.connects
        part.position, part.connects = position, tuple(connects)
        if part.role == "joiner":
            if not self._pass_ready_faults(part):
                part.position, part.connects = before
                return
        elif self._stop > part.first_stop or (self._stop == part.first_stop and self._begun):
            part.position, part.connects = before
            self.report(part, Report.REFUSED, self._stop)
            return
        self.report(part, Report.ACCEPTED, part.first_stop)

    def _pass_ready_faults(self, part: Part) -> bool:
        try:
            kind = self.faults.fire("READY", part.slot, part.number)
        except MoveFailed as error:
            self.report(part, Report.FAILED, str(error))
            return False
        if kind == "corrupt":
            self.report(part, Report.ACCEPTED, part.first_stop + 1)
        if kind == "cancel":
            self.tell("CANCEL", move=part.number)
        return kind not in ("hang", "corrupt")

    def _on_switch(self, record: Record) -> None:
        if self.part is not None and self.part.number == record["move"] and not self.part.verdict:
            self.part.verdict, self.part.makes_room = "SWITCH", record["room"]

    def _on_park(self, record: Record) -> None:
        assert self.part is not None and self.part.number == record["move"], record
        self.part.may_park, self.part.is_parking = True, self.part.role != "joiner"

    def _on_commit(self, record: Record) -> None:
        if self._committed == record["move"]:
            return  # another controller says it again
        assert self.part is not None and self.part.number == record["move"], record
        self.part.verdict, self._committed = "COMMIT", record["move"]
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
        if not part.is_parking:
            self._end_work(part)

    def _on_retire(self, record: Record) -> None:
        self.groups.retire()
        if self.part is not None and self.part.number == record["move"]:
            self._release_pair(self.part)
            self.part = None

    def _on_release(self, record: Record) -> None:
        self._holds.discard(record["release"])

    def _on_end_before(self, record: Record) -> None:
        """A proposal, or with `agreed` the verdict. Who has accepted waits at that iteration for what comes next."""
        iteration = record["iteration"]
        if self._end == (iteration, True):
            return  # another controller says it again
        accepted = (self._stop, self._begun) <= (boundary(iteration), False)
        assert accepted or not record["agreed"], f"at stop {self._stop}, past the agreed end before {iteration}"
        if accepted:
            self._end = (iteration, record["agreed"])
        if not record["agreed"]:
            self.tell("END_ANSWER", iteration=iteration, accepted=accepted, position=self.position)
