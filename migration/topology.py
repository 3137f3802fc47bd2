"""The job's grid: which slot sits where, and which slots share a process group.

Owns Megatron's default rank order tp-cp-ep-dp-pp, with cp and ep of 1: slot = tp_i + tp * (dp_i + dp * pp_i). The grid
is one tensor of slots and each kind of group is an index expression on it.
Pure: standard library and numpy. Must not know of processes, hosts, torch or communicators: a slot is only a place.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from migration.config import Config

# The order in which groups are listed everywhere. Every member of a group has to make its communicators in one order.
GROUP_KINDS = ("world", "tp", "dp", "pp", "tp_pp", "tp_dp", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Place of one slot along each axis of the grid, 0-based."""

    tp: int
    dp: int
    pp: int

    def __str__(self) -> str:
        return f"tp{self.tp} dp{self.dp} pp{self.pp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The slots that share one process group, ascending, so that a group_rank is an index in `slots`."""

    kind: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The sizes of the three axes."""

    tp: int
    pp: int
    dp: int

    @property
    def job_size(self) -> int:
        """Number of slots."""
        return self.tp * self.pp * self.dp

    def slots(self) -> np.ndarray:
        """All slots, shape (pp, dp, tp), int64: the last axis is the one that changes fastest in slot order."""
        return np.arange(self.job_size).reshape(self.pp, self.dp, self.tp)

    def coordinates(self, slot: int) -> Coordinates:
        """Raises IndexError for a slot outside the grid."""
        if not 0 <= slot < self.job_size:
            raise IndexError(f"slot {slot} is outside the grid of {self.job_size} slots")
        pp, dp, tp = np.unravel_index(slot, (self.pp, self.dp, self.tp))
        return Coordinates(tp=int(tp), dp=int(dp), pp=int(pp))

    def slot_at(self, *, tp: int, dp: int, pp: int) -> int:
        """Raises IndexError for coordinates outside the grid, negative ones too."""
        if not (0 <= tp < self.tp and 0 <= dp < self.dp and 0 <= pp < self.pp):
            raise IndexError(f"tp{tp} dp{dp} pp{pp} is outside the grid TP{self.tp} x PP{self.pp} x DP{self.dp}")
        return int(self.slots()[pp, dp, tp])

    def groups(self) -> tuple[Group, ...]:
        """Every group, ordered by kind as in GROUP_KINDS and then by lowest slot; groups of one slot are included.

        `tp_pp` is Megatron's model-parallel group, `embedding` the holders of the word embeddings: first and last
        stage of each pipeline, or its only stage.
        """
        slots = self.slots()
        stages_with_embeddings = [0, -1] if self.pp > 1 else [0]
        # one row of each table is one group
        tables = {
            "world": slots.reshape(1, -1),
            "tp": slots.reshape(-1, self.tp),
            "dp": slots.transpose(0, 2, 1).reshape(-1, self.dp),
            "pp": slots.transpose(1, 2, 0).reshape(-1, self.pp),
            "tp_pp": slots.transpose(1, 0, 2).reshape(self.dp, -1),
            "tp_dp": slots.reshape(self.pp, -1),
            "embedding": slots[stages_with_embeddings].transpose(1, 2, 0).reshape(-1, len(stages_with_embeddings)),
        }
        return tuple(Group(kind=kind, slots=tuple(row)) for kind in GROUP_KINDS for row in tables[kind].tolist())


def grid_of(config: Config) -> Grid:
    return Grid(tp=config.tp, pp=config.pp, dp=config.dp)


def pipeline_role(config: Config, slot: int) -> str:
    """What a slot's stage is to its pipeline: first, middle, last, or only. Stages of one role run the same kernels."""
    stage = grid_of(config).coordinates(slot).pp
    if config.pp == 1:
        return "only"
    return "first" if stage == 0 else "last" if stage == config.pp - 1 else "middle"


def slots_of_roles(config: Config) -> dict[str, int]:
    """Every role that the job's pipelines have, and the lowest slot that has it."""
    found: dict[str, int] = {}
    for slot in range(config.job_size):
        found.setdefault(pipeline_role(config, slot), slot)
    return found


def stage_layers(config: Config) -> tuple[int, ...]:
    """Number of transformer layers on each pipeline stage, all its model chunks together.

    `config` must be valid (config.validate): the divisions here leave no rest then.
    """
    if not config.first_stage_layers:
        return (config.num_layers // config.pp,) * config.pp
    num_middle = config.num_layers - config.first_stage_layers - config.last_stage_layers
    middle = (num_middle // (config.pp - 2),) * (config.pp - 2)
    return (config.first_stage_layers, *middle, config.last_stage_layers)
