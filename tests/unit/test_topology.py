"""The grid against Megatron's default rank order, written out by hand, and against its invariants."""
from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from migration.config import Config
from migration.topology import GROUP_KINDS, Coordinates, Grid, grid_of, stage_layers

GRIDS = [Grid(tp=tp, pp=pp, dp=dp) for tp in (1, 2, 4) for pp in (1, 2, 8) for dp in (1, 2, 3)]


def slots_by_kind(grid: Grid, kind: str) -> list[tuple[int, ...]]:
    return [group.slots for group in grid.groups() if group.kind == kind]


def test_tp_changes_fastest_then_dp_then_pp() -> None:
    grid = Grid(tp=2, pp=2, dp=3)
    assert [str(grid.coordinates(slot)) for slot in range(12)] == [
        "tp0 dp0 pp0", "tp1 dp0 pp0", "tp0 dp1 pp0", "tp1 dp1 pp0", "tp0 dp2 pp0", "tp1 dp2 pp0",
        "tp0 dp0 pp1", "tp1 dp0 pp1", "tp0 dp1 pp1", "tp1 dp1 pp1", "tp0 dp2 pp1", "tp1 dp2 pp1"]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_slot_and_coordinates_are_inverse_and_follow_the_formula(grid: Grid) -> None:
    for slot in range(grid.job_size):
        place = grid.coordinates(slot)
        assert slot == place.tp + grid.tp * (place.dp + grid.dp * place.pp)
        assert grid.slot_at(tp=place.tp, dp=place.dp, pp=place.pp) == slot


@pytest.mark.parametrize("slot", [-1, 12])
def test_slot_outside_the_grid(slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} is outside the grid of 12 slots"):
        Grid(tp=2, pp=2, dp=3).coordinates(slot)


@pytest.mark.parametrize("place", [Coordinates(tp=2, dp=0, pp=0), Coordinates(tp=0, dp=-1, pp=0),
                                   Coordinates(tp=0, dp=0, pp=2)], ids=str)
def test_coordinates_outside_the_grid(place: Coordinates) -> None:
    with pytest.raises(IndexError, match="is outside the grid TP2 x PP2 x DP3"):
        Grid(tp=2, pp=2, dp=3).slot_at(tp=place.tp, dp=place.dp, pp=place.pp)


def test_groups_of_a_full_grid() -> None:
    grid = Grid(tp=2, pp=2, dp=3)
    assert slots_by_kind(grid, "world") == [tuple(range(12))]
    assert slots_by_kind(grid, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert slots_by_kind(grid, "dp") == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert slots_by_kind(grid, "pp") == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]
    assert slots_by_kind(grid, "tp_pp") == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    assert slots_by_kind(grid, "tp_dp") == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    assert slots_by_kind(grid, "embedding") == slots_by_kind(grid, "pp")


def test_embeddings_live_on_first_and_last_stage_only() -> None:
    assert slots_by_kind(Grid(tp=1, pp=4, dp=2), "embedding") == [(0, 6), (1, 7)]


def test_one_stage_is_its_own_embedding_group() -> None:
    assert slots_by_kind(Grid(tp=2, pp=1, dp=2), "embedding") == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_kind_but_embedding_holds_each_slot_once(grid: Grid) -> None:
    for kind in set(GROUP_KINDS) - {"embedding"}:
        assert Counter(slot for slots in slots_by_kind(grid, kind) for slot in slots) == Counter(range(grid.job_size))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_come_in_one_order(grid: Grid) -> None:
    groups = grid.groups()
    assert groups == sorted_groups(groups)
    assert all(group.slots == tuple(sorted(group.slots)) for group in groups)
    assert all(type(slot) is int for group in groups for slot in group.slots)  # numpy's integers don't go into JSON


def sorted_groups(groups: tuple) -> tuple:
    return tuple(sorted(groups, key=lambda group: (GROUP_KINDS.index(group.kind), group.slots)))


@pytest.mark.parametrize("changes, expected", [
    (dict(num_layers=4, pp=1), (4,)),
    (dict(num_layers=8, pp=4), (2, 2, 2, 2)),
    (dict(num_layers=8, pp=2, vpp=2), (4, 4)),
    (dict(num_layers=44, pp=8, first_stage_layers=4, last_stage_layers=4), (4, 6, 6, 6, 6, 6, 6, 4)),
    (dict(num_layers=8, pp=4, first_stage_layers=1, last_stage_layers=3), (1, 2, 2, 3)),
])
def test_layers_of_each_stage(changes: dict, expected: tuple[int, ...]) -> None:
    config = dataclasses.replace(Config(profile="x"), **changes)
    assert stage_layers(config) == expected


def test_grid_of_a_config() -> None:
    config = Config(profile="x", tp=2, pp=4, dp=3)
    assert grid_of(config) == Grid(tp=2, pp=4, dp=3)
    assert grid_of(config).job_size == config.job_size
