"""A spare's life: wait without burning a core, warm up for a slot, take it over; or wait again if the move aborts.

Runs on the main thread of a process without a slot. The model is built and one shadow iteration run in a sandbox while
everybody else trains; its memory is filled with NaN before the leaver's state comes in.
"""
from __future__ import annotations

import time

from migration import device, preparation, state, switchover, warmup
from migration.check_measure import measure_figures
from migration.config import Config
from migration.data import Samples
from migration.follow import Follower
from migration.faults import SLOWDOWN
from migration.job import Job, close_job, open_groups
from migration.member import Member
from migration.part import Part
from migration.transfer import patience_s


def wait_for_slot(member: Member, config: Config, samples: Samples) -> Job:
    """Blocks until this process holds a slot; returns its job, about to start the iteration of the switchover.

    The process ends from the control thread when the run does.
    """
    warmup.warm_standby(member, config, samples)
    while True:
        part = member.wait_for(lambda: member.part if member.part and member.part.role == "joiner" else None)
        job = _join(member, part, config, samples)
        if job is not None:
            return job
        close_job(member.groups)
        member.leave(part)


def _join(member: Member, part: Part, config: Config, samples: Samples) -> Job | None:
    """The joiner's part in a move, from PREPARING to the verdict. Returns None if it aborted."""
    try:
        job = _warm_up(member, part, config, samples)
        part.warm.set()
        if member.wait_for(lambda: part.wire or part.verdict == "ABORT") is part.wire and _follow(member, part, job):
            return job
    except Exception as error:  # a joiner's trouble is never the job's: the move aborts
        member.report_failure(part, error)
    member.wait_for(lambda: part.verdict == "ABORT")
    part.warm.set()
    if part.prepare_thread is not None:
        part.prepare_thread.join()
    return None


def _follow(member: Member, part: Part, job: Job) -> bool:
    """Take what the leaver sends, up to the verdict. Returns whether the slot is this process's now."""
    assert part.wire is not None and part.pair is not None
    follower = Follower(job=job, pair=part.pair, wire=part.wire, omit=frozenset(member.options.omit_state),
                        connect=lambda names, iteration: switchover.connect(member, part, names, iteration))
    part.wire.send("GO", patience_s(0))
    with member.timeline.span("follow", "PREPARING", **part.tags(member.generation)) as span:
        message = follower.follow()
        span.bytes = follower.num_bytes
    return switchover.take_over(member, part, job, follower, message)


def _measure(member: Member, part: Part, slowdown: int) -> None:
    """Once more, since the start of the run is long ago: the controller compares it with the leaver."""
    if member.figures is not None:
        with member.timeline.span("accept", "PREPARING", **part.tags(member.generation)):
            member.figures = measure_figures(device.current_device(), slowdown=slowdown,
                                             is_shared=member.figures.device == "shared GPU")


def _warm_up(member: Member, part: Part, config: Config, samples: Samples) -> Job:
    """Build the slot's job and pay for its first iteration, beside training. Returns it filled with NaN."""
    started_s = time.monotonic()
    tags = part.tags(member.generation)
    with member.timeline.span("open_groups", "PREPARING", **tags):
        open_groups(config, part.slot, member.groups)
    if part.arm.warms_up:
        part.among_joiners = warmup.find_groups_among_joiners(member, part)
    preparation.start(member, part)
    fault = member.apply_fault("PREPARING", part)
    part.wrong_probe = fault == "corrupt"
    _measure(member, part, slowdown=SLOWDOWN if fault == "slow" else 1)
    with member.timeline.span("build", "PREPARING", **tags):
        job = Job(config, part.slot, member.groups, samples)
    if part.arm.warms_up:
        warmup.warm_up(member, part, job)
    while time.monotonic() - started_s < member.options.slow_joiner_s and not part.verdict:
        time.sleep(0.01)
    with member.timeline.span("poison", "PREPARING", **tags):
        state.poison(job)
    return job
