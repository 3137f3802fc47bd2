"""The groups that topology.py names are the groups that Megatron makes, slot for slot."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from four_ranks import world
from tiny_jobs import shared_groups, tiny_config

from migration.config import Config
from migration.groups import Groups
from migration.job import close_job, open_groups
from migration.topology import Group, grid_of

pytestmark = pytest.mark.fast

GRIDS = {"TP2 PP2 DP1": {"tp": 2, "pp": 2}, "TP2 PP1 DP2": {"tp": 2, "dp": 2}, "TP1 PP2 DP2": {"pp": 2, "dp": 2},
         "TP1 PP4 DP1": {"pp": 4, "num_layers": 4}, "TP1 PP1 DP4": {"dp": 4},
         "TP4 PP1 DP1": {"tp": 4, "num_attention_heads": 4}}


@pytest.fixture(params=GRIDS.values(), ids=GRIDS)
def config(request: pytest.FixtureRequest) -> Config:
    return tiny_config(**request.param)


@pytest.fixture
def groups(config: Config) -> Iterator[Groups]:
    """Megatron's groups of this rank's slot; the slot has the number of the world rank."""
    groups = shared_groups()
    open_groups(config, world().rank, groups)
    yield groups
    close_job(groups)


def megatron_groups() -> dict[str, tuple[int, ...]]:
    """Slots of Megatron's own groups of this process, by our kind; without those it isn't in."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    handles = {
        "world": dist.group.WORLD, "tp": parallel_state.get_tensor_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(), "pp": parallel_state.get_pipeline_model_parallel_group(),
        "tp_pp": parallel_state.get_model_parallel_group(),
        "tp_dp": parallel_state.get_tensor_and_data_parallel_group(),
        "embedding": parallel_state.get_embedding_group(check_initialized=False)}
    own = dist.get_rank()
    return {kind: h.slots for kind, h in handles.items() if hasattr(h, "slots") and own in h.slots}


def test_each_kind_is_megatrons(config: Config, groups: Groups) -> None:
    found = {Group(kind=kind, slots=slots)
             for row in world().allgather(megatron_groups()) for kind, slots in row.items()}
    assert found == set(grid_of(config).groups())


def test_no_group_of_megatron_is_unknown(config: Config, groups: Groups) -> None:
    known = {group.slots for group in grid_of(config).groups()}
    assert {h.slots for h in groups.handles.values() if h.size() > 1} <= known


def test_group_ranks_are_places_in_the_group(config: Config, groups: Groups) -> None:
    slot = world().rank
    for handle in groups.handles.values():
        assert list(handle.slots) == sorted(handle.slots)
        assert handle.slots[handle.rank()] == slot and handle.size() == len(handle.slots)


def test_members_build_their_groups_in_one_order(config: Config, groups: Groups) -> None:
    """Else two members could wait for each other in two different groups."""
    orders = world().allgather([(h.name, h.slots) for h in groups.touched(range(config.job_size))])
    for one in orders:
        for other in orders:
            assert [group for group in one if group in other] == [group for group in other if group in one]
    for slot, order in enumerate(orders):
        assert all(group in orders[peer] for group in order for peer in group[1] if peer != slot)
