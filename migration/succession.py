"""How the controller's role comes to another process: kept at a deputy all along, handed over when its host is left.

The controller's part: who its deputy is, what the deputy must have before anything that follows from it is said
(`_state`), and the planned hand-over. takeover.py is what the next controller does after a loss, deputy.py the pure
half of both. Control thread only.
"""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from migration.deputy import choose_deputy, is_fit
from migration.faults import Faults
from migration.leaving import Leaving
from migration.protocol import Phase
from migration.record import MoveRecord
from migration.recovery import Recovery
from migration.roster import choose_successor
from migration.schedule import Pending
from migration.stopping import Stop, Stopping
from migration.world import Record

_FORGIVE_S = 30.0  # before a process that didn't answer may be the deputy again


class Succession(Recovery, Stopping, Leaving):
    """What outlives the controller's process."""

    def __init__(self, *, step_down: Callable[[str], None], faults: Faults, **fields: Any) -> None:
        """`step_down(text)` ends this process; `faults`: those of this process."""
        super().__init__(**fields)
        self._step_down, self._faults = step_down, faults
        self._heard: dict[int, int] = {}  # by world rank: number of the last lasting record (told.py)
        self._moves_known = 0  # that the deputy has the end of
        self._told_deputy: int | None = None  # as everybody has been told
        self._unfit: dict[int, float] = {}  # world ranks that didn't answer, and when
        self._resigns = False  # the deputy is told, or about to be, of the successor
        self._dies = False  # by a fault, at the deputy's next answer

    # ---- the deputy

    def _look_after_deputy(self, now_s: float) -> None:
        """At every turn: there is one as soon as the job could go on without this process, and it answers."""
        roster, deputy = self._tally.roster, self._gate.deputy
        if not self._has_begun:
            return
        if self._gate.is_overdue(now_s):
            assert deputy is not None
            self._unfit[deputy] = now_s
            self._tell_of_deputy(f"world rank {deputy} on {roster.hosts[deputy]} doesn't answer, and is replaced as "
                                 "the controller's deputy")
        self._unfit = {rank: since_s for rank, since_s in self._unfit.items() if now_s - since_s < _FORGIVE_S}
        unfit = self._unfit.keys() | self._suspects.keys()
        if deputy is not None and is_fit(roster, self.world.rank, deputy, unfit):
            return
        chosen = choose_deputy(roster, self.world.rank, unfit)
        if chosen is None and deputy is None:
            return
        self._moves_known, self._told_deputy = 0, None
        self._tell_of_deputy("no process can be the controller's deputy: its loss would end the job" if chosen is None
                             else f"world rank {chosen} on {roster.hosts[chosen]} is the controller's deputy")
        self._gate.appoint(chosen)

    def _tell_of_deputy(self, text: str) -> None:
        self.timeline.add_event("deputy", text)

    def _send_due_state(self, now_s: float) -> None:
        """At the end of every turn."""
        if not self._gate.is_due:
            return
        if self._tally.phase in (Phase.COMMITTED, Phase.ABORTED) and self._take_fault("VERDICT"):
            self._dies = True
        self._resigns = self._resigns and self.successor is not None
        self.world.send(self._gate.deputy, {
            "kind": "KEEP", "from": self.world.rank, "term": self.term, "number": self._gate.number,
            "num_known": self._moves_known, "successor": self.successor if self._resigns else None,
            "state": self._state(self._moves_known)})
        self._gate.sent(now_s)

    def _take_fault(self, phase: str) -> bool:
        """Whether one is due that kills the controller; the deputy's next state tells of it."""
        for slot in self._tally.plan.slots if self._tally.plan is not None else ():
            if (fault := self._faults.take(phase, slot, self._tally.number)) is not None:
                self._record.fault({"text": fault.text, "fault": fault.kind, "slot": fault.slot, "phase": fault.phase,
                                    "from": self.world.rank})
                return True
        return False

    def _tell_to_park(self) -> None:
        if not self._take_fault("PARKING"):
            super()._tell_to_park()
            return
        self._send(min(self._tally.members), "PARK", move=self._tally.number)
        self._gate.put(self._die_when_answered)

    def _die_when_answered(self) -> None:
        """A turn after what has been sent, so that it has gone."""
        self._dies = True
        self._gate.close()

    def _on_kept(self, record: Record) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._gate.answered(record["from"], record["number"]):
            self._moves_known = record["num_moves"]
            if self._told_deputy != self._gate.deputy:  # only now: until then it could do nothing
                self._told_deputy = self._gate.deputy
                self._beat(range(self.world.size))

    def _beat(self, ranks: Iterable[int]) -> None:
        """That the controller lives. Waits for nobody."""
        for rank in ranks:
            if rank not in self._tally.roster.lost and rank not in self._dead:
                self.world.send(rank, {"kind": "BEAT", "term": self.term, "deputy": self._told_deputy})

    def _hurry_deputy(self) -> None:
        """A verdict is near, in the pause."""
        if self._gate.deputy is not None:
            self.world.send(self._gate.deputy, {"kind": "HURRY", "term": self.term})

    def _is_new(self, record: Record) -> bool:
        """False for a lasting record (told.py) that has come before, by another way."""
        number = record.get("told", 0)
        if 0 < number <= self._heard.get(record["from"], 0):
            return False
        if number:
            self._heard[record["from"]] = number
        return True

    # ---- what is kept

    def _state(self, num_known: int) -> dict[str, Any]:
        """All that another controller can't ask for. Of the moves that are over those from `num_known` on."""
        return {"tally": self._tally.to_json(), "record": self._record.to_json(num_known),
                "schedule": self._schedule.to_json(), "departures": self._departures.to_json(),
                "stop": None if self._stop is None else [self._stop.requeue, self._stop.iteration, self._stop.agreed],
                "current": None if self._current is None else asdict(self._current),
                "move": None if self._move is None else self._move.to_json(), "may_be_closed": self._may_be_closed,
                "positions": list(self._positions.items()), "finished": sorted(self._finished),
                "times_s": list(self._times_s), "heard": list(self._heard.items()), "verdict": self._verdict,
                "sums": self._sums.to_json(), "begins_at": self._begins_at, "to_settle": sorted(self._to_settle)}

    def _load(self, state: dict[str, Any]) -> None:
        self._tally.load_json(state["tally"])
        self._record.load_json(state["record"])
        self._schedule.load_json(state["schedule"])
        self._departures.load_json(state["departures"])
        if state["stop"] is not None:
            requeue, iteration, agreed = state["stop"]
            self._stop = Stop(requeue=requeue, iteration=iteration if agreed else None, agreed=agreed)
        self._current = None if state["current"] is None else Pending(**state["current"])
        self._move = None if state["move"] is None else MoveRecord.from_json(state["move"], self.term)
        self._may_be_closed, self._verdict = state["may_be_closed"], state["verdict"]
        self._positions = {rank: position for rank, position in state["positions"]}
        self._finished = set(state["finished"])
        self._times_s.extend(state["times_s"])
        self._heard = {rank: number for rank, number in state["heard"]}
        self._sums.load_json(state["sums"])
        # in a recovery who has started isn't known: it begins once more
        self._started = set() if self._tally.phase is Phase.RECOVERING else set(self._tally.roster.holders)
        self._faults.forget({fault["text"] for fault in self._record.faults})

    # ---- handed over

    def _finish_move(self) -> None:
        super()._finish_move()
        self._leave_vacated_host()

    def _note_iteration(self, rank: int) -> None:
        was_recovering = self._recovery is not None
        super()._note_iteration(rank)
        # not before: a successor wouldn't know what the recovery waits for; a move under way looks at it at its end
        if was_recovering and self._recovery is None and self._tally.phase is Phase.TRAINING:
            self._leave_vacated_host()

    def _leave_vacated_host(self) -> None:
        """This process's host may be given back, or was left because a process was lost there: the role leaves it."""
        roster, host = self._tally.roster, self._tally.roster.hosts[self.world.rank]
        if host in roster.vacated and not roster.slots_on(host):
            self.successor = choose_successor(roster)

    def can_resign(self) -> bool:
        """Whether the deputy, if there is one, knows of the successor; it is told."""
        if not self._resigns:
            self._resigns = True
            self._gate.close()
            self._send_due_state(time.monotonic())
        return self._gate.is_open

    def resign(self) -> None:
        """Hand the role to `successor`, with all that it must know, under the next term."""
        assert self.successor is not None
        self._server.close()
        self._stop_watch()
        self.world.send(self.successor, {"kind": "INHERIT", "term": self.term + 1, "state": self._state(0)})

    def inherit(self, state: dict[str, Any]) -> None:
        """Go on where the last controller resigned, and tell everybody."""
        self._load(state)
        # told to who resigned, it is passed on; after a takeover nobody would tell it again, and nothing waits for it
        self._begins_at, self._to_settle = state["begins_at"], set(state["to_settle"])
        self.timeline.add_event("controller", f"world rank {self.world.rank} is the controller, term {self.term}")
        self._tell_controller()
        self._repeat_verdict(was_committed=False)  # the last one's may come after this, and isn't listened to then

    def _tell_controller(self) -> None:
        """Everybody says in return where it stands, and once more what this controller may not know of."""
        holds = self._schedule.holds | ({self._current.hold} if self._current is not None else set()) - {None}
        for rank in range(self.world.size):
            if rank not in self._tally.roster.lost:
                self._send(rank, "CONTROLLER", controller=self.world.rank, holds=sorted(holds),
                           heard=self._heard.get(rank, 0))

    def _on_standing(self, record: Record) -> None:
        if record["slot"] is not None:
            self._positions[record["from"]] = max(record["position"], 0)
