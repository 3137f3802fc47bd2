"""A leaver's part in the stream of its state: when its threads send what, and what happens if the joiner fails.

The stream thread is the one that has built the leaver's pair; the training thread comes by at its stops. Nothing that
goes wrong here may hold training up for long or end it: it is reported, and the move aborts.
"""
from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from migration import gradients
from migration.arms import boundary
from migration.errors import MoveFailed
from migration.part import Part
from migration.stream import STREAM_PATIENCE_S, Sender
from migration.transfer import patience_s, send_tensors

if TYPE_CHECKING:
    from migration.member import Member

_POLL_S = 0.002  # for buckets whose reduction has ended


def stream_state(member: Member, part: Part) -> None:
    """The stream thread, PREPARING: send everything once. Returns when the joiner has it and only replays follow."""
    assert part.wire is not None and part.pair is not None
    with member.timeline.span("wait_joiner", "PREPARING", **part.tags(member.generation)):
        part.wire.receive(part.prepare_timeout_s)  # GO: it has warmed up
    options = member.options
    sender = Sender(job=member.job, pair=part.pair, wire=part.wire, omit=frozenset(options.omit_state),
                    limit_bytes_s=options.transfer_limit_bytes_s)
    with (member.timeline.span("stream", "PREPARING", **part.tags(member.generation)) as span,
          member.groups.background()):
        member.give(part, sender=sender)
        sender.run()
        span.bytes = sender.num_bytes


def finish_stream(member: Member, part: Part) -> None:
    """The stream thread, once the switchover is certain: in its iteration, everything that needn't wait for the pause.

    The digest of the state, which no step changes any more, and gradients bucket by bucket as their reduction ends.
    """
    sender = part.sender
    assert sender is not None and part.position is not None and part.wire is not None and part.pair is not None
    sender.wait_for_stop(boundary(part.position - 1))
    part.wire.send("FINAL", patience_s(0))
    with member.groups.background():
        _digest(member, part, sender)
        _send_reduced(member, part, sender)


def _digest(member: Member, part: Part, sender: Sender) -> None:
    with member.timeline.span("digest_state", "SWITCHING", **part.tags(member.generation)):
        sender.wait_for_step_before()
        sender.state_digest = gradients.digest_stream(sender.batches)


def _send_reduced(member: Member, part: Part, sender: Sender) -> None:
    sender.gradients = gradients.Parts(member.job)
    while not sender.at_cut and not sender.gradients.all_gone:
        sender.check()  # an abort ends it
        names = sender.gradients.take_reduced()
        if not names:
            time.sleep(_POLL_S)
            continue
        with member.timeline.span("gradients", "SWITCHING", **part.tags(member.generation)) as span:
            part.wire.send("GRADIENTS", patience_s(0), names=names)
            span.bytes = send_tensors(part.pair, gradients.select(member.job, names, []), STREAM_PATIENCE_S)


def follow_step(member: Member, part: Part | None) -> None:
    """The training thread at a stop: the gradients of the step just taken follow, then the stream may go on."""
    if part is None or part.sender is None or part.is_over:
        return
    try:
        replay = member.timeline.span("replay", "PREPARING", **part.tags(member.generation))
        with replay if part.sender.has_step_to_follow else nullcontext():
            part.sender.open()
    except Exception as error:  # the joiner's trouble: the controller decides, training goes on
        _give_up(member, part, error)


def hold_back(member: Member, part: Part) -> None:
    """The training thread before a step: no part of the state may be on its way."""
    assert part.sender is not None
    try:
        part.sender.hold_back()
    except Exception as error:  # likewise
        _give_up(member, part, error)


def _give_up(member: Member, part: Part, error: Exception) -> None:
    part.end_pair()
    member.report_failure(part, error)


def join_stream(part: Part, stop: int, timeout_s: float) -> gradients.Parts:
    """The training thread at the cut: the stream thread ends. Returns what is left to send.

    Raises MoveFailed if it has failed or doesn't end in `timeout_s`.
    """
    sender = part.sender
    assert sender is not None
    sender.at_cut = True
    sender.arrive(stop)
    if not part.stream_done.wait(timeout_s) or sender.gradients is None:
        raise MoveFailed("the stream of the state hasn't come to its end")
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # gradients are whole before they are sent
    return sender.gradients
