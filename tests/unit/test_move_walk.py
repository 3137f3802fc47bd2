"""A seeded random walk over the tally of moves: whatever comes in whatever order, the invariants hold.

Most events are what a well-behaved member would say, since pure noise would never come past PREPARING; the rest are
reports of anybody on anything, cancels, deadlines, losses, requests and events that can't come.
"""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from migration.errors import IllegalEvent
from migration.move import MoveTally, Report
from migration.plan import plan_recovery
from migration.protocol import TABLE, Action, Event, Machine, Phase
from migration.roster import Assignment, MovePlan, Roster

NUM_EVENTS = 10_000
NUM_SLOTS, NUM_PROCESSES = 4, 10
NOT_A_TALLY = (Event.CANCELLED, Event.DEADLINE_EXPIRED, Event.JOB_ENDED)
USUAL = {Phase.PREPARING: Report.PREPARED, Phase.READY: Report.ACCEPTED, Phase.SWITCHING: Report.VERIFIED,
         Phase.COMMITTED: Report.ACKNOWLEDGED, Phase.ABORTED: Report.ACKNOWLEDGED}
BEFORE_COMMIT = (Phase.PREPARING, Phase.READY, Phase.SWITCHING)


@dataclass(slots=True, kw_only=True)
class Heard:
    """The walk's own account of the move under way, kept without looking into the tally."""

    holders: tuple[int, ...] = ()
    members: set[int] = field(default_factory=set)
    prepared: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)
    handed_over: set[int] = field(default_factory=set)
    told_to_park: bool = False
    verified: dict[int, object] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ()  # leaver, joiner


class Walk:
    """Feeds random events into a MoveTally and checks the invariants after each. `counts` says what came about."""

    def __init__(self, seed: int, table: dict = TABLE) -> None:
        self.random = random.Random(seed)
        self.table = table
        self.counts: Counter[str] = Counter()
        self.start_job()

    def start_job(self) -> None:
        roster = Roster(hosts=tuple("aabbccddee"), holders=tuple(range(NUM_SLOTS)))
        self.tally = MoveTally(roster, require_bitwise=self.random.random() < 0.5, machine=Machine(self.table))
        self.heard = Heard()
        self.recovered_by: MovePlan | None = None

    def snapshot(self) -> dict[str, object]:
        """Everything the tally holds, by value."""
        shown = {name: repr(value) for name, value in vars(self.tally).items() if name != "_machine"}
        return {**shown, "phase": self.tally.phase}

    def step(self) -> None:
        """One event, then the invariants."""
        if not self.tally.roster.spares():
            self.start_job()
        before, phase, generation = self.snapshot(), self.tally.phase, self.tally.generation
        make = self.random.choices((self.usual, self.noise, self.event, self.lose, self.request),
                                   (80, 12, 3, 1, 4))[0]
        try:
            actions = make()
        except IllegalEvent:
            self.counts["illegal"] += 1
            assert self.snapshot() == before, "an illegal event changed something"
            return
        self.check(phase, generation)
        self.carry_out(actions)

    def carry_out(self, actions: tuple[Action, ...]) -> None:
        self.counts.update(action.name for action in actions)
        if Action.FAIL_JOB in actions:
            self.start_job()
        elif Action.SEND_RECOVER in actions:
            self.heard = Heard()
        elif Action.PROPOSE_POSITION in actions:
            self.heard.accepted.clear()
            position = (self.tally.position or 0) + self.random.randint(1, 3)
            self.tally.propose(position, 2 * position)
        elif Action.SEND_PARK in actions:
            alive = self.heard.members - self.tally.roster.lost
            assert self.tally.rooms and self.heard.handed_over >= alive, "parked before all had handed over"
            self.heard.told_to_park = True
        elif Action.RECOUNT in actions:
            phase, generation = self.tally.phase, self.tally.generation
            more = self.tally.recount()
            self.check(phase, generation)
            self.carry_out(more)

    # ---- what can come

    def usual(self) -> tuple[Action, ...]:
        """A member that is waited for says what it should."""
        if self.tally.phase is Phase.TRAINING:
            return self.request()
        if self.tally.phase is Phase.RECOVERING:
            return self.tally.event(Event.ALL_RECOVERED)
        if not self.tally.waiting:
            return ()
        member, report = self.random.choice(self.tally.waiting), USUAL[self.tally.phase]
        if report is Report.VERIFIED and self.tally.rooms and not self.heard.told_to_park:
            report = Report.HANDED_OVER
        values = {Report.PREPARED: ("sum", "sum"), Report.ACCEPTED: self.tally.first_stop, Report.VERIFIED: "state"}
        return self.report(report, member, self.tally.number, values.get(report))

    def noise(self) -> tuple[Action, ...]:
        """Anybody says anything about any move."""
        report = self.random.choices(list(Report), [0.2 if r is Report.FAILED else 1.0 for r in Report])[0]
        stop = self.random.randint(0, 2) + (self.tally.first_stop or 0)
        value = {Report.PREPARED: (self.random.choice("xy"), self.random.choice("xy")), Report.ACCEPTED: stop,
                 Report.REFUSED: stop}.get(report, self.random.choice("xy"))
        number = self.tally.number + self.random.choice((-1, 0, 0, 0, 1))
        return self.report(report, self.random.randrange(NUM_PROCESSES), number, value)

    def report(self, report: Report, member: int, number: int, value: object) -> tuple[Action, ...]:
        if number == self.tally.number and member in self.heard.members:
            if report is Report.PREPARED and self.tally.phase is Phase.PREPARING:
                self.heard.prepared.add(member)
            if report is Report.ACCEPTED and self.tally.phase is Phase.READY and value == self.tally.first_stop:
                self.heard.accepted[member] = value
            if report is Report.VERIFIED and self.tally.phase is Phase.SWITCHING:
                if self.heard.told_to_park or not self.tally.rooms:
                    self.heard.verified.setdefault(member, value)
            if report is Report.HANDED_OVER and self.tally.phase is Phase.SWITCHING:
                self.heard.handed_over.add(member)
        room = self.random.choice(("parked", "lazy", *[""] * 18)) if report is Report.PREPARED else ""
        return self.tally.report(report, member, number, value, room=room)

    def event(self) -> tuple[Action, ...]:
        """One that needs no tally, or one that can't come now."""
        impossible = [e for e in Event if (self.tally.phase, e) not in self.table]
        return self.tally.event(self.random.choice((*NOT_A_TALLY, *impossible)), "the walk")

    def lose(self) -> tuple[Action, ...]:
        """Where it holds a slot, another one that does may be lost with it; spares may be too few, or not be used."""
        roster = self.tally.roster
        lost = self.random.choice([r for r in range(NUM_PROCESSES) if r not in roster.lost])
        if lost not in roster.holders:
            return self.tally.lose(lost)
        several = {lost, self.random.choice(roster.holders)} - roster.lost
        left = self.tally.recoverable
        for rank in several:
            left = left.without(rank)
        self.recovered_by = plan_recovery(left) if self.random.random() < 0.9 else None
        return self.tally.lose_slots(several, "the walk", self.recovered_by)

    def request(self) -> tuple[Action, ...]:
        """A plan that can be carried out as things stand."""
        spares = list(self.tally.roster.spares())
        self.random.shuffle(spares)
        slots = sorted(self.random.sample(range(NUM_SLOTS), self.random.randint(1, min(NUM_SLOTS, len(spares)))))
        plan = MovePlan(assignments=tuple(
            Assignment(slot=slot, leaver=self.tally.roster.holders[slot], joiner=joiner)
            for slot, joiner in zip(slots, spares)))
        if self.tally.phase is Phase.TRAINING:
            holders = self.tally.roster.holders
            self.heard = Heard(holders=holders, members={*holders, *plan.joiners},
                               pairs=tuple(zip(plan.leavers, plan.joiners)))
        return self.tally.request(plan)

    # ---- what must hold

    def check(self, phase: Phase, generation: int) -> None:
        tally, holders = self.tally, self.tally.roster.holders
        assert len(holders) == NUM_SLOTS and len(set(holders)) == NUM_SLOTS, f"not one owner per slot: {holders}"
        committed = phase is not Phase.COMMITTED and tally.phase is Phase.COMMITTED
        recovers, self.recovered_by = self.recovered_by is not None, None
        assert tally.generation == generation + committed + recovers, (
            "the generation is not the number of commits and recoveries")
        if recovers:
            assert tally.phase is Phase.RECOVERING, f"a recovery in {tally.phase.name}"
            assert tally.roster.lost.isdisjoint(holders), "a lost process has a slot"
            assert not tally.waiting and tally.plan is None, "a move goes on in a recovery"
        if committed:
            assert phase is Phase.SWITCHING, f"a commit out of {phase.name}"
            said = self.heard.verified
            assert set(said) >= self.heard.members - tally.roster.lost, "a commit before all had verified"
            assert all(said[a] == said[b] for a, b in self.heard.pairs), "a commit though digests differ"
            assert self.heard.told_to_park or not tally.rooms, "a commit without making room"
        if tally.phase in (*BEFORE_COMMIT, Phase.ABORTED):
            assert holders == self.heard.holders, "a slot changed hands before the commit"
        if tally.phase is Phase.SWITCHING and phase is not Phase.SWITCHING:
            alive = self.heard.members - tally.roster.lost
            assert self.heard.prepared >= alive, "a switch before all were prepared"
            assert set(self.heard.accepted) >= alive, "a switch before all had accepted"
            assert set(self.heard.accepted.values()) == {tally.first_stop}, "a switch at different positions"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_invariants_hold_on_a_random_walk(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(NUM_EVENTS):
        walk.step()
    # the walk must have gone everywhere, or it shows little
    assert set(walk.counts) >= {action.name for action in Action} | {"illegal"}
    assert walk.counts["SEND_COMMIT"] > 50 and walk.counts["SEND_ABORT"] > 50, walk.counts


def test_the_same_seed_gives_the_same_walk() -> None:
    walks = [Walk(4), Walk(4)]
    for walk in walks:
        for _ in range(1000):
            walk.step()
    assert walks[0].counts == walks[1].counts and walks[0].snapshot() == walks[1].snapshot()


# a row of the table, where it leads in a copy, and what the walk must then say
BROKEN = {
    "switch as soon as all are prepared": (Phase.PREPARING, Event.ALL_PREPARED, Phase.SWITCHING, "a switch before all"),
    "commit instead of a switch": (Phase.READY, Event.ALL_ACCEPTED, Phase.COMMITTED, "a commit out of READY"),
    "commit of a cancelled move": (Phase.SWITCHING, Event.CANCELLED, Phase.COMMITTED, "before all had verified"),
    "commit though digests differ": (Phase.SWITCHING, Event.DIGEST_DIFFERS, Phase.COMMITTED, "though digests differ"),
    "commit instead of parking": (Phase.SWITCHING, Event.ALL_HANDED_OVER, Phase.COMMITTED, "before all had verified"),
    "commit instead of a recovery": (Phase.PREPARING, Event.SLOT_REPLACED, Phase.COMMITTED, "a recovery in COMMITTED"),
    "commit after an abort": (Phase.ABORTED, Event.ALL_ACKNOWLEDGED, Phase.COMMITTED, "a commit out of ABORTED"),
}


@pytest.mark.parametrize("phase, event, after, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_table_is_caught(phase: Phase, event: Event, after: Phase, message: str) -> None:
    walk = Walk(2, {**TABLE, (phase, event): (after, TABLE[phase, event][1])})
    with pytest.raises(AssertionError, match=message):
        for _ in range(NUM_EVENTS):
            walk.step()
