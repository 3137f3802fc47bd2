"""The run's config: every combination that is refused, every `--set` that can't be applied, and what each one says."""
from __future__ import annotations

import dataclasses

import pytest

from migration.config import Config, apply_settings, validate
from migration.errors import UserError

TINY = Config(profile="tiny")
AT_LEAST_ONE = ("tp", "pp", "dp", "vpp", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size",
                "micro_batch_size", "num_microbatches", "iterations", "warmup_iterations")

# id: (changes to the tiny config, what the message must hold)
REFUSED = {
    # no support yet, by name
    "transformer engine": (dict(transformer_engine=True), "transformer_engine=True: no support for Transformer Engine"),
    "experts": (dict(num_experts=8), "num_experts=8: no support for mixture of experts"),
    "context parallel": (dict(context_parallel=2), "context_parallel=2: no support for context parallelism"),
    "fp8": (dict(fp8=True), "fp8=True: no support for FP8"),
    "cuda graphs": (dict(cuda_graphs=True), "cuda_graphs=True: no support for CUDA graphs"),
    "user buffers": (dict(nccl_user_buffers=True), "nccl_user_buffers=True: no support for NCCL user buffers"),
    # sizes that don't divide
    "heads over tp": (dict(num_attention_heads=4, tp=8), "num_attention_heads=4 is not a multiple of tp=8"),
    "vocabulary over tp": (dict(vocab_size=255, tp=2), "vocab_size=255 is not a multiple of tp=2"),
    "hidden over heads": (dict(hidden_size=66), "hidden_size=66 is not a multiple of num_attention_heads=4"),
    "layers over stages": (dict(pp=3), r"num_layers=4 is not a multiple of pp\*vpp=3"),
    "layers over chunks": (dict(pp=2, vpp=4), r"num_layers=4 is not a multiple of pp\*vpp=8"),
    # words and ranges
    "dtype": (dict(dtype="fp64"), "dtype='fp64': must be one of fp32, bf16, fp16"),
    "positions": (dict(position_embedding="alibi"), "position_embedding='alibi': must be one of learned_absolute"),
    "dropout of one": (dict(dropout=1.0), "dropout=1.0: must be at least 0 and below 1"),
    "dropout below zero": (dict(dropout=-0.1), "dropout=-0.1: must be"),
    "dropout that is no number": (dict(dropout=float("nan")), "dropout=nan: must be"),
    "warm-up as long as decay": (dict(warmup_iterations=10, decay_iterations=10), "must be below decay_iterations=10"),
    # pipeline
    "only a first stage": (dict(pp=4, num_layers=8, first_stage_layers=1), "go together"),
    "only a last stage": (dict(pp=4, num_layers=8, last_stage_layers=1), "go together"),
    "uneven with two stages": (dict(pp=2, first_stage_layers=1, last_stage_layers=3), "need pp of at least 3"),
    "uneven middle": (dict(pp=4, num_layers=9, first_stage_layers=1, last_stage_layers=3), "multiple of pp-2 layers"),
    "nothing left for the middle": (dict(pp=4, first_stage_layers=2, last_stage_layers=2), "num_layers=4, pp=4"),
    "uneven and interleaved": (dict(pp=4, vpp=2, num_layers=8, first_stage_layers=1, last_stage_layers=3), "vpp 1"),
    "interleaved with one stage": (dict(vpp=2), "vpp=2: the interleaved schedule needs pp of at least 2, not pp=1"),
    "interleaved with an odd batch": (dict(pp=2, vpp=2, num_microbatches=3),
                                      "num_microbatches=3 is not a multiple of pp=2"),
    # overlap and sequence parallel
    "gather overlapped, plain optimizer": (dict(overlap_param_gather=True, overlap_grad_reduce=True,
                                                distributed_optimizer=False), "needs distributed_optimizer=true"),
    "gather overlapped, reduction not": (dict(overlap_param_gather=True), "and overlap_grad_reduce=true"),
    "sequence parallel without tp": (dict(sequence_parallel=True), "sequence_parallel=true needs tp of at least 2"),
    "sequence over tp": (dict(sequence_parallel=True, tp=2, seq_length=63), "seq_length=63 is not a multiple of tp=2"),
}

ACCEPTED = {
    "defaults": {},
    "everything parallel": dict(tp=2, pp=2, dp=3, vpp=2, sequence_parallel=True, recompute=True),
    "everything overlapped": dict(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20_000),
    "reduction overlapped, plain optimizer": dict(overlap_grad_reduce=True, distributed_optimizer=False),
    "fp16": dict(dtype="fp16"),
    "fp32, rope, untied": dict(dtype="fp32", position_embedding="rope", tied_embeddings=False),
    "uneven stages": dict(pp=4, num_layers=8, first_stage_layers=1, last_stage_layers=3),
    "one slot": dict(dp=1),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        validate(dataclasses.replace(TINY, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", AT_LEAST_ONE)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_start_at_one(field: str, value: int) -> None:
    with pytest.raises(UserError, match=f"^{field}={value}: must be at least 1"):
        validate(dataclasses.replace(TINY, **{field: value}))


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(changes: dict) -> None:
    validate(dataclasses.replace(TINY, **changes))


@pytest.mark.parametrize("setting, field, value", [
    ("iterations=100", "iterations", 100), ("lr=1e-4", "lr", 1e-4), ("dtype=fp16", "dtype", "fp16"),
    (" dropout = 0 ", "dropout", 0.0), ("data=/tmp/a=b.txt", "data", "/tmp/a=b.txt"), ("data=", "data", ""),
    ("tied_embeddings=false", "tied_embeddings", False), ("recompute=True", "recompute", True),
    ("recompute=1", "recompute", True), ("distributed_optimizer=no", "distributed_optimizer", False),
])
def test_a_setting_changes_its_field_only(setting: str, field: str, value: object) -> None:
    changed = apply_settings(TINY, [setting])
    assert getattr(changed, field) == value and type(getattr(changed, field)) is type(value)
    assert dataclasses.replace(changed, **{field: getattr(TINY, field)}) == TINY


def test_settings_are_judged_together_and_the_last_of_a_field_holds() -> None:
    changed = apply_settings(TINY, ["overlap_param_gather=true", "iterations=3", "overlap_grad_reduce=true",
                                    "iterations=7"])
    assert changed.overlap_param_gather and changed.iterations == 7
    assert apply_settings(TINY, []) == TINY


@pytest.mark.parametrize("setting, message", [
    ("iterations", "--set iterations: write it as field=value, such as"),
    ("", "write it as field=value"),
    ("iteration=5", "there is no field 'iteration'; fields are: .*iterations"),
    ("=5", "there is no field ''"),
    ("profile=20B", "there is no field 'profile'"),
    ("job_size=8", "there is no field 'job_size'"),
    ("iterations=many", "--set iterations=many: 'many' is not a value of type int"),
    ("iterations=1.5", "'1.5' is not a value of type int"),
    ("iterations=", "'' is not a value of type int"),
    ("lr=fast", "'fast' is not a value of type float"),
    ("recompute=maybe", "'maybe' is not a value of type true or false"),
    ("recompute=2", "'2' is not a value of type true or false"),
    ("dtype=fp64", "dtype='fp64': must be one of"),
    ("fp8=true", "no support for FP8"),
    ("tp=3", "num_attention_heads=4 is not a multiple of tp=3"),
])
def test_setting_refused_in_one_line(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        apply_settings(TINY, [setting])
    assert "\n" not in str(caught.value)


def test_a_refused_setting_leaves_the_config_as_it_was() -> None:
    before = dataclasses.replace(TINY)
    with pytest.raises(UserError):
        apply_settings(TINY, ["iterations=3", "tp=3"])
    assert TINY == before


def test_derived_sizes() -> None:
    config = Config(profile="x", tp=2, pp=2, dp=3, micro_batch_size=2, num_microbatches=5, hidden_size=64)
    assert (config.job_size, config.global_batch_size, config.ffn_size) == (12, 30, 256)
    assert dataclasses.replace(config, ffn_hidden_size=96).ffn_size == 96


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.tp = 2  # type: ignore[misc]
