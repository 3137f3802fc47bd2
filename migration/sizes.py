"""Arithmetic of parameters and bytes: how big the model is, what a slot holds, what a move has to carry.

Owns the formulas, checked against megatron-core 0.16.1's own GPTModel and optimizers. Padding that Megatron adds to its
buffers (each parameter starts at a multiple of 64 elements) is ignored: a real buffer or shard is some kilobytes off.
Pure: standard library only. Must not know of torch, processes, hosts or the state that is really allocated.
"""
from __future__ import annotations

from dataclasses import dataclass

from migration.config import Config
from migration.topology import grid_of, stage_layers

_NUM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32_BYTES = 4
_NUM_ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of the state of one slot that has to survive a move. RNG, counters and schedules are not counted."""

    parameters: int  # as the model computes with them, in the config's dtype
    main_parameters: int  # fp32 copies that the optimizer steps; 0 where it steps the parameters themselves
    moments: int  # Adam's two, fp32

    @property
    def total(self) -> int:
        return self.parameters + self.main_parameters + self.moments


def num_layer_parameters(config: Config, *, tp: int = 1) -> int:
    """Parameters of one transformer layer on one of `tp` tensor-parallel slots.

    Column-parallel QKV and fc1 shard weight and bias; row-parallel projection and fc2 shard the weight and hold the
    whole bias; both layer norms are held whole.
    """
    h, f = config.hidden_size, config.ffn_size
    qkv = (h * 3 * h + 3 * h) // tp
    projection = h * h // tp + h
    fc1 = (h * f + f) // tp
    fc2 = f * h // tp + h
    layer_norms = 2 * 2 * h
    return qkv + projection + fc1 + fc2 + layer_norms


def num_parameters(config: Config) -> int:
    """Parameters of the whole model, tied embeddings counted once.

    With tied learned embeddings and f = 4h this is Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", section 5.1, P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), plus
    the 2h of the final layer norm, which that formula leaves out.
    """
    num_vocab = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return (num_vocab + _num_positions(config) + config.num_layers * num_layer_parameters(config)
            + _num_final_norm(config))


def num_slot_parameters(config: Config, slot: int) -> int:
    """Parameters that megatron-core's GPTModel holds in `slot`, all its model chunks together.

    The vocabulary is sharded over tp, positions are held whole. With tied embeddings and more than one stage the last
    stage holds an own copy of the word embeddings as its output weight. Raises IndexError for an unknown slot.
    """
    stage = grid_of(config).coordinates(slot).pp
    is_first, is_last = stage == 0, stage == config.pp - 1
    vocab_shard = config.vocab_size // config.tp * config.hidden_size
    count = stage_layers(config)[stage] * num_layer_parameters(config, tp=config.tp)
    if is_first:
        count += vocab_shard + _num_positions(config)
    if is_last:
        has_own_output_weight = not (config.tied_embeddings and is_first)
        count += _num_final_norm(config) + (vocab_shard if has_own_output_weight else 0)
    return count


def slot_state_bytes(config: Config, slot: int) -> StateBytes:
    """Bytes of parameters and optimizer state in `slot`.

    Mixed precision (Micikevicius et al. 2018; bytes as in Megatron-Core's table for its distributed optimizer): 2 of
    parameter, 4 of fp32 main parameter and 8 of Adam's moments for each parameter; the distributed optimizer divides
    the last two by dp. fp32: 4 and 8. There the optimizer steps the parameters themselves: in Megatron 0.16 the shards
    of the distributed optimizer are views of the model's fp32 parameters, so main parameters take nothing more.
    A shard is counted as the number of parameters over dp, rounded up. Megatron cuts padded buffers evenly, so the
    shards of the dp slots differ a little among themselves and from this.
    """
    num_held = num_slot_parameters(config, slot)
    num_stepped = -(-num_held // config.dp) if config.distributed_optimizer else num_held
    return StateBytes(
        parameters=num_held * _NUM_BYTES[config.dtype],
        main_parameters=0 if config.dtype == "fp32" else num_stepped * _FP32_BYTES,
        moments=num_stepped * _NUM_ADAM_MOMENTS * _FP32_BYTES,
    )


def gradient_buffer_bytes(config: Config, slot: int) -> int:
    """Bytes of the fp32 buffer into which `slot` accumulates and reduces gradients. Of it a move carries the own
    shard."""
    return num_slot_parameters(config, slot) * _FP32_BYTES


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` with three digits and a decimal unit, such as '15.4 GB'."""
    return _format(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: int) -> str:
    """`count` with three digits and a suffix, such as '20.6 B' (billions)."""
    return _format(count, ("", "k", "M", "B", "T"))


def _num_positions(config: Config) -> int:
    return config.seq_length * config.hidden_size if config.position_embedding == "learned_absolute" else 0


def _num_final_norm(config: Config) -> int:
    return 2 * config.hidden_size


def _format(amount: int, units: tuple[str, ...]) -> str:
    if amount < 1000:
        return f"{amount} {units[0]}".rstrip()
    scaled, index = float(amount), 0
    while float(f"{scaled:.3g}") >= 1000 and index < len(units) - 1:
        scaled, index = scaled / 1000, index + 1
    # three significant digits, without an exponent
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f} {units[index]}"
