"""What goes from a leaver to its joiner inside the pause: the whole state at a boundary, or what is left of it at the
cut. Both sides return a digest; the controller compares them before it commits.

At a boundary: manifest and values over the wire, then every tensor from where it lies to where it belongs. At the cut:
the state has gone already (leader.py, follow.py), the reduced gradients of the own shard for the most part too, and
parameters come with the optimizer's step.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from migration import gradients, internals, state, transfer
from migration.follow import Follower
from migration.leader import join_stream
from migration.part import Part
from migration.wire import Message

if TYPE_CHECKING:
    from migration.job import Job
    from migration.member import Member

_JOIN_S = 30.0  # for the stream thread to end, at the cut


# ---- at a boundary


def send_state(member: Member, part: Part, job: Job) -> tuple[str, int]:
    """The leaver's side at a boundary. Returns its digest and the bytes sent. Collective over the pair."""
    assert part.pair is not None and part.wire is not None
    own = state.capture(job, frozenset(member.options.omit_state))
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        span.bytes = transfer.send_state(part.pair, part.wire, own)
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        return state.combined(state.digests(own)), span.bytes


def receive_state(member: Member, part: Part, job: Job, _follower: Follower, message: Message, corrupt: bool) -> str:
    """The joiner's side at a boundary. Returns the digest of what it reads back. Collective over the pair.

    Raises StateMismatch if names, dtypes or shapes differ.
    """
    assert part.pair is not None and part.position is not None
    omit = frozenset(member.options.omit_state)
    own = state.capture(job, omit)
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        span.bytes = transfer.receive_state(part.pair, message, own)
    with member.timeline.span("apply", "SWITCHING", **part.tags(member.generation)):
        state.apply_values(job, message["values"], omit)
        job.iteration = part.position
        if corrupt:
            _flip_a_bit(transfer.all_tensors(own)[0])
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        return state.combined(state.digests(state.capture(job, omit)))


# ---- at the cut


def send_at_cut(member: Member, part: Part, job: Job) -> tuple[str, int]:
    """The leaver's side at the cut. Returns its digest and the bytes sent in the pause. Collective over the pair."""
    assert part.pair is not None and part.wire is not None and part.sender is not None and part.position is not None
    with member.timeline.span("join_stream", "SWITCHING", **part.tags(member.generation)):
        whole, ranges = join_stream(part, part.arm.stop(part.position), _JOIN_S).rest()
    omit = frozenset(member.options.omit_state)
    own = gradients.capture_rest(job, omit)
    losses = [float(loss).hex() for loss in job.micro_losses or ()]
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        # one message and one transfer: every turn that a process has to wait for lengthens the pause
        span.bytes = part.wire.send("CUT", transfer.patience_s(0), whole=whole, ranges=ranges, losses=losses,
                                    manifest=own.manifest(), values=own.values)
        span.bytes += transfer.send_tensors(part.pair, [*_gradients(job, whole, ranges, omit),
                                                        *transfer.all_tensors(own)])
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        return _digest_at_cut(job, part.sender.state_digest, own, losses, omit), span.bytes


def _gradients(job: Job, whole: list[str], ranges: list[Any], omit: frozenset[str]) -> list[torch.Tensor]:
    return [] if gradients.KIND in omit else gradients.select(job, whole, ranges)


def receive_at_cut(member: Member, part: Part, job: Job, follower: Follower, message: Message, corrupt: bool) -> str:
    """The joiner's side at the cut. Returns the digest of what it holds. Collective over the pair.

    Raises StateMismatch if names, dtypes or shapes differ.
    """
    assert part.pair is not None and part.position is not None
    omit = frozenset(member.options.omit_state)
    own = gradients.capture_rest(job, omit)
    transfer.check(message["manifest"], own)
    with member.timeline.span("apply", "SWITCHING", **part.tags(member.generation)):  # while the bytes are on their way
        state.apply_values(job, message["values"], omit | gradients.KINDS_OF_STREAM)
    with member.timeline.span("transfer", "SWITCHING", **part.tags(member.generation)) as span:
        span.bytes = transfer.receive_tensors(part.pair, [*_gradients(job, message["whole"], message["ranges"], omit),
                                                          *transfer.all_tensors(own)])
    with member.timeline.span("apply", "SWITCHING", **part.tags(member.generation)):
        internals.prepare_for_step(job.chunks)
        job.iteration = part.position - 1
        job.micro_losses = [torch.tensor(float.fromhex(text), device=job.device) for text in message["losses"]]
        if corrupt:
            _flip_a_bit(next(iter(internals.gradient_shards(job.chunks).values())))
    with member.timeline.span("digest", "SWITCHING", **part.tags(member.generation)):
        own = gradients.capture_rest(job, omit)
        return _digest_at_cut(job, follower.state_digest, own, message["losses"], omit)


def _digest_at_cut(job: Job, streamed: str, own: state.State, losses: list[str], omit: frozenset[str]) -> str:
    found = {**state.digests(own), "streamed": streamed, "losses": " ".join(losses)}
    if gradients.KIND not in omit:
        found[gradients.KIND] = gradients.digest_gradients(job)
    return state.combined(found)


@torch.no_grad()
def _flip_a_bit(tensor: torch.Tensor) -> None:
    """A fault: one bit of what was received is wrong."""
    state.as_bytes(tensor)[0] ^= 1
