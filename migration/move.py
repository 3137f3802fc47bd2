"""One move as the controller sees it: who must report what, and what the tally means. Pure.

Sits between single reports of members and the events of protocol.py. A report that belongs to another move or an
earlier stage is late news and counts for nothing. Keeps the roster: one process per slot, always. A recovery, in which
every slot is built anew, ends the move under way.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from typing import Any

from migration.protocol import Action, Event, Machine, Phase
from migration.roster import MovePlan, Roster
from migration.sums import are_same


class Report(Enum):
    """What a member says of its part; the value in brackets."""

    PREPARED = "PREPARED"  # (old probe digest, new probe digest); None where there is none
    ACCEPTED = "ACCEPTED"  # the first stop of the proposal
    REFUSED = "REFUSED"  # the stop that it has passed
    HANDED_OVER = "HANDED_OVER"  # its transfers are complete; only in a move that makes room
    VERIFIED = "VERIFIED"  # digest of the state, of leavers and joiners; None of stayers
    ACKNOWLEDGED = "ACKNOWLEDGED"
    FAILED = "FAILED"  # the reason


_EXPECTED_IN = {Phase.PREPARING: {Report.PREPARED}, Phase.READY: {Report.ACCEPTED, Report.REFUSED},
                Phase.COMMITTED: {Report.ACKNOWLEDGED}, Phase.ABORTED: {Report.ACKNOWLEDGED}, Phase.TRAINING: set(),
                Phase.RECOVERING: set()}
_ALL = {Report.PREPARED: Event.ALL_PREPARED, Report.ACCEPTED: Event.ALL_ACCEPTED,
        Report.HANDED_OVER: Event.ALL_HANDED_OVER,
        Report.VERIFIED: Event.ALL_VERIFIED, Report.ACKNOWLEDGED: Event.ALL_ACKNOWLEDGED}


class MoveTally:
    """Roster, generation and phase of a job, and the tally of the move under way.

    Invariants: every slot has one holder; the generation grows by one at a commit and at the begin of a recovery, and
    never else; SWITCHING is only entered when every member has reported PREPARED and then ACCEPTED one position.
    """

    def __init__(self, roster: Roster, *, require_bitwise: bool = False, machine: Machine | None = None) -> None:
        self.roster = roster
        self.generation = 0
        self.number = -1  # of the move under way, or of the last one
        self.plan: MovePlan | None = None
        self.position: int | None = None
        self.first_stop: int | None = None  # of what was proposed
        self.bits_kept: bool | None = True  # None: it can't be told
        self.reason = ""
        self._require_bitwise = require_bitwise
        self._machine = machine or Machine()
        self.rooms: set[str] = set()  # how old communicators make room, by what members said: parked, lazy
        self._to_make_room = False  # SWITCHING, and not all have handed over
        self._waiting: set[int] = set()
        self._probes: dict[int, tuple[str | None, str | None]] = {}
        self._digests: dict[int, str | None] = {}

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    @property
    def members(self) -> set[int]:
        """World ranks in the move: every holder of a slot and the joiners."""
        assert self.plan is not None
        return (set(self._holders_before) | set(self.plan.joiners)) - self.roster.lost

    @property
    def waiting(self) -> list[int]:
        """World ranks that haven't reported yet, of those that must."""
        return sorted(self._waiting)

    def request(self, plan: MovePlan) -> tuple[Action, ...]:
        """Begin a move (TRAINING), or hear that it must be queued."""
        actions = self._machine.handle(Event.REQUESTED)
        if Action.SEND_PREPARE in actions:
            self.number += 1
            self.plan, self.position, self.reason, self.bits_kept = plan, None, "", True
            self.first_stop = None
            self._holders_before = self.roster.holders
            self._probes, self._digests, self.rooms = {}, {}, set()
            self._waiting = self.members
        return actions

    def propose(self, position: int, first_stop: int) -> None:
        """A (further) position was sent to everybody: their answers to an earlier one count for nothing.

        `first_stop`: the first stop (arms.py) at which something is to be done; a member that is past it refuses, so
        each proposal has a later one than those before it, and an answer says by it which one it speaks of.
        """
        self.position, self.first_stop = position, first_stop
        self._waiting = self.members

    def event(self, event: Event, reason: str = "") -> tuple[Action, ...]:
        """Take an event that isn't a tally: a cancel, a deadline, a loss, the end of the job."""
        before = self.phase
        actions = self._machine.handle(event)
        if self.phase is not before:
            self._enter(reason or event.value)
        if Action.FAIL_JOB in actions:
            self.reason = reason or event.value
        return actions

    def lose(self, world_rank: int, reason: str = "") -> tuple[Action, ...]:
        """A process without a slot is lost; `reason` says how that was noticed."""
        assert world_rank not in self.roster.holders, f"world rank {world_rank} holds a slot: see lose_slots"
        reason = reason or f"world rank {world_rank} on {self.roster.hosts[world_rank]} is lost"
        event = Event.SPARE_LOST
        if self.plan is not None and self.phase is not Phase.TRAINING and world_rank in self.plan.joiners:
            event = Event.JOINER_LOST
        self.roster = self.roster.without(world_rank)
        self._waiting.discard(world_rank)
        return self.event(event, reason)

    @property
    def recoverable(self) -> Roster:
        """Whom a recovery would begin with: a commit that not all have acknowledged is undone."""
        if self.phase is not Phase.COMMITTED:
            return self.roster
        return dataclasses.replace(self.roster, holders=self._holders_before)

    def lose_slots(self, world_ranks: Iterable[int], reason: str, plan: MovePlan | None) -> tuple[Action, ...]:
        """Processes that hold slots are lost. `plan`: the spares that take the slots of those lost, by `recoverable`;
        None: the job can't go on.
        """
        before, aborted_by = self.recoverable, self.reason if self.phase is Phase.ABORTED else ""
        for world_rank in world_ranks:
            before, self.roster = before.without(world_rank), self.roster.without(world_rank)
            self._waiting.discard(world_rank)
        if plan is None:
            return self.event(Event.SLOT_LOST, reason)
        actions = self.event(Event.SLOT_REPLACED, reason)
        self.reason = f"{aborted_by}; {reason}" if aborted_by else reason  # of the move under way, if there is one
        self.roster = before.replaced(plan)
        self.generation += 1
        self.plan, self.position, self._waiting = None, None, set()
        return actions

    def avoid(self, hosts: Iterable[str]) -> None:
        """Hosts that are to be left, as of now: no later move has a joiner there."""
        self.roster = self.roster.avoiding(hosts)

    def release(self, host: str) -> None:
        """The processes of a host without slots have been told to end; none of them is in a move."""
        assert self.phase is Phase.TRAINING, self.phase
        self.roster = self.roster.release(host)

    def recount(self) -> tuple[Action, ...]:
        """After a loss: perhaps nobody is waited for any more."""
        return self.event(Event.ALL_ACKNOWLEDGED) if not self._waiting else ()

    def report(self, report: Report, member: int, number: int, value: object = None,
               probes: tuple[str | None, str | None] | None = None, room: str = "") -> tuple[Action, ...]:
        """Take a member's report on move `number`; returns what to do.

        `probes`: (old, new) digests that came with VERIFIED, where communicators are probed only then. `room` comes
        with PREPARED: how its old communicators make room for the new ones; empty where they need not.
        """
        if number != self.number or self.plan is None:
            return ()
        if report is Report.FAILED:
            counts = self.phase is not Phase.TRAINING and member in self.members
            return self.event(Event.MEMBER_FAILED, str(value)) if counts else ()
        if report not in self._expected() or member not in self._waiting:
            return ()
        if report is Report.REFUSED:
            # several members may refuse one position; those that come after the next proposal don't speak of it
            return self.event(Event.POSITION_REFUSED) if value >= self.first_stop else ()
        if report is Report.ACCEPTED and value != self.first_stop:
            return ()
        if report is Report.PREPARED:
            self._probes[member] = value
            self.rooms.update({room} - {""})
        if report is Report.VERIFIED:
            self._digests[member] = value
            self._probes[member] = probes or self._probes[member]
        self._waiting.discard(member)
        return self._all_reported(report) if not self._waiting else ()

    def _expected(self) -> set[Report]:
        if self.phase is Phase.SWITCHING:
            return {Report.HANDED_OVER if self._to_make_room else Report.VERIFIED}
        return _EXPECTED_IN[self.phase]

    def _all_reported(self, report: Report) -> tuple[Action, ...]:
        if report is Report.HANDED_OVER:
            self._to_make_room, self._waiting = False, self.members
        if report in (Report.PREPARED, Report.VERIFIED):  # Gloo's are probed when prepared, NCCL's when connected
            found = self._compare_sums()
            different = [slot for slot, same in found.items() if same is False]
            if different:
                self.bits_kept = False
            elif None in found.values() and self.bits_kept:
                self.bits_kept = None
            if different and self._require_bitwise:
                return self.event(Event.DIGEST_DIFFERS,
                                  f"sums on the new communicators differ in their bits at slots {different}")
            if None in found.values() and self._require_bitwise:
                return self.event(Event.DIGEST_DIFFERS, "whether sums keep their bits can't be told before the first "
                                  "iteration has shown which communicators are used: move later")
        if report is Report.VERIFIED:
            for a in self.plan.assignments:
                if self._digests[a.leaver] != self._digests[a.joiner]:
                    return self.event(Event.DIGEST_DIFFERS,
                                      f"slot {a.slot}: the state has digest {self._digests[a.leaver]} at the leaver "
                                      f"(world rank {a.leaver}) and {self._digests[a.joiner]} at the joiner "
                                      f"(world rank {a.joiner})")
        return self.event(_ALL[report])

    def _compare_sums(self) -> dict[int, bool | None]:
        """By slot: whether they are the same, None if that can't be told."""
        old = {slot: self._probes[rank][0] for slot, rank in enumerate(self._holders_before)}
        new = {slot: self._probes[rank][1] for slot, rank in enumerate(self.roster.after(self.plan).holders)}
        return {slot: are_same(old[slot], new[slot]) for slot in old}

    # ---- for another controller

    def to_json(self) -> dict[str, Any]:
        value = {"roster": self.roster.to_json(), "generation": self.generation, "number": self.number,
                 "phase": self.phase.value, "plan": None, "reason": self.reason, "bits_kept": self.bits_kept}
        if self.plan is not None and self.phase not in (Phase.TRAINING, Phase.RECOVERING):
            value |= {"plan": self.plan.to_json(), "holders_before": self._holders_before, "position": self.position}
        return value

    def load_json(self, value: dict[str, Any]) -> None:
        """Where another controller's tally was. After a verdict its members must all acknowledge it once more.

        Before one it doesn't matter how far the move was, nor what members report once more, for none can be come to
        any more but an abort, or, if it turns out that members have heard one, that one: SWITCHING takes both.
        """
        self.roster, self.generation = Roster.from_json(value["roster"]), value["generation"]
        self.number, self.reason, self.bits_kept = value["number"], value["reason"], value["bits_kept"]
        phase = Phase(value["phase"])
        self._machine.phase = Phase.SWITCHING if phase in (Phase.PREPARING, Phase.READY) else phase
        if value["plan"] is not None:
            self.plan, self.position = MovePlan.from_json(value["plan"]), value["position"]
            self._holders_before = tuple(value["holders_before"])
            self._waiting = self.members if self.phase in (Phase.COMMITTED, Phase.ABORTED) else set()

    def _enter(self, reason: str) -> None:
        if self.phase is Phase.ABORTED:
            self.reason = reason
        if self.phase is Phase.COMMITTED:
            self.roster = self.roster.after(self.plan)
            self.generation += 1
        if self.phase not in (Phase.TRAINING, Phase.RECOVERING):
            self._waiting = self.members
        self._to_make_room = self.phase is Phase.SWITCHING and bool(self.rooms)
