"""Which model the ablation of bench_gpus.py takes: the largest one whose state, memory and time allow it. Pure.

Bytes are sizes.py's; of activations and seconds there are estimates here. The family is GPT-3's 6.7 B with as many
layers as it takes: with 32 of them, TP2 and the distributed optimizer a slot has 20 GB.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from analysis.gpus_plan import Rates, Shape
from migration.arms import ARMS
from migration.config import Config, validate
from migration.errors import UserError
from migration.profiles import get_profile
from migration.sizes import (format_bytes, format_count, gradient_buffer_bytes, num_parameters, num_slot_parameters,
                             slot_state_bytes)

LEAST_STATE_BYTES = 20_000_000_000  # of each slot
_FAMILY = "7B_TP2_PP2"  # profile
_NUM_MICROBATCHES = 4
_MOST_LAYERS = 96
_SAVED_BYTES = 14       # of a parameter in a checkpoint
_FILLED = 0.85          # of a GPU's memory, at most
_FIXED_BYTES = 8 << 30  # of a process: CUDA, libraries, old and new communicators side by side
_BUILD_S, _WARM_UP_S = 3.0, 3.0
_AROUND = 4             # iterations before the first move and after the last one
_AGREE = 2              # iterations from ready to the first boundary at which a group is connected
# iterations in which new groups are connected ahead, as schedule.py spreads 7 groups and 17 groups
_BOUNDARIES_ALONE, _BOUNDARIES = 7, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model for the ablation. `state_bytes`: of the slot that has least."""

    config: Config
    state_bytes: int
    used_bytes: int  # of a GPU, by one process
    moves_s: float    # the job with a move by each arm
    restart_s: float  # checkpoint, and everything anew

    @property
    def seconds(self) -> float:
        return self.moves_s + self.restart_s

    def arguments(self, iterations: int) -> tuple[str, ...]:
        """Of the harness."""
        config = self.config
        fields = dict(tp=config.tp, pp=config.pp, dp=config.dp, num_layers=config.num_layers,
                      num_microbatches=config.num_microbatches, sequence_parallel=False,
                      distributed_optimizer=config.distributed_optimizer,
                      overlap_param_gather=config.overlap_param_gather, iterations=iterations)
        settings = (part for name, value in fields.items() for part in ("--set", f"{name}={value}"))
        return ("--profile", config.profile, *settings)

    def describe(self) -> str:
        kind = "distributed optimizer" if self.config.distributed_optimizer else "plain optimizer"
        return (f"{format_count(num_parameters(self.config))} parameters, {self.config.num_layers} layers, {kind}, "
                f"{format_bytes(self.state_bytes)} of state a rank")


def choose_model(shape: Shape, rates: Rates, *, process_bytes: int, seconds: float,
                 least_bytes: int = LEAST_STATE_BYTES) -> Model:
    """The model with most parameters that fits into `process_bytes` of a GPU and into `seconds`, with at least
    `least_bytes` of state a slot.

    Where the time doesn't allow that many bytes, the one that has them and takes least; where memory doesn't, the
    largest that fits. Raises UserError if not even the smallest fits into the memory.
    """
    models = [model for model in _candidates(shape, rates) if model.used_bytes <= process_bytes * _FILLED]
    if not models:
        raise UserError(f"{format_bytes(process_bytes)} of a GPU for a process: too little for any model")
    large = [model for model in models if model.state_bytes >= least_bytes]
    in_time = [model for model in large or models if model.seconds <= seconds]
    if in_time:
        return max(in_time, key=_size)
    return min(large or models, key=lambda model: model.seconds)


def _size(model: Model) -> tuple[int, bool]:
    return num_parameters(model.config), model.config.distributed_optimizer


def _candidates(shape: Shape, rates: Rates) -> Iterator[Model]:
    for distributed in (True, False):
        for num_layers in range(2 * shape.pp, _MOST_LAYERS + 1, shape.pp):
            config = dataclasses.replace(
                get_profile(_FAMILY), tp=shape.tp, pp=shape.pp, dp=shape.dp, num_layers=num_layers,
                num_microbatches=_NUM_MICROBATCHES, sequence_parallel=False, distributed_optimizer=distributed,
                overlap_param_gather=distributed)
            validate(config)
            yield build_model(config, rates)


def build_model(config: Config, rates: Rates) -> Model:
    """A model with its bytes and seconds."""
    slots = range(config.job_size)
    states = [slot_state_bytes(config, slot).total for slot in slots]
    used = max(state + gradient_buffer_bytes(config, slot) for slot, state in zip(slots, states, strict=True))
    return Model(config=config, state_bytes=min(states), moves_s=estimate_moves_s(config, rates),
                 restart_s=estimate_restart_s(config, rates),
                 used_bytes=used + activation_bytes(config) + _FIXED_BYTES)


def activation_bytes(config: Config) -> int:
    """Of a stage's layers, s b h (10 + 24 / t + 5 a s / (h t)) each (Korthikanti et al. 2022, table 2), for as many
    micro-batches as are under way at once; and of the logits, in 2, 4 and 4 bytes."""
    s, b, h, a, t = (config.seq_length, config.micro_batch_size, config.hidden_size, config.num_attention_heads,
                     config.tp)
    layer = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    under_way = min(config.pp, config.num_microbatches)
    return int(layer * config.num_layers / config.pp * under_way + 10 * s * b * config.vocab_size / t)


def estimate_iteration_s(config: Config, rates: Rates) -> float:
    """Operations, and what the reduction of gradients and the gather of parameters carry between hosts, one after the
    other. A ring carries (dp - 1) / dp of the bytes, twice for an all-reduce."""
    num_held = max(num_slot_parameters(config, slot) for slot in range(config.job_size))
    tokens = config.seq_length * config.micro_batch_size * config.num_microbatches
    ring = (config.dp - 1) / config.dp
    carried = num_held * ring * (4 + 2 if config.distributed_optimizer else 2 * 4)
    return 6 * num_held * tokens * config.pp ** 0.5 / rates.flops + carried / rates.host_bytes_s


def estimate_moves_s(config: Config, rates: Rates) -> float:
    """Of a job with a move by each arm."""
    iteration_s = estimate_iteration_s(config, rates)
    state_s = max(slot_state_bytes(config, slot).total for slot in range(config.job_size)) / rates.host_bytes_s
    ahead = _AGREE + (_BOUNDARIES_ALONE if config.tp * config.pp == 1 else _BOUNDARIES)
    seconds = rates.start_s + _BUILD_S + _AROUND * iteration_s
    for arm in ARMS.values():  # the state goes over beside training, or in the pause: it takes its time either way
        seconds += rates.move_s + _BUILD_S + _WARM_UP_S * arm.warms_up + state_s
        seconds += 0.0 if arm.stops_first else ahead * iteration_s
    return seconds


def estimate_restart_s(config: Config, rates: Rates) -> float:
    """A checkpoint of everything, which the first replica writes, of the distributed optimizer's shards each its own;
    then a start from it, for which each process reads what it holds."""
    num_writers = config.job_size if config.distributed_optimizer else config.tp * config.pp
    read_bytes = max(slot_state_bytes(config, slot).total for slot in range(config.job_size))
    return (num_parameters(config) * _SAVED_BYTES / num_writers / rates.write_bytes_s
            + read_bytes / rates.read_bytes_s + rates.imports_s + rates.start_s + _BUILD_S
            + estimate_iteration_s(config, rates))
