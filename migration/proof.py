"""`--leaver-steps`: proof that a joiner's step at the cut is, bit for bit, the one that its leaver would have taken.

After the commit the leaver takes the step too, alone, with the gradient norm that the joiner's step has found, and the
digests of everything that the optimizer steps are compared. It costs time inside the pause: for tests.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from migration import gradients, internals
from migration.errors import StateMismatch
from migration.part import Part
from migration.stream import build_batches
from migration.transfer import patience_s

if TYPE_CHECKING:
    from migration.job import Job
    from migration.member import Member

_STEP_S = 60.0


def tell_step(member: Member, part: Part, job: Job) -> None:
    """The joiner at its first stop after the switchover: what its step has made of the state."""
    part.is_proven = True
    if member.options.leaver_steps and part.arm.cuts:
        assert part.wire is not None
        digest = gradients.digest_stream(build_batches(job, frozenset()))
        part.wire.send("STEPPED", patience_s(0), stepped=job.stepped, grad_norm=job.grad_norm.hex(), digest=digest)


def compare_step(member: Member, part: Part, job: Job) -> None:
    """The leaver, whose slot is another's now. Raises StateMismatch where the bits differ."""
    if not member.options.leaver_steps or not part.arm.cuts:
        return
    assert part.wire is not None
    message = part.wire.receive(_STEP_S)
    member.groups.isolate()
    internals.step_alone(job.optimizer, job.config.clip_grad, float.fromhex(message["grad_norm"]), message["stepped"])
    own = gradients.digest_stream(build_batches(job, frozenset()))
    if own != message["digest"]:
        raise StateMismatch(f"slot {part.slot}, move {part.number}: the step before iteration {part.position} gave "
                            f"{message['digest'][:16]} at the joiner and would have given {own[:16]} at the leaver")
    member.timeline.add_event("proof", f"slot {part.slot}: the step before iteration {part.position} is equal on "
                              f"leaver and joiner: {own[:16]}", part.number)
