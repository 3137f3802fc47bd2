"""Where the training thread may stop, and what it does there: the half of a member that the training thread runs.

It calls `at_boundary` at the top of every iteration and `before_step` between the reduction of gradients and the
optimizer's step, the only places where the membership may change (arms.py numbers them). A stop is checked and set
under one lock, which the control thread takes too. A process that has accepted a position waits there for the verdict
and never guesses one. Every wait ends with Recovering when the whole job is built anew.
"""
from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from migration import leader, proof, switchover
from migration.arms import boundary, cut
from migration.errors import Recovering
from migration.part import Part
from migration.timeline import Timeline

if TYPE_CHECKING:
    from migration.job import Job
    from migration.world import Record


class Stops:
    """`part`, `timeline` and the records that change `_holds`, `_end` and `part` are the Member's."""

    timeline: Timeline
    part: Part | None

    def __init__(self) -> None:
        self.job: Job | None = None  # of the slot, as its training thread showed it last
        self._changed = threading.Condition()
        self._stop, self._begun = -1, False  # the stop (arms.py) that training has come to, and whether it is past it
        self._stopped_s = 0.0  # when it came there
        self._holds: set[int] = set()
        self._end: tuple[int, bool] | None = None  # before which iteration training ends, and whether all have agreed
        self._recover: Record | None = None  # the controller's word that the whole job is built anew

    @property
    def position(self) -> int:
        """The iteration that the training thread is at, -1 without a slot."""
        return self._stop // 2

    def hold_at(self, stops: set[int]) -> None:
        """Training waits at these stops until the controller has settled the move meant for each."""
        self._holds = set(stops)

    def wait_for(self, condition: Any) -> Any:
        """Block until `condition()` is true; returns its value. Burns nothing: the control thread notifies.

        Raises Recovering.
        """
        with self._changed:
            while not (value := condition()):
                self._wait()
            return value

    def rest(self, part: Part, seconds: float) -> None:
        """Block the prepare thread for `seconds`, or until nobody gains by it: the move is aborted, or training stands
        still at the iteration for which it was asked.
        """
        ends_s = time.monotonic() + seconds
        with self._changed:
            while (left_s := ends_s - time.monotonic()) > 0 and not part.is_over and not self._is_held():
                self._changed.wait(left_s)

    def _is_held(self) -> bool:
        return not self._begun and self._stop in self._holds

    def _wait(self) -> None:
        """With the lock: until there may be news. Raises Recovering."""
        self.check()
        self._changed.wait(1.0)

    @property
    def is_recovering(self) -> bool:
        """Whether this thread is to leave what it is at: its slot, or none, is another one now (rebuilding.py)."""
        return self._recover is not None

    def check(self) -> None:
        """Raises Recovering if what was computed since the last stop is of no use: collectives may have been ended."""
        if self._recover is not None:
            raise Recovering

    # ---- the stops

    def at_boundary(self, job: Job) -> bool:
        """Called by the training thread at the top of every iteration. Returns False if the slot has been handed over.

        Collective over the members of the move that switches here, if one does; otherwise it only takes a lock.
        """
        return self._stop_at(job, boundary(job.iteration))

    def before_step(self, job: Job) -> bool:
        """The same, called between the gradients' reduction and the optimizer's step."""
        if not self._stop_at(job, cut(job.iteration)):
            return False
        part = self.part
        if part is not None and part.sender is not None:
            leader.hold_back(self, part)
        return True

    def _stop_at(self, job: Job, stop: int) -> bool:
        self._stopped_s, self.job = self.timeline.clock(), job
        part = self.part
        is_over = part is not None and part.role == "joiner" and part.verdict == "COMMIT" and stop > part.stop
        if is_over and not part.is_proven:
            proof.tell_step(self, part, job)
        leader.follow_step(self, part)
        while (part := self._wait_for_part(stop)) is not None:
            if part.stop != stop:
                switchover.connect_ahead(self, part, stop)
                break
            arrived_s = self._stopped_s if part.arm.stops_first else self.timeline.clock()
            if not switchover.switch(self, part, job, arrived_s):
                return False
            # once more: training may be held here for another move
        if self.part is not None and self.part.sender is not None:
            self.part.sender.arrive(stop)
        with self._changed:
            while self._is_end_open(stop):
                self._wait()
            self._begun = True
        return True

    def _wait_for_part(self, stop: int) -> Part | None:
        """The move for which something is to be done at `stop`; None: training has gone on from there."""
        with self._changed:
            self.check()
            self._stop, self._begun = stop, False
            if self._is_held():
                self._changed.notify_all()  # a prepare thread that rests
            while self._must_wait(stop):
                self._wait()
                if self.part is not None and self.part.sender is not None:
                    self.part.sender.open()  # it may have come meanwhile
                    self.part.sender.arrive(stop)
            part = self.part
            if part is not None and part.verdict == "SWITCH" and (part.stop == stop or part.due(stop)):
                part.num_busy += 1
                return part
            self._begun = True
            return None

    def ends_before(self, iteration: int) -> bool:
        """Whether training ends before `iteration`, as all have agreed. The same answer on every slot's process."""
        return self._end == (iteration, True)

    def _is_end_open(self, stop: int) -> bool:
        """Whether it is being agreed if training ends at `stop`: this process has accepted it."""
        return self._end is not None and not self._end[1] and boundary(self._end[0]) == stop

    def _must_wait(self, stop: int) -> bool:
        part = self.part
        if self._end is not None and boundary(self._end[0]) == stop:
            return self._is_end_open(stop)
        if part is not None and part.first_stop == stop and part.verdict == "":
            return True
        if part is not None and part.stop == stop and part.verdict == "SWITCH":
            return False
        return stop in self._holds

    def wait_retired(self) -> None:
        """A leaver stays until every stayer has acknowledged: only then may its old communicators go."""
        self.wait_for(lambda: self.part is None or self.part.role != "leaver")

    def finished(self, num_iterations: int) -> None:
        """Training is over: no position is accepted any more."""
        with self._changed:
            self._stop, self._begun = boundary(num_iterations), True
