"""SWITCHING: what stayers, leavers and joiners do between their stop and the verdict. The only downtime.

Runs on the training thread (a joiner's main thread). Whatever fails here is reported and waits for the verdict: before
the commit nothing may end the job. The way of a process through it is a row of spans in the log. What goes from leaver
to joiner is in hand_over.py.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from migration import hand_over, proof
from migration.follow import Follower
from migration.costs import log_costs, take_costs
from migration.move import Report
from migration.part import Part
from migration.transfer import patience_s
from migration.wire import Message

if TYPE_CHECKING:
    from migration.job import Job
    from migration.member import Member


def switch(member: Member, part: Part, job: Job, arrived_s: float) -> bool:
    """A stayer's or leaver's switchover. Returns False if this process has handed its slot over.

    Collective over the members of the move.
    """
    member.world.urgent = True  # only now: to be rung, or to poll fast, while all still train would slow them down
    member.tell("ARRIVED", move=part.number)
    num_bytes = 0
    if part.role == "leaver":
        member.apply_fault("LEAVING", part)
    try:
        with member.timeline.span("drain", "SWITCHING", **part.tags(member.generation)):
            job.check_drained()
        digest, old, new = None, None, None
        if part.role == "leaver":
            send = hand_over.send_at_cut if part.arm.cuts else hand_over.send_state
            digest, num_bytes = send(member, part, job)
        if _all_have_handed_over(member, part):
            old = _park(member, part)
            if part.role == "stayer" and not part.is_over:
                with member.timeline.span("activate", "SWITCHING", **part.tags(member.generation)):
                    new = member.groups.activate()
            if not part.is_over:
                member.report(part, Report.VERIFIED, digest, **_probes(old, new))
    except Exception as error:  # the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    if _wait_verdict(member, part) == "ABORT":
        with member.timeline.span("resume", "ABORTED", **part.tags(member.generation)):
            part.rebuilt = member.groups.resume(part.plan.slots, part.rebuild_store, part.prepare_timeout_s)
        member.leave(part)
        return True
    if part.role == "leaver":
        proof.compare_step(member, part, job)
    _commit(member, part, arrived_s, num_bytes)
    return part.role != "leaver"


def _park(member: Member, part: Part) -> str:
    """Returns the probes of the old communicators."""
    try:
        with member.timeline.span("park", "SWITCHING", **part.tags(member.generation)):
            return member.groups.park(part.plan.slots)
    finally:
        member.end_parking(part)


def connect_ahead(member: Member, part: Part, stop: int) -> None:
    """A stayer connects the new communicators that are due at `stop`, while the old ones stay in use; a leaver tells
    its joiner to.

    A stall, but no downtime: only these groups wait for each other. Collective over each.
    """
    names = part.due(stop)
    try:
        if part.role == "leaver":
            assert part.wire is not None
            part.wire.send("CONNECT", patience_s(0), names=names, iteration=stop // 2)
        else:
            connect(member, part, names, stop // 2)
    except Exception as error:  # the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    member.leave(part)


def connect(member: Member, part: Part, names: list[str], iteration: int) -> None:
    """Collective over each of these groups."""
    for name in names:
        with member.timeline.span("connect", "READY", **{**part.tags(member.generation), "iteration": iteration}):
            member.groups.connect([name])


def take_over(member: Member, part: Part, job: Job, follower: Follower, message: Message) -> bool:
    """A joiner's switchover, from its leaver's first message of it. Returns whether the slot is this process's now."""
    assert part.position is not None
    arrived_s = member.timeline.clock()
    member.world.urgent = True
    corrupt = member.apply_fault("SWITCHING", part) == "corrupt"
    receive = hand_over.receive_at_cut if part.arm.cuts else hand_over.receive_state
    digest = receive(member, part, job, follower, message, corrupt)
    if _all_have_handed_over(member, part) and not part.is_over:
        with member.timeline.span("activate", "SWITCHING", **part.tags(member.generation)):
            new = member.groups.activate()
        member.report(part, Report.VERIFIED, digest, **_probes(None, new))
    if _wait_verdict(member, part) == "ABORT":
        return False
    member.apply_fault("COMMITTED", part)
    _commit(member, part, arrived_s, 0)
    return True


def _probes(old: str | None, new: str | None) -> dict[str, list[str | None]]:
    """For the report, where communicators were probed only now."""
    return {"probes": [old or None, new or None]} if old or new else {}


def _all_have_handed_over(member: Member, part: Part) -> bool:
    """Where old communicators make room: wait until every member's transfers are complete, or the move is aborted.

    Parking is collective, so all must do it or none. Once the controller has said so to all, every member parks, also
    one that has heard of an abort since; and until then nobody has touched an old communicator.
    """
    if not part.makes_room:
        return True
    with member.timeline.span("wait_transfers", "SWITCHING", **part.tags(member.generation)):
        member.report(part, Report.HANDED_OVER)
        member.wait_for(lambda: part.may_park or part.verdict == "ABORT")
    return part.may_park


def _wait_verdict(member: Member, part: Part) -> str:
    """COMMIT or ABORT. Waits as long as it takes: only the controller decides."""
    with member.timeline.span("verdict", "SWITCHING", **part.tags(member.generation)):
        return member.wait_for(lambda: part.verdict if part.verdict in ("COMMIT", "ABORT") else "")


def _commit(member: Member, part: Part, arrived_s: float, num_bytes: int) -> None:
    """Go on in the new generation, in the slot or without one."""
    costs = take_costs(member.groups, member.groups.communicators)
    num_rebuilt, num_kept = member.groups.adopt() if part.role != "leaver" else (0, 0)
    member.world.urgent = False
    member.enter_generation(part)
    resumed_s = member.timeline.clock()
    member.timeline.add_span("switchover", "COMMITTED", arrived_s, resumed_s, bytes=num_bytes,
                             **part.tags(part.generation))
    member.report(part, Report.ACKNOWLEDGED, arrived_s=arrived_s, resumed_s=resumed_s, bytes=num_bytes,
                  groups=[num_rebuilt, num_kept], sums=member.groups.sums_digest())
    log_costs(member.timeline, costs, move=part.number, slot=part.slot)
