"""PREPARING: the prepare thread builds the next generation's communicators beside training.

One communicator at a time, in one order on all members. It lives only in PREPARING; a move that aborts meanwhile ends
its waits, since the controller drops the store they wait on.
"""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from migration.communicators.base import OPERATION_TIMEOUT_S
from migration.stores import connect_store
from migration.costs import longest_connect_s
from migration.move import Report
from migration.part import Part

if TYPE_CHECKING:
    from migration.member import Member


def start(member: Member, part: Part) -> None:
    """Start the prepare thread of `part`."""
    member.enter(part)
    part.prepare_thread = threading.Thread(target=_run, args=(member, part), name="prepare", daemon=True)
    part.prepare_thread.start()


def _run(member: Member, part: Part) -> None:
    try:
        old, new = _build(member, part)
        if part.role == "joiner":
            part.warm.wait()
            new = "a fault" if part.wrong_probe else new
        if not part.verdict:
            member.report(part, Report.PREPARED, [old, new], position=member.position,
                          connect=member.groups.unconnected if member.options.connect == "ahead" else [],
                          connect_s=longest_connect_s(member.groups), room=member.groups.room(part.plan.slots))
    except Exception as error:  # whatever it is, the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    finally:
        member.leave(part)


def _build(member: Member, part: Part) -> tuple[str | None, str | None]:
    """Stage 1 of every touched group this process is in, and of its pair. Returns (old, new) probe digests.

    Collective over each of these groups. A leaver has no new group, a joiner no old one: None.
    """
    groups, timeline, timeout_s = member.groups, member.timeline, part.prepare_timeout_s
    slots = part.plan.slots
    store = connect_store(part.store, timeout_s)
    old = None if part.role == "joiner" else groups.live_probe(slots)
    new = None
    if part.role == "leaver":
        groups.learn_switches(part.generation, store, slots, timeout_s)
    else:
        with timeline.span("prepare_groups", "PREPARING", **part.tags(member.generation)):
            new = groups.prepare(part.generation, store, slots, timeout_s)
    if part.role != "stayer":
        with timeline.span("prepare_pair", "PREPARING", **part.tags(member.generation)):
            # the joiner waits in it for the boundary, however far that is; what hangs there the controller aborts
            pair = groups.make_pair(f"g{part.generation}/pair{part.slot}", int(part.role == "joiner"))
            member.give_pair(part, pair)
            groups.prepare_pair(pair, store, timeout_s, OPERATION_TIMEOUT_S)
    return old, new
