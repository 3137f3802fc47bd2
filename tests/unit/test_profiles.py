"""The named runs: their shapes, their table, and what an unknown name says."""
from __future__ import annotations

import pytest

from migration.config import apply_settings, validate
from migration.errors import UserError
from migration.profiles import PROFILES, describe_profiles, get_profile, ranks_per_host
from migration.sizes import slot_state_bytes
from migration.topology import stage_layers

TINY = [name for name in PROFILES if name.startswith("tiny")]
REAL = [name for name in PROFILES if not name.startswith("tiny") and name != "one_rank_20GB"]


@pytest.mark.parametrize("name", [*TINY, *REAL])
def test_profile_is_valid_and_carries_its_own_name(name: str) -> None:
    config = get_profile(name)
    validate(config)
    assert config.profile == name
    sizes = {part[:2]: int(part[2:]) for part in name.split("_")[1:]}
    assert (config.tp, config.pp) == (sizes["TP"], sizes["PP"])


def test_all_that_were_promised_are_there() -> None:
    assert set(PROFILES) == {"tiny_TP2_PP1", "tiny_TP2_PP2", "tiny_TP1_PP2", "tiny_TP4_PP2", "20B_TP4_PP2",
                             "20B_TP1_PP8", "39B_TP4_PP2", "7B_TP2_PP2", "one_rank_20GB"}


@pytest.mark.parametrize("name, dp, job_size", [("tiny_TP2_PP1", 3, 6), ("tiny_TP2_PP2", 1, 4), ("tiny_TP1_PP2", 2, 4),
                                                ("tiny_TP4_PP2", 3, 24), ("20B_TP4_PP2", 3, 24), ("20B_TP1_PP8", 3, 24),
                                                ("39B_TP4_PP2", 3, 24), ("7B_TP2_PP2", 3, 12)])
def test_grid(name: str, dp: int, job_size: int) -> None:
    config = get_profile(name)
    assert (config.dp, config.job_size) == (dp, job_size)


@pytest.mark.parametrize("name", REAL)
def test_real_profiles_train_in_bf16_with_everything_overlapped(name: str) -> None:
    config = get_profile(name)
    assert (config.dtype, config.seq_length) == ("bf16", 2048)
    assert config.distributed_optimizer and config.overlap_grad_reduce and config.overlap_param_gather
    assert config.num_microbatches >= 2 * config.pp  # else the pipeline is mostly bubble


def test_uneven_stages_of_the_eight_stage_profile() -> None:
    assert stage_layers(get_profile("20B_TP1_PP8")) == (4, 6, 6, 6, 6, 6, 6, 4)


def test_one_rank_has_more_than_20_gb_to_move() -> None:
    config = get_profile("one_rank_20GB")
    validate(config)
    assert config.profile == "one_rank_20GB" and config.job_size == 1
    assert 20e9 < slot_state_bytes(config, 0).total < 25e9


@pytest.mark.parametrize("name, hosts", [("one_rank_20GB", 1), ("tiny_TP4_PP2", 8), ("tiny_TP2_PP1", 2),
                                         ("tiny_TP2_PP2", 2), ("20B_TP4_PP2", 8),
                                         ("7B_TP2_PP2", 8)])
def test_ranks_of_a_host(name: str, hosts: int) -> None:
    assert ranks_per_host(get_profile(name)) == hosts


@pytest.mark.parametrize("name, dp, hosts", [("20B_TP4_PP2", 1, 8), ("7B_TP2_PP2", 1, 4), ("7B_TP2_PP2", 2, 8),
                                             ("one_rank_20GB", 4, 4), ("tiny_TP2_PP1", 1, 2), ("tiny_TP2_PP1", 8, 2),
                                             ("tiny_TP4_PP2", 1, 8)])
def test_a_job_of_another_size_has_the_same_hosts(name: str, dp: int, hosts: int) -> None:
    assert ranks_per_host(apply_settings(get_profile(name), [f"dp={dp}"])) == hosts


def test_unknown_profile_names_the_nearest_and_all() -> None:
    with pytest.raises(UserError) as caught:
        get_profile("20b_tp4_pp1")
    message = str(caught.value)
    assert "20b_tp4_pp1" in message and "did you mean 20B_TP4_PP2?" in message
    assert all(name in message for name in PROFILES) and "\n" not in message


def test_unknown_profile_near_to_nothing() -> None:
    with pytest.raises(UserError, match="there is no such profile; profiles are: tiny_TP2_PP1") as caught:
        get_profile("zzzzzzz")
    assert "did you mean" not in str(caught.value)


def test_table() -> None:
    lines = describe_profiles().splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:1 + len(PROFILES)]}
    assert set(rows) == set(PROFILES)
    assert rows["20B_TP4_PP2"] == ["20B_TP4_PP2", "20.6", "B", "4", "2", "3", "24", "3", "of", "8", "15.4", "GB",
                                   "mpirun", "-n", "32"]
    assert rows["tiny_TP2_PP1"] == ["tiny_TP2_PP1", "221", "k", "2", "1", "3", "6", "3", "of", "2", "679", "kB",
                                    "mpirun", "-n", "8"]
    assert "spare" in lines[-2]
