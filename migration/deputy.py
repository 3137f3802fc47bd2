"""The deputy: a second process that has what the controller must not lose, before any of it takes effect. Pure.

Who it is, the controller's side (`Gate`: what follows from a state goes out once the deputy has it) and the deputy's
own (`Deputy`: what it keeps, and when it takes the controller's place). Both are turned by their control threads; what
is sent and what a state holds is succession.py's and role.py's. Times are monotonic seconds.

A deputy that was replaced may still take over, if it holds the controller for lost before it has heard of that. So a
new controller decides nothing before every process has told it how far the last one had come.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from migration.roster import Roster
from migration.watch import LONGEST_TICK_S, LOOK_AROUND_S

ANSWER_S = 3.0  # for the deputy to say that it has a state; a busy machine takes a second


def choose_deputy(roster: Roster, controller: int, unfit: Collection[int] = ()) -> int | None:
    """World rank of the controller's deputy, or None where no other process lives.

    On another host than the controller's, on one that stays, a spare: each where that can be had, in this order. Of
    several spares the last, which is the last to be given a slot; of others the first.
    """
    here = roster.hosts[controller]
    found = [rank for rank in range(len(roster.hosts))
             if rank not in roster.lost and rank != controller and rank not in unfit]
    return min(found, default=None, key=lambda rank: (
        roster.hosts[rank] == here, roster.hosts[rank] in roster.leaving, rank in roster.holders,
        rank if rank in roster.holders else -rank))


def is_fit(roster: Roster, controller: int, deputy: int, unfit: Collection[int]) -> bool:
    """Whether `deputy` can stay; false too where one has come up on another host, or on one that stays, at last."""
    best = choose_deputy(roster, controller, unfit)
    if best is None or deputy in roster.lost or deputy in unfit:
        return False

    def place(rank: int) -> tuple[bool, bool]:
        return roster.hosts[rank] == roster.hosts[controller], roster.hosts[rank] in roster.leaving

    return place(deputy) <= place(best)


class Gate:
    """What the controller says, in order. What is put after `close` waits until the deputy has the state as it is at
    the end of the controller's turn."""

    def __init__(self) -> None:
        self.deputy: int | None = None
        self.is_due = False  # a state is to be sent at the end of this turn
        self.number = 0  # of the last state that the deputy was sent, or is to be
        self._has = 0  # the last one that it has acknowledged
        self._sent_s = float("inf")
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def is_open(self) -> bool:
        """Whether the deputy, if there is one, has everything."""
        return self._has == self.number

    def put(self, act: Callable[[], None]) -> None:
        """Do it, or later."""
        if self.is_open:
            act()
        else:
            self._waiting.append((self.number, act))

    def close(self) -> None:
        """What the deputy has is no longer all that it must have."""
        if self.deputy is not None and not self.is_due:
            self.number += 1
            self.is_due = True

    def sent(self, now_s: float) -> None:
        """State `number` is on its way."""
        self.is_due, self._sent_s = False, now_s

    def answered(self, rank: int, number: int) -> bool:
        """A process has a state. Returns whether it is the deputy; what waited for it is done."""
        if rank != self.deputy:
            return False
        self._has = max(self._has, number)
        self._release()
        return True

    def is_overdue(self, now_s: float) -> bool:
        return not self.is_open and not self.is_due and now_s - self._sent_s > ANSWER_S

    def appoint(self, rank: int | None) -> None:
        """Another deputy, which has nothing yet; with None nothing waits any more."""
        self.deputy, self.is_due = rank, False
        if rank is not None:
            self.close()
            return
        self._has = self.number
        self._release()

    def _release(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._has:
            self._waiting.popleft()[1]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The controller is lost, as its deputy sees it. `heard_s`: when it was heard last."""

    rank: int
    term: int
    why: str
    has_died: bool
    heard_s: float
    state: dict[str, Any]


class Deputy:
    """A process's part as the deputy of others; most processes are nobody's. `rank`: its own."""

    def __init__(self, rank: int, heartbeat_timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, heartbeat_timeout_s
        self._state: dict[str, Any] | None = None
        self._controller = self._term = -1
        self._successor: int | None = None  # of the controller, if it is about to hand its role over
        self._heard_s = self._ticked_s = 0.0
        self._looked_s: float | None = None  # how long has been looked around since another process was in trouble
        self._gone: int | None = None

    def keep(self, record: dict[str, Any], now_s: float) -> int:
        """Keep the controller's state; returns how many moves that are over it tells of now.

        The record tells only of those from `num_known` on.
        """
        state, known = record["state"], record["num_known"]
        before = self._state["record"]["moves"][:known] if self._state is not None else []
        state["record"]["moves"] = before + state["record"]["moves"]
        self._state, self._controller, self._term = state, record["from"], record["term"]
        self._successor, self._gone = record["successor"], None
        self.hear(record, now_s)
        return len(state["record"]["moves"])

    def hear(self, record: dict[str, Any], now_s: float) -> None:
        """A controller's word. Of a newer term, or with another deputy's name: what is kept is nothing any more."""
        if record["term"] < self._term:
            return
        self._heard_s, self._looked_s = now_s, None
        is_another = record.get("deputy") not in (None, self._rank)
        if (record["term"] > self._term or is_another) and record["kind"] != "KEEP":
            self._state = None

    def doubt(self, rank: int, has_died: bool) -> None:
        """A process can't go on, or has seen the controller's process die. Which one that is, `rank` says."""
        if rank not in (self._controller, self._successor):
            return
        if has_died:
            self._gone = rank
        elif self._looked_s is None:
            self._looked_s = 0.0

    def look(self, now_s: float) -> Loss | None:
        """At every tick: is the controller lost?"""
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        if self._state is None:
            return None
        if passed_s > self._timeout_s / 2:  # this process itself stood still
            self._heard_s = now_s
        if self._looked_s is not None:
            self._looked_s += min(passed_s, LONGEST_TICK_S)
        silent_s = now_s - self._heard_s
        if self._gone is not None:
            return self._lose(self._gone, "its process has died, as a process beside it sees")
        rank = self._controller if self._successor is None else self._successor
        if self._looked_s is not None and self._looked_s > LOOK_AROUND_S and silent_s > LOOK_AROUND_S:
            return self._lose(rank, "it died or can't be reached, while another process can't go on")
        is_over = self._state["verdict"] is not None  # it may be writing the report of the run
        if silent_s > self._timeout_s and not is_over:
            return self._lose(rank, f"not heard for {silent_s:.1f} s")
        return None

    def _lose(self, rank: int, why: str) -> Loss:
        assert self._state is not None
        # a successor's own term would be the next one
        term = self._term + (2 if self._successor is not None else 1)
        loss = Loss(rank=rank, term=term, why=why, has_died=self._gone is not None, heard_s=self._heard_s,
                    state=self._state)
        self._state, self._gone, self._looked_s = None, None, None
        return loss
