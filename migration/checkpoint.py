"""The state of the whole job to Megatron's distributed checkpoint and back, bit for bit.

Model and optimizer go the way that Megatron-Core's users know (`dist_checkpointing` with sharded state dicts, format
torch_dist). It doesn't hold everything that state_kinds.py lists: random generators and Megatron's RNG streams, data
position, scheduler, step counts, values of the parameter groups, overlap bookkeeping, cached answers, history. These
values go along as one sharded object per slot. Where the files lie and when they count is checkpoint_writing.py's.

Knows nothing of moves: whoever holds the slots at the boundary saves them, through the same process groups.
"""
from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from migration import checkpoint_files, checkpoint_writing, digest, internals, state
from migration.errors import StateMismatch, UserError

if TYPE_CHECKING:
    from migration.job import Job
    from migration.options import Options

_SLOT_KEY = "migrator.slot"
_log = logging.getLogger(__name__)


def check(job: Job) -> None:
    """Raises UserError for a job that Megatron's distributed checkpoint can't hold."""
    if internals.has_empty_bucket(job.optimizer):
        raise UserError(f"--checkpoints: slot {job.slot} has no share of one of the distributed optimizer's buckets, "
                        f"which Megatron can't save; set a larger bucket_size than {job.config.bucket_size}, or 0")


def save(job: Job, options: Options, versions: dict[str, str], check: Callable[[], None] = lambda: None,
         num_recoveries: int = 0) -> tuple[Path, int]:
    """Save the job before the iteration that it is at. Returns the folder and the bytes in it, on slot 0; else 0.

    `num_recoveries`: that this run has come through, the same on every slot.
    `check` is called before it counts, and raises if collectives may have been aborted: on a GPU they raise nothing,
    and another slot may not have written.
    Collective over the job. Nothing of the state changes but parameters whose gathering was still to come. Raises
    UserError if the files can't be written.
    """
    path = checkpoint_writing.unfinished_path(options.checkpoints, job.iteration, options.run, num_recoveries)
    try:
        if job.slot == 0:
            checkpoint_writing.begin(path)
        dist.barrier()
        _write(job, path, with_digests=options.checkpoint_digests)
        if options.slow_checkpoint_s:
            time.sleep(options.slow_checkpoint_s)
        num_bytes = 0
        check()
        if job.slot == 0:
            path = checkpoint_writing.finish(path, iteration=job.iteration, config=job.config, versions=versions,
                                             data=job.cursor.samples.source.digest, keep=options.keep_checkpoints)
            num_bytes = sum(checkpoint_files.read_manifest(path).files.values())
        dist.barrier()  # nobody goes on, or ends, before it counts
        return path, num_bytes
    except (OSError, CheckpointException) as error:
        if isinstance(reason := _reason(error), OSError):
            raise UserError(f"--checkpoints {path}: can't be written: {reason}") from error
        raise


def _write(job: Job, path: Path, *, with_digests: bool) -> None:
    from megatron.core import dist_checkpointing
    job.finish()
    own = state.capture(job)
    values = {"iteration": job.iteration, "values": own.values, "digests": state.digests(own) if with_digests else {},
              "digest_version": digest.VERSION}
    dist_checkpointing.save(_sharded(job, values, is_loading=False), str(path),
                            sharded_strategy=internals.build_save_strategy())


@torch.no_grad()  # the distributed optimizer's fp32 shards are views of parameters, and Megatron copies into them
def load(job: Job, folder: str) -> None:
    """Fill `job` with what was saved; it is then before the saved iteration. Collective over the job.

    Raises UserError if the files can't be read, StateMismatch if what came back has other bits than were saved.
    """
    from megatron.core import dist_checkpointing
    keys = internals.param_group_keys(job.optimizer)
    for _, chunk in _chunks(job):
        for buffer in internals.param_buffers(chunk):
            buffer.zero_()  # as Megatron makes it: what pads it isn't in the checkpoint, nor changed by training
    try:
        loaded = dist_checkpointing.load(_sharded(job, None, is_loading=True), folder)
    except (Exception, CheckpointException) as error:  # they raise many kinds for files that aren't what they were
        reason = _reason(error)
        raise UserError(f"{folder}: can't be read: {type(reason).__name__}: {str(reason).partition(chr(10))[0]}"
                        ) from error
    for name, chunk in _chunks(job):
        chunk.module.load_state_dict(loaded[name])
    internals.add_lost_steps(loaded["optimizer"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    internals.undo_load_side_effects(job.optimizer, keys)
    saved = json.loads(loaded[_SLOT_KEY])
    state.apply_values(job, saved["values"])
    job.iteration = saved["iteration"]
    if saved["digests"]:
        _compare_digests(job, folder, saved)


def _compare_digests(job: Job, folder: str, saved: dict[str, Any]) -> None:
    version = saved.get("digest_version", 1)
    if version != digest.VERSION:  # saved by another state of this code
        _log.warning(f"slot {job.slot}: {folder} has digests of version {version}, here they are of version "
                     f"{digest.VERSION}: what came back is not compared")
    elif wrong := _differing(saved["digests"], state.digests(state.capture(job))):
        raise StateMismatch(f"slot {job.slot}: {folder} didn't come back bit for bit: {', '.join(wrong)}")


def _differing(saved: dict[str, str], found: dict[str, str]) -> list[str]:
    return sorted(kind for kind in saved.keys() | found.keys() if saved.get(kind) != found.get(kind))


def _sharded(job: Job, values: dict[str, Any] | None, *, is_loading: bool) -> dict[str, Any]:
    """What goes over, by name: Megatron's sharded state dicts, and this slot's values as text."""
    from megatron.core.dist_checkpointing import ShardedObject
    metadata = internals.checkpoint_metadata()
    sharded: dict[str, Any] = {name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(job)}
    model = {"model": sharded["model0"]} if len(sharded) == 1 else dict(sharded)
    sharded["optimizer"] = job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    text = None if values is None else json.dumps(values)
    internals.clip_padding(sharded["optimizer"])
    sharded[_SLOT_KEY] = ShardedObject(_SLOT_KEY, text, (job.config.job_size,), (job.slot,))
    return sharded


def _chunks(job: Job) -> list[tuple[str, Any]]:
    return [(f"model{i}", chunk) for i, chunk in enumerate(job.chunks)]


def _reason(error: BaseException) -> BaseException:
    """What went wrong, where torch reports the failures of all ranks: that of the first one."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return failures[min(failures)][0] if failures else error
