"""Joiners of one move communicate for real before it is committed, where no other process is in the group.

A job of two slots on ranks 0 and 1 moves to ranks 2 and 3: every group of it is among the joiners.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from four_ranks import WAIT_S, Background, new_store, wait_until, world
from tiny_jobs import open_job, shared_groups, tiny_config

from migration.communicators.recorded import RecordingGroup
from migration.errors import MoveFailed, WarmUpMismatch
from migration.groups import Groups
from migration.job import Job
from migration.recording import Recorder, Recording
from migration.warmup import compare, run_shadow

pytestmark = pytest.mark.fast

CONFIG = {"tp": 2}
SLOTS = (0, 1)
MIB = 1 << 20


@pytest.fixture
def job() -> Iterator[Job]:
    """Of slot rank % 2, in a sandbox."""
    with open_job(tiny_config(**CONFIG), world().rank % 2) as made:
        yield made
    groups = shared_groups()
    wait_until(lambda: groups.num_communicators <= 1, "communicators to close")


def build(groups: Groups, generation: int, ranks: tuple[int, int]) -> list[str]:
    """Stage 1 on `ranks`, the groups among joiners first. Returns their names. Collective over the world."""
    server, store = new_store()
    names: list[str] = []
    if world().rank in ranks:
        names = groups.within(SLOTS)
        first_done = threading.Event()
        groups.prepare(generation, store, SLOTS, WAIT_S, first=names, when_first=first_done.set)
        assert first_done.is_set() and names
    world().barrier()
    del server
    return names


def record_on_real_groups(job: Job) -> Recording:
    """The leavers' first iteration. Collective over ranks 0 and 1."""
    job.groups.activate()
    job.groups.adopt()
    recorder = Recorder(job.slot, 64 * MIB)
    with job.groups.replaced(lambda handle: RecordingGroup(handle, handle.inner, recorder)):
        job.tie_embeddings()
        result = job.run_iteration()
    return recorder.finish(result.loss, result.grad_norm)


def record_and_prepare(job: Job) -> tuple[Recording, list[str]]:
    """The leavers train and record; then the joiners' groups are prepared. Returns this slot's recording, and their
    names. Collective over the world."""
    build(job.groups, 0, (0, 1))
    recording = record_on_real_groups(job) if world().rank < 2 else None
    mine = world().allgather(recording)[job.slot]
    return mine, build(job.groups, 1, (2, 3))


def test_joiners_repeat_what_the_leavers_did_over_groups_of_their_own(job: Job) -> None:
    comm = world()
    mine, names = record_and_prepare(job)
    if comm.rank >= 2:
        before = {name: handle.inner for name, handle in job.groups.handles.items()}
        real = job.groups.connect_among_joiners(names)
        assert set(real) == set(names)
        # no answers in the recording: what comes back can only come from the other joiner
        emptied = replace(mine, answers=tuple(tuple(replace(a, kept=b"") for a in answers)
                                                             for answers in mine.answers))
        result = run_shadow(job, emptied, real, lambda: False)
        assert result.loss.hex() == mine.loss and result.grad_norm.hex() == mine.grad_norm
        assert {name: handle.inner for name, handle in job.groups.handles.items()} == before, "not before the commit"
        assert "in part" in compare(emptied, result, must_be_equal=True)
        job.groups.activate()
        job.groups.adopt()
        total = torch.tensor([10.0 ** job.slot], device=job.device)
        dist.all_reduce(total)
        assert total.item() == 11.0, "the same communicators serve the next generation"
    comm.barrier()


def test_a_joiner_that_gives_up_leaves_nobody_waiting(job: Job) -> None:
    """Rank 2 makes another call than recorded and stops; rank 3 waits for it until the move's abort."""
    comm = world()
    mine, names = record_and_prepare(job)
    if comm.rank >= 2:
        real = job.groups.connect_among_joiners(names)
        other = replace(mine, calls=(replace(mine.calls[0], operation="barrier"), *mine.calls[1:]))
        shadow = Background(lambda: run_shadow(job, other if comm.rank == 2 else mine, real, lambda: False))
        if comm.rank == 2:
            shadow.join(WAIT_S)
            assert isinstance(shadow.error, WarmUpMismatch)
        comm.sendrecv(None, dest=5 - comm.rank, source=5 - comm.rank)  # rank 2 has stopped
        assert comm.rank == 2 or shadow.is_alive(), "rank 3 can't have come through alone"
        job.groups.abort_next()
        shadow.join(WAIT_S)
        assert not shadow.is_alive() and shadow.error is not None
        job.groups.discard()
    comm.barrier()


def test_groups_with_another_member_are_not_among_joiners(job: Job) -> None:
    assert job.groups.within((0,)) == [] and job.groups.within((0, 1)) == job.groups.within((0, 1, 7)) != []
    with pytest.raises(MoveFailed, match="was not prepared"):
        job.groups.connect_among_joiners(job.groups.within(SLOTS))
