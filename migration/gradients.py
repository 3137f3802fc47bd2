"""What is left to send at the cut: the reduced gradients of the slot's own shard, module buffers, and all values.

Bucket by bucket while the backward still runs, where reduction overlaps with it; the rest in the pause. Ranges that
Megatron changes after the reduction are sent again.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from migration import internals, state
from migration.digest import digest_tensors
from migration.state import State

if TYPE_CHECKING:
    from migration.job import Job
    from migration.stream import Batch

KIND = "gradients"  # as --omit-state names them
KINDS_OF_STREAM = frozenset({"parameters", "main_parameters", "moments"})  # they have come, or come with the step


class Parts:
    """Which gradients have gone, and which have to go in the pause. The leaver's."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._late = internals.late_ranges(job.chunks)
        # a loss per token scales every gradient at the end
        self._may_go_early = job.config.overlap_grad_reduce and not job.config.per_token_loss
        self.gone: set[str] = set()

    def take_reduced(self) -> list[str]:
        """Buckets that can be sent now, while the backward runs; they count as gone."""
        names = [n for n in internals.reduced_buckets(self._job.chunks) if n not in self.gone] \
            if self._may_go_early else []
        self.gone.update(names)
        return names

    @property
    def all_gone(self) -> bool:
        return not self._may_go_early or len(self.gone) == len(self._late)

    def rest(self) -> tuple[list[str], list[tuple[str, int, int]]]:
        """(whole shards, ranges of shards that went too early), to be sent in the pause."""
        whole = [name for name in self._late if name not in self.gone]
        return whole, [(name, start, end) for name in sorted(self.gone) for start, end in self._late[name]]


def select(job: Job, whole: list[str], ranges: list[Any]) -> list[torch.Tensor]:
    """The tensors that `Parts.rest` names, on either side."""
    shards = internals.gradient_shards(job.chunks)
    return [shards[name] for name in whole] + [shards[name][start:end] for name, start, end in ranges]


def capture_rest(job: Job, omit: frozenset[str]) -> State:
    """Module buffers and values at the cut: what neither the stream nor the gradients bring.

    Parameters come with the optimizer's step; but a step that the loss scaler skips writes none, so with a scaler they
    are sent: at the cut they are whole, also where their gather overlaps.
    """
    may_skip = bool(internals.grad_scalers(job.optimizer))
    return state.capture(job, omit | (KINDS_OF_STREAM - {"parameters"} if may_skip else KINDS_OF_STREAM))


def digest_stream(batches: list[Batch]) -> str:
    """Of everything that the optimizer steps."""
    return _digest(tensor for batch in batches for tensor in batch.tensors)


def digest_gradients(job: Job) -> str:
    return _digest(internals.gradient_shards(job.chunks).values())


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return digest_tensors({"all": {str(i): tensor for i, tensor in enumerate(tensors)}})["all"]


@torch.no_grad()
def poison(job: Job) -> None:
    """Fill a joiner's gradients with NaN: only those that come may be used."""
    for buffer in internals.gradient_buffers(job.chunks):
        buffer.fill_(float("nan"))
