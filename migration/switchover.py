"""SWITCHING: what stayers, leavers and joiners do between the boundary and the verdict. The only downtime.

Runs on the training thread (a joiner's main thread). Whatever fails here is reported and waits for the verdict: before
the commit nothing may end the job. The way of a process through it is a row of spans in the log.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from migration import state, transfer
from migration.costs import log_costs, take_costs
from migration.move import Report
from migration.part import Part

if TYPE_CHECKING:
    from migration.job import Job
    from migration.member import Member


def switch(member: Member, part: Part, job: Job) -> bool:
    """A stayer's or leaver's switchover. Returns False if this process has handed its slot over.

    Collective over the members of the move.
    """
    arrived_s = member.timeline.clock()
    member.world.urgent = True  # only now: polling fast while everybody still trains would slow them down
    member.tell("ARRIVED", move=part.number)
    num_bytes = 0
    try:
        with member.timeline.span("drain", "SWITCHING", **part.tags(member.generation)):
            job.check_drained()
        digest, new = None, None
        if part.role == "leaver":
            digest, num_bytes = _hand_over(member, part, job)
        if _all_have_handed_over(member, part):
            with member.timeline.span("park", "SWITCHING", **part.tags(member.generation)):
                old = member.groups.park(part.plan.slots)
            if part.role == "stayer":
                with member.timeline.span("activate", "SWITCHING", **part.tags(member.generation)):
                    new = member.groups.activate()
            member.report(part, Report.VERIFIED, digest, **_probes(old, new))
    except Exception as error:  # the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    if _wait_verdict(member, part) == "ABORT":
        with member.timeline.span("resume", "ABORTED", **part.tags(member.generation)):
            part.rebuilt = member.groups.resume(part.plan.slots, part.rebuild_store, part.prepare_timeout_s)
        member.leave(part)
        return True
    _commit(member, part, arrived_s, num_bytes)
    return part.role != "leaver"


def connect_ahead(member: Member, part: Part, iteration: int) -> None:
    """A stayer connects the new communicators that are due before `iteration`, while the old ones stay in use.

    A stall, but no downtime: only these groups wait for each other. Collective over each.
    """
    try:
        _connect(member, part, part.due(iteration), iteration)
    except Exception as error:  # the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    member.leave(part)


def _connect(member: Member, part: Part, names: list[str], iteration: int) -> None:
    for name in names:
        with member.timeline.span("connect", "READY", **{**part.tags(member.generation), "iteration": iteration}):
            member.groups.connect([name])


def _hand_over(member: Member, part: Part, job: Job) -> tuple[str, int]:
    """The leaver's side of the transfer. Returns its digest and the bytes sent."""
    assert part.pair is not None
    own = state.capture(job, frozenset(member.options.omit_state))
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        span.bytes = transfer.send_state(part.pair, own, job.device)
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        return state.combined(state.digests(own)), span.bytes


def take_over(member: Member, part: Part, job: Job) -> bool:
    """A joiner's switchover: the leaver's state comes into `job`. Returns whether the slot is this process's now."""
    assert part.pair is not None and part.position is not None
    omit = frozenset(member.options.omit_state)
    corrupt = member.apply_fault("SWITCHING", part)
    own = state.capture(job, omit)
    for name, at in part.connects:
        if at != part.position:
            _connect(member, part, [name], at)
    with member.timeline.span("wait_boundary", "SWITCHING", **part.tags(member.generation)):
        header, num_bytes = transfer.receive_header(part.pair, job.device)
    arrived_s = member.timeline.clock()
    member.world.urgent = True
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        span.bytes = num_bytes + transfer.receive_tensors(part.pair, header, own)
    with member.timeline.span("apply", "SWITCHING", **part.tags(member.generation)):
        state.apply_values(job, header["values"], omit)
        if corrupt:
            _flip_a_bit(own)
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        digest = state.combined(state.digests(state.capture(job, omit)))
    if _all_have_handed_over(member, part):
        with member.timeline.span("activate", "SWITCHING", **part.tags(member.generation)):
            new = member.groups.activate()
        member.report(part, Report.VERIFIED, digest, **_probes(None, new))
    if _wait_verdict(member, part) == "ABORT":
        return False
    job.iteration = part.position
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
    costs = take_costs(member.groups)
    num_rebuilt, num_kept = member.groups.adopt() if part.role != "leaver" else (0, 0)
    member.world.urgent = False
    member.enter_generation(part)
    resumed_s = member.timeline.clock()
    member.timeline.add_span("switchover", "COMMITTED", arrived_s, resumed_s, bytes=num_bytes,
                             **part.tags(part.generation))
    member.report(part, Report.ACKNOWLEDGED, arrived_s=arrived_s, resumed_s=resumed_s, bytes=num_bytes,
                  groups=[num_rebuilt, num_kept])
    log_costs(member.timeline, costs, move=part.number, slot=part.slot)


def _flip_a_bit(own: state.State) -> None:
    """A fault: one bit of the received parameters is wrong."""
    tensor = next(iter(own.tensors["parameters"].values()))
    with torch.no_grad():
        state.as_bytes(tensor)[0] ^= 1
