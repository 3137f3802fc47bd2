"""Warm-up: the first iteration of a role is paid for before it counts, by an iteration in a sandbox.

A joiner runs it for its slot while everybody trains (`warm_up`), a spare for each pipeline role before any move is
asked for (`warm_standby`). Answers are made up or come from the slot's recorded first iteration; groups that have
joiners of one host only are real. Main thread of a process without a slot. Knows nothing of the switchover.
"""
from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from migration import device
from migration.communicators.recorded import ReplayGroup
from migration.config import Config
from migration.data import Samples
from migration.errors import DeadlineExpired, MoveFailed
from migration.job import IterationResult, Job, ShadowUnwanted, close_job, open_groups
from migration.part import Part
from migration.recording import Recording, Replay, load_recording, recording_path
from migration.topology import pipeline_role, slots_of_roles

if TYPE_CHECKING:
    from migration.member import Member

_LOOK_S = 0.02  # for a file that another process writes, perhaps on another host


def find_groups_among_joiners(member: Member, part: Part) -> tuple[str, ...]:
    """Names of the joiner's groups whose next members are all joiners on its host. Its handles must be open."""
    if not _is_shadow_wanted(member, part) or not member.options.joiner_traffic:
        return ()
    hosts = [hello["host"] for hello in member.world.hellos]
    here = [a.slot for a in part.plan.assignments if hosts[a.joiner] == hosts[member.world.rank]]
    return tuple(member.groups.within(here))


def warm_up(member: Member, part: Part, job: Job) -> None:
    """A joiner's shadow iteration, as --warm-up says. Collective over each of its groups among joiners.

    Raises MoveFailed: no recording came, a call differs from the recorded one, or (--require-bitwise) the loss does.
    """
    if not _is_shadow_wanted(member, part):
        if part.are_joiners_warm:
            member.timeline.add_event("warm_up", f"slot {part.slot}: every joiner has run its role in this process",
                                      part.number)
        return
    tags = part.tags(member.generation)

    def is_aborted() -> bool:
        return part.is_over

    recording = None
    if member.options.warm_up == "recorded":
        with member.timeline.span("read_recording", "PREPARING", **tags) as span:
            recording = _wait_for_recording(member, part.slot, part.prepare_timeout_s, is_aborted)
            span.bytes = recording.kept_bytes
    with member.timeline.span("wait_joiners", "PREPARING", **tags):
        real = _connect_among_joiners(member, part)
    with member.timeline.span("warm_up", "PREPARING", **tags):
        result = run_shadow(job, recording, real, is_aborted)
    member.warm_roles.add(pipeline_role(job.config, part.slot))
    if recording is not None:
        told = compare(recording, result, must_be_equal=member.options.require_bitwise)
        member.timeline.add_event("warm_up", told, part.number)


def _is_shadow_wanted(member: Member, part: Part) -> bool:
    """Not where it would pay for what these processes have paid for; but a recorded one compares arithmetic too."""
    mode = member.options.warm_up
    return mode == "recorded" or (mode == "synthetic" and not part.are_joiners_warm)


def run_shadow(job: Job, recording: Recording | None, real: dict[str, Any],
               is_unwanted: Callable[[], bool]) -> IterationResult:
    """One shadow iteration of a fresh job; groups named in `real` communicate through what stands there."""
    if recording is None:
        with job.groups.replaced(lambda handle: real.get(handle.name, handle.inner)):
            return job.run_shadow_iteration(is_unwanted)
    replay = Replay(recording)
    with job.groups.replaced(lambda handle: ReplayGroup(handle, replay, real.get(handle.name))):
        if recording.from_seeds:
            job.tie_embeddings()
        result = job.run_shadow_iteration(is_unwanted)
    replay.finish()
    return result


def compare(recording: Recording, result: IterationResult, *, must_be_equal: bool) -> str:
    """What the shadow iteration's figures say of this process's arithmetic, for the log.

    Raises MoveFailed if they `must_be_equal` and aren't, where they can be compared at all.
    """
    if not recording.is_whole or not recording.from_seeds:
        why = "answers were kept in part" if recording.from_seeds else "the run began from a checkpoint"
        return f"slot {recording.slot}: as recorded, call by call; figures can't be compared, since {why}"
    figures = f"loss {result.loss:.6f}, gradient norm {result.grad_norm:.6f}"
    if (result.loss.hex(), result.grad_norm.hex()) == (recording.loss, recording.grad_norm):
        return f"slot {recording.slot}: as recorded, call by call, and bit for bit the same {figures}"
    expected = f"{float.fromhex(recording.loss):.6f}, {float.fromhex(recording.grad_norm):.6f}"
    told = (f"slot {recording.slot}: the joiner's first iteration gave {figures}, the recorded one {expected}: its "
            "arithmetic has other bits")
    if must_be_equal:
        raise MoveFailed(told)
    return told


def _connect_among_joiners(member: Member, part: Part) -> dict[str, Any]:
    if not part.among_joiners:
        return {}
    if not part.among_joiners_prepared.wait(part.prepare_timeout_s):
        raise DeadlineExpired(f"slot {part.slot}: groups {list(part.among_joiners)} among the joiners of this host "
                              f"were not prepared in {part.prepare_timeout_s:g} s")
    return member.groups.connect_among_joiners(part.among_joiners)


def _wait_for_recording(member: Member, slot: int, timeout_s: float, is_unwanted: Callable[[], bool]) -> Recording:
    """The slot's recording, which comes with the end of the run's first iteration."""
    path, ends_s = recording_path(member.options.run, slot), time.monotonic() + timeout_s
    while not path.exists():
        if is_unwanted():
            raise ShadowUnwanted(f"slot {slot}: nobody waits for its recording any more")
        if time.monotonic() > ends_s:
            raise DeadlineExpired(f"slot {slot}: no recording of its first iteration in {path} within {timeout_s:g} s: "
                                  "its process's log says why; or use --warm-up synthetic")
        time.sleep(_LOOK_S)
    return load_recording(path)


# ---- a spare, before any move

def warm_standby(member: Member, config: Config, samples: Samples) -> None:
    """Run every pipeline role that this process hasn't run yet, one after the other, once the job trains.

    Each job is freed again; what stays are kernels, the allocator's memory and whatever is made at first use. A move
    that needs this process is not kept waiting for more than a micro-batch, or the building of one job. What fails here
    is logged and leaves the role cold: should a move need it, its own warm-up meets the same and aborts that move.
    """
    if not _is_warm_wanted(member):
        return
    member.wait_for(lambda: member.is_training or member.part is not None)
    for role, slot in slots_of_roles(config).items():
        if role in member.warm_roles:
            continue
        if member.part is not None or member.is_recovering:
            return
        try:
            _run_role(member, config, samples, slot)
            member.warm_roles.add(role)
        except ShadowUnwanted:
            return
        except Exception as error:
            member.timeline.add_event("error", f"standby, role {role}: {type(error).__name__}: {error}")
            member.timeline.add_event("traceback", traceback.format_exc()[-500:])
        finally:
            close_job(member.groups)


def _is_warm_wanted(member: Member) -> bool:
    wanted = member.options.standby
    return member.options.warm_up != "off" and (wanted == "warm" or (wanted == "auto" and not device.is_cpu()))


def _run_role(member: Member, config: Config, samples: Samples, slot: int) -> None:
    def is_needed() -> bool:
        return member.part is not None or member.is_recovering

    with member.timeline.span("standby", "TRAINING", slot=slot, generation=member.generation):
        open_groups(config, slot, member.groups)
        recording = None
        if member.options.warm_up == "recorded":
            recording = _wait_for_recording(member, slot, member.options.prepare_deadline_s, is_needed)
        run_shadow(Job(config, slot, member.groups, samples), recording, {}, is_needed)
