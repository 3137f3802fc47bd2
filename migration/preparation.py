"""PREPARING: the prepare thread builds the next generation's communicators beside training.

One communicator at a time, in one order on all members. It lives only in PREPARING, but for a leaver's, which goes on
to stream the state (leader.py). A move that aborts meanwhile, or a recovery, ends whatever it waits in: on the store
(`Groups.meeting`), in a communicator, for the other end of the pair (`Part.end_pair`).
"""
from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from migration import leader, pacing, usage, wire
from migration.check_measure import measure_pair, used_bytes
from migration.communicators.base import OPERATION_TIMEOUT_S, Communicator
from migration.costs import median_connect_s
from migration.errors import MoveFailed
from migration.move import Report
from migration.part import Part

if TYPE_CHECKING:
    from migration.member import Member

_CONNECT_S = 30.0  # both are known to be there


def start(member: Member, part: Part) -> None:
    """Start the prepare thread of `part`."""
    member.enter(part)
    part.prepare_thread = threading.Thread(target=_run, args=(member, part), name="prepare", daemon=True)
    part.prepare_thread.start()


def _run(member: Member, part: Part) -> None:
    try:
        if part.is_over:
            raise MoveFailed("the move was over before it was prepared here")
        old, new = _build(member, part)
        if part.role == "joiner":
            part.warm.wait()
            new = "a fault" if part.wrong_probe else new
        if part.role == "leaver" and part.arm.cuts:
            leader.stream_state(member, part)
        if not part.verdict:
            ahead = member.options.connect == "ahead" and not part.arm.stops_first
            member.report(part, Report.PREPARED, [old, new], position=member.position,
                          connect=member.groups.unconnected if ahead else [],
                          cramped=member.groups.without_room if ahead else [], figures=_figures(member, part),
                          connect_s=median_connect_s(member.groups), room=member.groups.room(part.plan.slots))
        if part.sender is not None and member.wait_for(lambda: part.verdict) == "SWITCH":
            leader.finish_stream(member, part)
    except Exception as error:  # whatever it is, the controller decides: the move aborts, training goes on
        member.report_failure(part, error)
    finally:
        part.among_joiners_prepared.set()
        part.stream_done.set()
        member.leave(part)


def _build(member: Member, part: Part) -> tuple[str | None, str | None]:
    """Stage 1 of every touched group this process is in, and of its pair. Returns (old, new) probe digests.

    Collective over each of these groups. A leaver has no new group, a joiner no old one: None.
    """
    with member.groups.meeting(part.store, part.prepare_timeout_s) as store:
        return _build_at(member, part, store)


def _build_at(member: Member, part: Part, store: Any) -> tuple[str | None, str | None]:
    groups, timeline, timeout_s = member.groups, member.timeline, part.prepare_timeout_s
    slots = part.plan.slots
    old = None if part.role == "joiner" else groups.live_probe(slots)
    new = None
    if part.role != "joiner":
        usage.tell(store, part.slot, groups.used)
    if part.role == "leaver":
        groups.learn_switches(part.generation, store, slots, timeout_s)
    else:
        with timeline.span("prepare_groups", "PREPARING", **part.tags(member.generation)):
            used = usage.ask(store, range(dist.get_world_size()), timeout_s)
            new = groups.prepare(part.generation, store, slots, timeout_s, used=used, first=part.among_joiners,
                                 when_first=part.among_joiners_prepared.set,
                                 after_each=lambda made, num_left: _after_group(member, part, made, num_left))
    if part.role != "stayer":
        with timeline.span("prepare_pair", "PREPARING", **part.tags(member.generation)):
            _build_pair(member, part, store)
    return old, new


def _after_group(member: Member, part: Part, communicator: Communicator, num_left: int) -> None:
    """A group is prepared: count it, and let training go on undisturbed for a while. A joiner doesn't train."""
    num_prepared = part.prepared[0] + 1
    part.prepared = num_prepared, num_prepared + num_left
    share = pacing.choose_share(member.options.prepare_share, member.groups.device.type)
    rest_s = pacing.rest_s(communicator.work_s, share, part.rests_until_s - time.monotonic(), num_left)
    if rest_s > 0 and part.role == "stayer":
        with communicator.measured("rest"):
            member.rest(part, rest_s)


def _build_pair(member: Member, part: Part, store: Any) -> None:
    """What leaver and joiner have between them: a communicator for bytes, a wire for words. Collective over the two.

    The communicator first: an abort ends the wait for it, and then both are there.
    """
    name, timeout_s, is_joiner = f"g{part.generation}/pair{part.slot}", part.prepare_timeout_s, part.role == "joiner"
    listener = wire.Listener(store, name, member.address) if is_joiner else None
    try:
        if listener:
            member.give(part, listener=listener)
        # the joiner waits in it for the boundary, however far that is; what hangs there the controller aborts
        pair = member.groups.make_pair(name, int(is_joiner))
        member.give(part, pair=pair)
        member.groups.prepare_pair(pair, store, timeout_s, OPERATION_TIMEOUT_S)
        if member.figures is not None:  # before anything else is sent over it
            with member.timeline.span("measure_pair", "PREPARING", **part.tags(member.generation)):
                part.bytes_per_s = measure_pair(pair, member.groups.device)
        connected = listener.accept(_CONNECT_S) if listener else wire.connect(store, name, _CONNECT_S)
        member.give(part, wire=connected)
    finally:
        if listener:
            listener.close()


def _figures(member: Member, part: Part) -> dict[str, object] | None:
    """What a joiner is accepted by: its own and its leaver's. None from stayers."""
    if member.figures is None or part.role == "stayer":
        return None
    if part.role == "leaver":
        return dataclasses.replace(member.figures, used_bytes=used_bytes(member.groups.device)).to_json()
    member.figures = dataclasses.replace(member.figures, bytes_per_s=part.bytes_per_s)
    return member.figures.to_json()
