"""Who this process is to the controller: the controller itself, its deputy, or one that hears it.

Sorts the records of the control thread by that, makes the controller when the role comes here, and ends the process
when its controller was held for lost and another one is in its place. What the roles do is controller.py's, deputy.py's
and member.py's.
"""
from __future__ import annotations

import time
from collections.abc import Callable

from migration.controller import Controller
from migration.deputy import Deputy, Loss
from migration.member import Member
from migration.roster import Roster
from migration.world import Record


class Role:
    """Of one process. Control thread only, but for the first controller."""

    def __init__(self, member: Member, make: Callable[[Roster, int], Controller]) -> None:
        """`make(roster, term)` makes a controller in this process."""
        self._member, self._world, self._make = member, member.world, make
        self._deputy = Deputy(member.world.rank, member.options.heartbeat_timeout_s)
        self._controller: Controller | None = None

    def begin(self, roster: Roster) -> None:
        """This process is the first controller."""
        self._controller = self._make(roster, 0)

    def step_down(self, text: str) -> None:
        """The controller is here, and may not be."""
        self._member.timeline.add_event("controller", text)
        self._member.end_process(text, 1)

    # ---- records in

    def on_record(self, record: Record) -> None:
        kind, term = record["kind"], record.get("term")
        if kind == "KEEP":
            self._keep(record)
        elif kind == "INHERIT":
            self._controller = self._make(Roster.from_json(record["state"]["tally"]["roster"]), record["term"])
            self._controller.inherit(record["state"])
        elif kind == "DOUBT":
            self._deputy.doubt(record["controller"], record["has_died"])
        elif term is not None:
            self._hear(record)
        elif self._controller is not None:
            self._controller.on_record(record)
        else:  # sent before the sender heard of the new controller
            self._world.send(self._member.controller, record)

    def _hear(self, record: Record) -> None:
        """A controller's word."""
        if self._controller is not None and record["term"] > self._controller.term:
            self.step_down(f"world rank {self._world.rank} was the controller, term {self._controller.term}, and was "
                           f"held for lost; there is another one, term {record['term']}: this process ends")
        if record["kind"] == "OUTDATED":
            return  # to a controller that has just handed its role over
        self._deputy.hear(record, time.monotonic())
        if record["kind"] == "HURRY":
            self._world.urgent = True
            self._world.hurry(True)
        else:
            self._member.on_record(record)

    def _keep(self, record: Record) -> None:
        """The controller's state. One of an older term is told that it isn't the controller any more."""
        if record["term"] < self._member.term:
            self._world.send(record["from"], {"kind": "OUTDATED", "term": self._member.term})
            return
        num_moves = self._deputy.keep(record, time.monotonic())
        self._world.send(record["from"], {"kind": "KEPT", "from": self._world.rank, "number": record["number"],
                                          "num_moves": num_moves})
        self._world.hurry(False)
        if self._member.part is None:
            self._world.urgent = False

    # ---- the clock

    def on_tick(self, now_s: float) -> None:
        if self._controller is not None:
            self._controller.on_tick(now_s)
            if self._controller.successor is not None and not self._controller.is_to_end:
                self._resign(self._controller, self._controller.successor)
        elif (loss := self._deputy.look(now_s)) is not None and not self._member.is_ending:
            self._take_over(loss)
        self._member.on_tick(now_s)

    def _resign(self, controller: Controller, successor: int) -> None:
        if controller.can_resign():
            self._member.controller = successor
            controller.resign()
            self._controller = None

    def _take_over(self, loss: Loss) -> None:
        self._member.term, self._member.controller = loss.term, self._world.rank
        self._controller = self._make(Roster.from_json(loss.state["tally"]["roster"]), loss.term)
        self._controller.take_over(loss)
