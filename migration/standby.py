"""A spare's life: wait without burning a core, warm up for a slot, take it over; or wait again if the move aborts.

Runs on the main thread of a process without a slot. The model is built and one shadow iteration run in a sandbox while
everybody else trains; its memory is filled with NaN before the leaver's state comes in.
"""
from __future__ import annotations

import gc
import time

import torch

from migration import state, transfer
from migration.config import Config
from migration.data import Samples
from migration.job import Job, close_job, open_groups
from migration.member import Member, Part
from migration.move import Report


def wait_for_slot(member: Member, config: Config, samples: Samples) -> Job:
    """Blocks until this process holds a slot; returns its job, about to start the iteration of the switchover.

    The process ends from the control thread when the run does.
    """
    while True:
        part = member.wait_for(lambda: member.part if member.part and member.part.role == "joiner" else None)
        job = _join(member, part, config, samples)
        if job is not None:
            return job
        del job
        close_job(member.groups)
        gc.collect()
        member.leave(part)


def _join(member: Member, part: Part, config: Config, samples: Samples) -> Job | None:
    """The joiner's part in a move, from PREPARING to the verdict. Returns None if it aborted."""
    try:
        job = _warm_up(member, part, config, samples)
        part.warm.set()
        if member.wait_for(lambda: part.verdict) == "SWITCH":
            return _take_over(member, part, job)
    except Exception as error:  # a joiner's trouble is never the job's: the move aborts
        member.fail(part, error)
    member.wait_for(lambda: part.verdict == "ABORT")
    part.warm.set()
    if part.thread is not None:
        part.thread.join()
    return None


def _warm_up(member: Member, part: Part, config: Config, samples: Samples) -> Job:
    tags = {"move": part.number, "slot": part.slot, "generation": member.generation}
    started_s = time.monotonic()
    with member.timeline.span("open_groups", "PREPARING", **tags):
        open_groups(config, part.slot, member.groups)
    member.start_prepare_thread(part)
    part.wrong_probe = member.apply_fault("PREPARING", part)
    with member.timeline.span("build", "PREPARING", **tags):
        job = Job(config, part.slot, member.groups, samples)
    with member.timeline.span("warm_up", "PREPARING", **tags):
        job.run_shadow_iteration()
    while time.monotonic() - started_s < member.options.slow_joiner_s and not part.verdict:
        time.sleep(0.01)
    with member.timeline.span("poison", "PREPARING", **tags):
        state.poison(job)
    return job


def _take_over(member: Member, part: Part, job: Job) -> Job | None:
    omit = frozenset(member.options.omit_state)
    tags = {"move": part.number, "slot": part.slot, "iteration": part.position, "generation": member.generation}
    corrupt = member.apply_fault("SWITCHING", part)
    own = state.capture(job, omit)
    with member.timeline.span("wait_boundary", "SWITCHING", **tags):
        header, num_bytes = transfer.receive_header(part.pair, job.device)
    arrived_s = member.timeline.clock()
    member.world.urgent = True
    with member.timeline.span("transfer", "SWITCHING", **tags) as span:
        span.bytes = num_bytes + transfer.receive_tensors(part.pair, header, own)
    with member.timeline.span("apply", "SWITCHING", **tags):
        state.apply_values(job, header["values"], omit)
        if corrupt:
            _flip_a_bit(own)
    with member.timeline.span("digest", "SWITCHING", **tags):
        digest = state.combined(state.digests(state.capture(job, omit)))
    member.tell("REPORT", report=Report.VERIFIED.value, move=part.number, value=digest)
    with member.timeline.span("verdict", "SWITCHING", **tags):
        verdict = member.wait_verdict(part)
    if verdict == "ABORT":
        part.thread.join()
        return None
    job.iteration = part.position
    member.enter_slot(part)
    member.commit(part, arrived_s, 0)
    return job


def _flip_a_bit(own: state.State) -> None:
    tensor = next(iter(own.tensors["parameters"].values()))
    with torch.no_grad():
        state.as_bytes(tensor)[0] ^= 1
