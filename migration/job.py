"""The training job of one slot: model, optimizer, data cursor, `run_iteration`. megatron-core unmodified.

Nothing here knows of moves; a joiner builds the same Job in a sandbox. preload.py must have run before this is
imported, since device.py has to be installed before megatron.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from migration import device
from migration.config import Config
from migration.data import DataCursor, Samples
from migration.groups import Groups


@dataclass(slots=True, kw_only=True)
class History:
    """Logging accumulators; they move with the slot."""

    loss_sum: float = 0.0
    num_losses: int = 0
    num_skipped: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "loss_sum": self.loss_sum.hex()}

    def load_json(self, value: dict[str, Any]) -> None:
        self.loss_sum = float.fromhex(value["loss_sum"])
        self.num_losses, self.num_skipped = value["num_losses"], value["num_skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """What one iteration gave. `loss` is NaN where the slot isn't on the last stage, `grad_norm` if there is none."""

    loss: float
    grad_norm: float
    skipped: bool


class ShadowUnwanted(Exception):
    """A shadow iteration was given up, since its process has something better to do."""


class Job:
    """One slot's share of the training job, between two iterations or inside one."""

    def __init__(self, config: Config, slot: int, groups: Groups, samples: Samples) -> None:
        """Builds the model. Needs no peers: the groups are in a sandbox until the caller adopts communicators."""
        from megatron.core import parallel_state

        from migration import model
        from migration.internals import create_adam_states
        self.config, self.slot, self.groups = config, slot, groups
        self.device = device.current_device()
        model.seed_everything(config)
        transformer = model.build_transformer_config(config)
        self.chunks = model.build_chunks(config, transformer, self.device)
        self.optimizer = model.build_optimizer(config, self.chunks)
        create_adam_states(self.optimizer)
        self.scheduler = model.build_scheduler(config, self.optimizer)
        model.connect(transformer, self.chunks, self.optimizer, config)
        self.cursor = DataCursor(samples, micro_batch_size=config.micro_batch_size,
                                 num_microbatches=config.num_microbatches, dp=config.dp,
                                 dp_rank=parallel_state.get_data_parallel_rank())
        self.iteration = 0
        self.micro_losses: list[torch.Tensor] | None = None  # of this slot's micro-batches, at the cut only
        self.grad_norm = float("nan")  # of the last step
        self.stepped = True  # whether the last step was taken, or skipped for an overflow
        self.history = History()
        self.before_forward: Callable[[], None] = lambda: None
        self._is_unwanted: Callable[[], bool] | None = None  # of a shadow iteration
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._data_group = parallel_state.get_data_parallel_group()
        self._mask = torch.triu(torch.ones(config.seq_length, config.seq_length, dtype=torch.bool,
                                           device=self.device), 1)[None, None]
        self._positions = torch.arange(config.seq_length, device=self.device)[None]

    def broadcast_parameters(self) -> None:
        """Same weights on all data-parallel replicas, at the start of a run. Collective over each such group."""
        for chunk in self.chunks:
            chunk.broadcast_params()

    def tie_embeddings(self) -> None:
        """Same weights in both copies of a tied embedding, on the first and the last stage, before the first iteration.

        What Megatron does when it builds, which here happens in a sandbox. Collective over each embedding group.
        """
        from migration import model
        if model.tie_embeddings(self.config, self.chunks):
            self.optimizer.reload_model_params()

    def run_iteration(self) -> IterationResult:
        """One optimizer step on the next global batch. Collective over the job."""
        self.compute_gradients()
        return self.take_step()

    def compute_gradients(self) -> None:
        """Forward and backward passes of the next global batch and the reduction of gradients. Collective over the job.

        Afterwards the job is at the cut: state, gradients and `micro_losses` are all that `take_step` reads.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [self._batches() for _ in self.chunks]
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step, data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.config.num_microbatches, seq_length=self.config.seq_length,
            micro_batch_size=self.config.micro_batch_size, forward_only=False)
        self.micro_losses = [row["loss"] for row in outputs] if self.is_last_stage else []

    def take_step(self) -> IterationResult:
        """The rest of the iteration, from the cut on. Collective over the job."""
        assert self.micro_losses is not None, "take_step follows compute_gradients"
        self.stepped, grad_norm, _ = self.optimizer.step()
        if self.stepped:
            self.scheduler.step(increment=self.config.global_batch_size)
        self.grad_norm = float("nan") if grad_norm is None else float(grad_norm)
        loss = self._mean_loss(self.micro_losses)
        self.micro_losses = None
        self.cursor.advance()
        self.iteration += 1
        self._remember(loss, self.stepped)
        return IterationResult(loss=loss, grad_norm=self.grad_norm, skipped=not self.stepped)

    def _batches(self) -> Any:
        for tokens in self.cursor.microbatches():
            yield torch.from_numpy(tokens).to(self.device)

    def _forward_step(self, iterator: Any, model: Any) -> Any:
        if self._is_unwanted is not None and self._is_unwanted():
            raise ShadowUnwanted(f"slot {self.slot}: the shadow iteration is not wanted any more")
        self.before_forward()
        tokens = next(iterator)
        positions = self._positions.expand(tokens.shape[0], -1)
        output = model(tokens[:, :-1], positions, self._mask, labels=tokens[:, 1:])

        def loss_func(losses: torch.Tensor) -> Any:
            loss = losses.float().mean()
            told = {"loss": loss.detach().clone()}  # the schedule divides `loss` in place
            if self.config.per_token_loss:
                num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=self.device)
                return losses.float().sum(), num_tokens, told
            return loss, told

        return output, loss_func

    def _mean_loss(self, micro_losses: list[torch.Tensor]) -> float:
        if not self.is_last_stage:
            return float("nan")
        loss = torch.stack(micro_losses).mean().reshape(1)
        dist.all_reduce(loss, group=self._data_group)
        return float(loss.item()) / self.config.dp

    def _remember(self, loss: float, stepped: bool) -> None:
        if self.is_last_stage:
            self.history.loss_sum += loss
            self.history.num_losses += 1
        self.history.num_skipped += not stepped

    def run_shadow_iteration(self, is_unwanted: Callable[[], bool] = lambda: False) -> IterationResult:
        """One whole iteration in the sandbox: pays for kernels, allocator and lazy initialisation before the switch.

        Its numbers mean nothing unless the answers are a recording's, and everything it changes is overwritten by the
        transfer. Raises ShadowUnwanted before the next micro-batch once `is_unwanted()`; the job is of no use then.
        """
        self._is_unwanted = is_unwanted
        ddp_configs = [chunk.ddp_config for chunk in self.chunks]
        checks = [c.check_for_nan_in_grad for c in ddp_configs]
        for c in ddp_configs:
            c.check_for_nan_in_grad = False
        try:
            return self.run_iteration()
        finally:
            self._is_unwanted = None
            for c, check in zip(ddp_configs, checks, strict=True):
                c.check_for_nan_in_grad = check

    def check_drained(self) -> None:
        """At a boundary nothing may be outstanding on a communicator that is about to go."""
        from migration.internals import outstanding
        found = outstanding(self.chunks)
        assert not found, f"slot {self.slot}, iteration {self.iteration}: outstanding at the boundary: {found}"

    def finish(self) -> None:
        """Bring overlapped parameter gathers to their end, so that final parameters are whole. Collective."""
        if self.config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)


def open_groups(config: Config, slot: int, groups: Groups) -> None:
    from migration import model
    groups.open(slot, config.job_size)
    model.initialize_groups(config)


def close_job(groups: Groups) -> None:
    """This process leaves its slot: drop torch's world and Megatron's globals. The caller drops its Job first."""
    from migration.internals import forget_globals
    forget_globals()
    groups.close()


def close_aborted_job(groups: Groups) -> None:
    """The same after `groups.abort_all`, whatever this process was at, with a slot or without."""
    from migration.internals import forget_globals
    forget_globals()
    groups.close_aborted()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # new communicators see what is free, as at the start of a run
