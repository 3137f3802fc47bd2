"""A job of four slots and a move of two of them, brought to any phase by reports of members with nothing wrong."""
from __future__ import annotations

from collections.abc import Iterable

from migration.move import MoveTally, Report
from migration.protocol import Action, Event, Phase
from migration.roster import Assignment, MovePlan, Roster

# hosts a, b with slots 0..3, hosts c, d with spares 4..7; slots 2 and 3 move from b to c
ROSTER = Roster(hosts=("a", "a", "b", "b", "c", "c", "d", "d"), holders=(0, 1, 2, 3))
PLAN = MovePlan(assignments=(Assignment(slot=2, leaver=2, joiner=4), Assignment(slot=3, leaver=3, joiner=5)))
BACK = MovePlan(assignments=(Assignment(slot=2, leaver=4, joiner=2), Assignment(slot=3, leaver=5, joiner=3)))
STAYERS, LEAVERS, JOINERS = (0, 1), (2, 3), (4, 5)
MEMBERS = STAYERS + LEAVERS + JOINERS
OUTSIDERS = (6, 7)
POSITION = 12
BEFORE_COMMIT = (Phase.PREPARING, Phase.READY, Phase.SWITCHING)


def tally(**options: object) -> MoveTally:
    return MoveTally(ROSTER, **options)


def probes(member: int, new: str = "sum") -> tuple[str | None, str | None]:
    """What a member says with PREPARED: the digest on the old communicators, and on the new ones."""
    return (None if member in JOINERS else "sum", None if member in LEAVERS else new)


def digest(member: int) -> str | None:
    """What a member says with VERIFIED: the digest of its slot's state; stayers have nothing to compare."""
    return None if member in STAYERS else f"state of slot {member - 2 if member in JOINERS else member}"


def say(move: MoveTally, report: Report, member: int, **fields: str) -> tuple[Action, ...]:
    """`report` as a member with nothing wrong sends it."""
    values = {Report.PREPARED: probes(member), Report.ACCEPTED: move.first_stop, Report.VERIFIED: digest(member)}
    return move.report(report, member, move.number, values.get(report), **fields)


def deliver(move: MoveTally, report: Report, members: Iterable[int] = MEMBERS) -> tuple[Action, ...]:
    """`report` from each of `members`; all but the last must lead to nothing. Returns what the last leads to."""
    *first, last = members
    for member in first:
        assert say(move, report, member) == ()
    return say(move, report, last)


def advance_to(phase: Phase, **options: object) -> MoveTally:
    """A tally whose first move has come to `phase`."""
    move = tally(**options)
    if phase is Phase.TRAINING:
        return move
    if phase is Phase.RECOVERING:
        move.lose_slots([7], "a process that held a slot before", MovePlan(assignments=()))
        move.roster = ROSTER
        return move
    assert move.request(PLAN) == (Action.SEND_PREPARE,)
    if phase is Phase.PREPARING:
        return move
    assert deliver(move, Report.PREPARED) == (Action.PROPOSE_POSITION,)
    move.propose(POSITION, 2 * POSITION)
    if phase is Phase.READY:
        return move
    assert deliver(move, Report.ACCEPTED) == (Action.SEND_SWITCH,)
    if phase is Phase.SWITCHING:
        return move
    if phase is Phase.ABORTED:
        move.event(Event.CANCELLED)
        return move
    assert deliver(move, Report.VERIFIED) == (Action.SEND_COMMIT,)
    return move
