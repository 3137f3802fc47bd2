"""Parameters and bytes against megatron-core 0.16.1's own model and against published figures."""
from __future__ import annotations

import dataclasses

import pytest

from migration.config import Config, validate
from migration.profiles import get_profile
from migration.sizes import (StateBytes, format_bytes, format_count, gradient_buffer_bytes, num_parameters,
                             num_slot_parameters, slot_state_bytes)
from migration.topology import grid_of

# Changes to the tiny Config, and the number of parameters that megatron-core 0.16.1's GPTModel was seen to hold on
# each stage (on every tp and dp slot of it).
MEASURED = [
    (dict(tp=1, pp=1, dp=1), (220544,)),
    (dict(tp=1, pp=1, dp=1, tied_embeddings=False, position_embedding="rope"), (232832,)),
    (dict(tp=2, pp=1, dp=3), (113152,)),
    (dict(tp=2, pp=1, dp=1, tied_embeddings=False), (121344,)),
    (dict(tp=2, pp=2, dp=1), (62656, 58688)),
    (dict(tp=1, pp=2, dp=2), (120448, 116480)),
    (dict(tp=2, pp=2, dp=3, tied_embeddings=False), (62656, 58688)),
    (dict(tp=2, pp=4, dp=2, num_layers=8, position_embedding="rope"), (58560, 50368, 50368, 58688)),
    (dict(tp=1, pp=4, dp=3, num_layers=8, first_stage_layers=1, last_stage_layers=3), (70464, 99968, 99968, 166464)),
    (dict(tp=2, pp=2, dp=2, vpp=2), (62656, 58688)),
    (dict(tp=4, pp=2, dp=3, ffn_hidden_size=96), (23440, 19472)),
]


def tiny(**changes: object) -> Config:
    config = dataclasses.replace(Config(profile="x"), **changes)
    validate(config)
    return config


@pytest.mark.parametrize("changes, per_stage", MEASURED, ids=lambda value: str(value))
def test_parameters_of_every_slot_are_those_of_megatron(changes: dict, per_stage: tuple[int, ...]) -> None:
    config = tiny(**changes)
    assert [num_slot_parameters(config, slot) for slot in range(config.job_size)] == \
        [per_stage[grid_of(config).coordinates(slot).pp] for slot in range(config.job_size)]


@pytest.mark.parametrize("changes, per_stage", MEASURED[:2], ids=lambda value: str(value))
def test_one_slot_holds_the_whole_model(changes: dict, per_stage: tuple[int, ...]) -> None:
    assert num_parameters(tiny(**changes)) == per_stage[0]


@pytest.mark.parametrize("profile, expected", [
    ("20B_TP4_PP2", 20_554_567_680),  # published for GPT-NeoX-20B
    ("20B_TP1_PP8", 20_554_567_680),
])
def test_parameters_published_exactly(profile: str, expected: int) -> None:
    assert num_parameters(get_profile(profile)) == expected


@pytest.mark.parametrize("profile, billions", [("39B_TP4_PP2", 39.1), ("7B_TP2_PP2", 6.7)])
def test_parameters_published_rounded(profile: str, billions: float) -> None:
    assert round(num_parameters(get_profile(profile)) / 1e9, 1) == billions


@pytest.mark.parametrize("profile", ["39B_TP4_PP2", "7B_TP2_PP2", "tiny_TP2_PP1"])
def test_parameters_follow_the_published_formula(profile: str) -> None:
    """Narayanan et al. 2021, section 5.1, as printed; it leaves out the final layer norm."""
    config = get_profile(profile)
    l, h, s, v = config.num_layers, config.hidden_size, config.seq_length, config.vocab_size
    published = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert num_parameters(config) - 2 * h == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("changes, expected", [
    # seen in megatron-core 0.16.1: parameters, fp32 main parameters, moments
    (dict(dtype="bf16", distributed_optimizer=False), (232960, 465920, 931840)),
    (dict(dtype="fp16", distributed_optimizer=True), (232960, 232960, 465920)),
    (dict(dtype="fp32", distributed_optimizer=False), (465920, 0, 931840)),
    (dict(dtype="fp32", distributed_optimizer=True), (465920, 0, 465920)),
], ids=lambda value: str(value))
def test_state_bytes_of_the_last_stage(changes: dict, expected: tuple[int, int, int]) -> None:
    parameters, main_parameters, moments = expected
    state = slot_state_bytes(tiny(tp=1, pp=2, dp=2, **changes), slot=3)
    assert state == StateBytes(parameters=parameters, main_parameters=main_parameters, moments=moments)
    assert state.total == sum(expected)


def test_a_shard_is_rounded_up() -> None:
    state = slot_state_bytes(tiny(tp=2, pp=1, dp=3), slot=0)  # 113152 parameters aren't a multiple of 3
    assert (state.main_parameters, state.moments) == (4 * 37718, 8 * 37718)


def test_gradients_are_kept_in_fp32() -> None:
    assert gradient_buffer_bytes(tiny(tp=1, pp=2, dp=2), slot=3) == 4 * 116480


def test_20b_holds_5_gb_of_weights_and_10_gb_of_optimizer_a_rank_and_120_gb_a_host() -> None:
    config = get_profile("20B_TP4_PP2")
    for slot in range(config.job_size):
        state = slot_state_bytes(config, slot)
        assert round(state.parameters / 1e9) == 5
        assert round((state.main_parameters + state.moments) / 1e9) == 10
    assert sum(slot_state_bytes(config, slot).total for slot in range(8)) == pytest.approx(120e9, rel=0.05)


def test_the_grid_divides_the_model_without_loss() -> None:
    """Over one pipeline, what every tp slot holds whole is the only excess."""
    config = get_profile("20B_TP4_PP2")
    held = sum(num_slot_parameters(config, slot) for slot in range(config.job_size)) // config.dp
    replicated_per_layer = 6 * config.hidden_size  # two layer norms, biases of projection and fc2
    replicated = config.num_layers * replicated_per_layer + 2 * config.hidden_size
    assert held == num_parameters(config) + (config.tp - 1) * replicated


@pytest.mark.parametrize("slot", [-1, 6])
def test_unknown_slot(slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot}"):
        num_slot_parameters(get_profile("tiny_TP2_PP1"), slot)


@pytest.mark.parametrize("num_bytes, shown", [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (678_920, "679 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"),
    (15_419_566_080, "15.4 GB"), (99_949_999, "99.9 MB"), (99_950_001, "100 MB"), (9_994_000, "9.99 MB"),
    (9_996_000, "10.0 MB"),
])
def test_bytes_for_people(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


@pytest.mark.parametrize("count, shown", [(7, "7"), (220_544, "221 k"), (20_554_567_680, "20.6 B")])
def test_counts_for_people(count: int, shown: str) -> None:
    assert format_count(count) == shown
