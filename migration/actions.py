"""The controller's hands: what each Action of the protocol's table does. Records go out; nothing is decided here.

controller.py derives from `Actions`, takes records and requests in, and asks the table what to do. Control thread only,
so it needs no lock.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from migration import pacing
from migration.arms import boundary
from migration.controller_base import ControllerBase
from migration.protocol import Action, Event, Phase
from migration.schedule import connects_per_boundary, spread_connects
from migration.stores import start_store
from migration.topology import pipeline_role

# after these alone another controller would come to the same
_NO_VERDICT = frozenset({Action.PROPOSE_POSITION, Action.SEND_SWITCH, Action.SEND_PARK, Action.QUEUE_REQUEST,
                         Action.REFUSE_CANCEL, Action.RECOUNT})


class Actions(ControllerBase):
    """A method for each Action."""

    def _act(self, actions: tuple[Action, ...]) -> None:
        """Carry out what the table says, in order."""
        if actions and self._tally.phase is not Phase.TRAINING:
            self.timeline.add_event("phase", self._tally.phase.value, self._tally.number)
        if not _NO_VERDICT.issuperset(actions):
            self._gate.close()
        for action in actions:
            getattr(self, "_" + action.name.lower())()

    def _take_event(self, event: Event, reason: str = "") -> tuple[Action, ...]:
        actions = self._tally.event(event, reason)
        self._act(actions)
        return actions

    def _start_store(self, then: Callable[[], None]) -> None:
        """On a thread of its own: torch asks the name server about each address, which can take seconds."""
        self._store_coming, self._when_store_comes = self._pool.submit(start_store, self._address), then

    def _take_store(self) -> None:
        """At every poll: go on when the store has come."""
        if self._store_coming is None or not self._store_coming.done():
            return
        coming, self._store_coming = self._store_coming, None
        if (error := coming.exception()) is None:
            self._store = coming.result()
            self._when_store_comes()
        elif self._tally.phase is Phase.PREPARING:
            self._take_event(Event.MEMBER_FAILED, f"no store can be served at {self._address}: {error}")
        else:
            self._end_job(f"no store can be served at {self._address}: {error}")

    def _drop_store(self) -> None:
        self._store = self._store_coming = None

    def _send_prepare(self) -> None:
        self._watch.set_deadline(self.options.prepare_deadline_s, "preparation")
        self._unconnected, self._cramped, self._may_be_closed, self._prepared = set(), set(), False, {}
        self._start_store(self._tell_to_prepare)

    def _tell_to_prepare(self) -> None:
        plan = self._tally.plan
        assert plan is not None and self._current is not None
        # all or none: joiners of one host run their shadow iterations together
        are_warm = all(pipeline_role(self.config, a.slot) in self._warm_roles.get(a.joiner, ())
                       for a in plan.assignments)
        self._to_members("PREPARE", arm=self._current.arm_name, plan=plan.to_json(), are_joiners_warm=are_warm,
                         generation=self._tally.generation + 1,
                         store=[self._address, self._store.port], timeout_s=self.options.prepare_deadline_s,
                         rests_s=self._all_rests_s())

    def _all_rests_s(self) -> float:
        """How long from now members may rest between groups: not at all where training stands still meanwhile."""
        assert self._current is not None
        if self._current.arm.stops_first:
            return 0.0
        furthest = max(self._positions.get(r, 0) for r in self._tally.roster.holders)
        num_left = self.options.last_iteration(self.config.iterations) - furthest
        return pacing.all_rests_s(self.options.prepare_deadline_s, num_left * min(self._times_s, default=0.0))

    def _propose_position(self) -> None:
        """Two iterations past the furthest slot, not before the one that was asked for, and not past another's hold.

        Where training waits for this move, there, again if it was refused: groups are connected later then.
        """
        assert self._current is not None
        self._drop_store()
        last, arm = self.options.last_iteration(self.config.iterations) - 1, self._current.arm
        before = self._tally.first_stop
        furthest = max(self._positions.get(r, 0) for r in self._tally.roster.holders)
        ahead = self._unconnected - self._cramped
        per_boundary = connects_per_boundary(len(ahead), connect_s=self._connect_s,
                                             iteration_s=median(self._times_s or (0.0,)))
        hold = self._current.hold
        if hold is not None and arm.last_position(hold) >= furthest:  # where training waits for this move
            position = arm.last_position(hold)
        else:
            position = min(max(furthest + 2 - (-len(ahead) // per_boundary), self._current.earliest), last)
            hold = self._schedule.next_hold(furthest)
            position = position if hold is None else min(position, arm.last_position(hold))
        connects = [] if arm.stops_first else spread_connects(ahead, furthest + 2, position, per_boundary)
        first_stop = min([arm.stop(position), *(boundary(at) for _, at in connects if at != position)])
        if before is not None and first_stop <= before:
            self._take_event(Event.JOB_ENDED, "training ends, or waits for another move, before this one could take "
                             "effect")
            return
        self._watch.set_deadline(self.options.switch_deadline_s, "agreeing on the position")
        self._tally.propose(position, first_stop)
        self._to_members("PROPOSE", position=position, connects=connects)

    def _send_switch(self) -> None:
        self._watch.clear_deadline()  # starts anew with the first arrival: until then everybody trains
        self._to_members("SWITCH", position=self._tally.position, room=bool(self._tally.rooms))

    def _send_park(self) -> None:
        self._may_be_closed = "lazy" in self._tally.rooms
        if self._may_be_closed:
            self._gate.close()  # an abort is another one now
        self._tell_to_park()

    def _tell_to_park(self) -> None:
        self._to_members("PARK")

    def _send_commit(self) -> None:
        assert self._move is not None
        if math.isnan(self._move.committed_s):  # else another controller has sent it before
            self._move.committed_s = self.timeline.clock()
        self._watch.set_deadline(self.options.switch_deadline_s, "the acknowledgement of the commit")
        self._to_members("COMMIT", release=self._hold_to_release())

    def _send_abort(self) -> None:
        assert self._current is not None
        self._drop_store()
        self._say(f"move {self._current.text} aborted: {self._tally.reason}")
        if self._may_be_closed:
            self._watch.set_deadline(self.options.prepare_deadline_s, "rebuilding closed communicators after the abort")
            self._start_store(lambda: self._tell_to_abort([self._address, self._store.port]))
        else:
            self._watch.set_deadline(self.options.switch_deadline_s, "the acknowledgement of the abort")
            self._tell_to_abort(None)

    def _tell_to_abort(self, store: list[Any] | None) -> None:
        """`store`: fresh, for members to meet at who closed their old communicators to make room for new ones."""
        self._to_members("ABORT", reason=self._tally.reason, release=self._hold_to_release(), store=store)

    def _retire_generation(self) -> None:
        self._to_members("RETIRE")

    def _finish_move(self) -> None:
        assert self._move is not None
        self._drop_store()
        self._watch.clear_deadline()
        self.world.urgent = False
        self._record.finish(self._move, self._tally)
        self._release(self._hold_to_release())
        self._current = self._move = None

    def _hold_to_release(self) -> int | None:
        hold = self._current.hold if self._current else None
        return None if self._schedule.is_held_for_another(hold) else hold

    def _release(self, hold: int | None) -> None:
        if hold is not None:
            self._broadcast("RELEASE", release=hold)

    def _queue_request(self) -> None:
        raise AssertionError("moves are only begun in phase TRAINING; until then the schedule keeps them")

    def _refuse_cancel(self) -> None:
        self._say(f"nothing to cancel: the job is in phase {self._tally.phase.value}")

    def _note_loss(self) -> None:
        """Already logged, by the one who noticed."""

    def _recount(self) -> None:
        self._act(self._tally.recount())

    def _fail_job(self) -> None:
        lost = (self._tally.phase is Phase.RECOVERING
                or not self._tally.roster.lost.isdisjoint(self._tally.roster.holders))
        self._end_job(self._tally.reason or "the job can't go on", requeue=self._can_go_on(lost))
