"""The named runs: one function for each profile, returning one complete `Config`.

Owns the shapes and the choices of batch, learning rate and memory. Pure: standard library only. Must not know of the
machine: how many processes or which hosts there are is checked against a profile elsewhere.
"""
from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from migration.config import Config
from migration.errors import UserError
from migration.sizes import format_bytes, format_count, num_parameters, slot_state_bytes

DEFAULT_PROFILE = "tiny_TP2_PP1"

_RANKS_PER_HOST = 8  # of the GPU hosts that the real profiles are for, and of virtual ones in their place
_TINY_RANKS_PER_HOST = 2
_ON_TINY_HOSTS = ("tiny_TP2_PP1", "tiny_TP2_PP2", "tiny_TP1_PP2")

# What the real profiles share. `iterations` is enough for a measurement; the schedule is that of a long run.
_REAL: dict[str, Any] = dict(
    dp=3, seq_length=2048, dtype="bf16", distributed_optimizer=True, overlap_grad_reduce=True,
    overlap_param_gather=True, micro_batch_size=1, warmup_iterations=500, decay_iterations=100_000, iterations=100)
_NEOX_20B: dict[str, Any] = dict(
    **_REAL, num_layers=44, hidden_size=6144, num_attention_heads=64, vocab_size=50432, position_embedding="rope",
    tied_embeddings=False, dropout=0.0, num_microbatches=32, lr=9.7e-5, min_lr=9.7e-6)


def tiny_tp2_pp1() -> Config:
    """6 slots for CPU tests: 3 virtual hosts of 2, each a tensor-parallel pair."""
    return Config(profile="tiny_TP2_PP1", tp=2, pp=1, dp=3)


def tiny_tp2_pp2() -> Config:
    """4 slots for CPU tests, one pipeline of two tensor-parallel pairs."""
    return Config(profile="tiny_TP2_PP2", tp=2, pp=2, dp=1)


def tiny_tp1_pp2() -> Config:
    """4 slots for CPU tests, two pipelines of two stages."""
    return Config(profile="tiny_TP1_PP2", tp=1, pp=2, dp=2)


def tiny_tp4_pp2() -> Config:
    """24 slots, the grid of the research system's m24 run, with the model of the CPU tests."""
    return Config(profile="tiny_TP4_PP2", tp=4, pp=2, dp=3)


def one_rank_20gb() -> Config:
    """1.65 billion parameters on a single slot: 23 GB of state, to see what a move takes without any group work.

    An iteration is 64 samples of 2048 tokens: 6 x 1.65e9 x 131072 = 1.3e15 operations, about 5 s of an H200.
    Activations of a micro-batch of 2 are about 26 GB (formula of gpt_neox_20b_tp4_pp2).
    """
    return Config(profile="one_rank_20GB", tp=1, pp=1, dp=1, num_layers=24, hidden_size=2304, num_attention_heads=18,
                  seq_length=2048, vocab_size=51200, dropout=0.0, micro_batch_size=2, num_microbatches=32,
                  overlap_grad_reduce=True, overlap_param_gather=True, lr=2.0e-4, min_lr=2.0e-5, warmup_iterations=500,
                  decay_iterations=100_000, iterations=100)


def gpt_neox_20b_tp4_pp2() -> Config:
    """GPT-NeoX-20B (Black et al. 2022): rotary positions, untied output weight, no dropout.

    Nothing is recomputed: with sequence parallelism the activations of a stage's 22 layers, s b h (34 + 5 a s / h) / tp
    bytes each (Korthikanti et al. 2022, table 2), are about 20 GB for the two micro-batches under way.
    """
    return Config(**_NEOX_20B, profile="20B_TP4_PP2", tp=4, pp=2, sequence_parallel=True)


def gpt_neox_20b_tp1_pp8() -> Config:
    """GPT-NeoX-20B without tensor parallelism: 4, six times 6, and 4 layers.

    The outer stages are shorter because they also hold the embeddings. Unsharded activations of 7 micro-batches and
    6 layers on the second stage would be 74 GB (same formula), too much beside the state: recompute.
    """
    return Config(**_NEOX_20B, profile="20B_TP1_PP8", tp=1, pp=8, first_stage_layers=4, last_stage_layers=4,
                  recompute=True)


def gpt_39b_tp4_pp2() -> Config:
    """The model of 39.1 billion parameters of Narayanan et al. 2021, table 1.

    State and gradients take 50 GB a rank and activations would take 23 more: recompute.
    """
    return Config(**_REAL, profile="39B_TP4_PP2", tp=4, pp=2, num_layers=48, hidden_size=8192,
                  num_attention_heads=64, vocab_size=51200, num_microbatches=16,
                  lr=8.0e-5, min_lr=8.0e-6, weight_decay=0.1, sequence_parallel=True, recompute=True)


def gpt_7b_tp2_pp2() -> Config:
    """GPT-3 6.7B (Brown et al. 2020, table 2.1), with the vocabulary of 51200 that Megatron's papers use."""
    return Config(**_REAL, profile="7B_TP2_PP2", tp=2, pp=2, num_layers=32, hidden_size=4096,
                  num_attention_heads=32, vocab_size=51200, num_microbatches=32,
                  lr=1.2e-4, min_lr=1.2e-5, weight_decay=0.1, sequence_parallel=True)


PROFILES: dict[str, Callable[[], Config]] = {
    "tiny_TP2_PP1": tiny_tp2_pp1,
    "tiny_TP2_PP2": tiny_tp2_pp2,
    "tiny_TP1_PP2": tiny_tp1_pp2,
    "tiny_TP4_PP2": tiny_tp4_pp2,
    "one_rank_20GB": one_rank_20gb,
    "20B_TP4_PP2": gpt_neox_20b_tp4_pp2,
    "20B_TP1_PP8": gpt_neox_20b_tp1_pp8,
    "39B_TP4_PP2": gpt_39b_tp4_pp2,
    "7B_TP2_PP2": gpt_7b_tp2_pp2,
}


def get_profile(name: str) -> Config:
    """Raises UserError for an unknown name; the message has the known ones and the nearest."""
    if name not in PROFILES:
        by_lower_case = {known.lower(): known for known in PROFILES}
        nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
        hint = f"did you mean {by_lower_case[nearest[0]]}? " if nearest else ""
        raise UserError(f"--profile {name}: there is no such profile; {hint}profiles are: {', '.join(PROFILES)}")
    return PROFILES[name]()


def ranks_per_host(config: Config) -> int:
    """Ranks of one host in the setting that the profile is for: 8 GPUs, or 2 processes of a virtual host; fewer where
    the job has fewer slots. The size that --set gives the job makes no other host of it.
    """
    on_host = _TINY_RANKS_PER_HOST if config.profile in _ON_TINY_HOSTS else _RANKS_PER_HOST
    return min(on_host, config.job_size)


def describe_profiles() -> str:
    """The table of --list-profiles, for the configs as they are named, without --set."""
    rows = [("profile", "parameters", "TP", "PP", "DP", "ranks", "hosts", "state per rank", "with a spare host")]
    for name, build in PROFILES.items():
        config = build()
        per_host = ranks_per_host(config)
        num_hosts = -(-config.job_size // per_host)
        largest = max(slot_state_bytes(config, slot).total for slot in range(config.job_size))
        rows.append((name, format_count(num_parameters(config)), str(config.tp), str(config.pp), str(config.dp),
                     str(config.job_size), f"{num_hosts} of {per_host}", format_bytes(largest),
                     f"mpirun -n {(num_hosts + 1) * per_host}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*table, "", "Ranks are the slots of the job. Start more processes than that: every further one "
                      "is a spare, and a host can only be vacated onto spares.",
                      "State per rank: parameters and optimizer state of the largest rank, which is what a move "
                      "carries; gradients and activations come on top."])
