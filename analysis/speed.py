"""What is left of a job's speed when a move is made every so many iterations.

Owns the efficiency: what the iterations would have taken undisturbed, over what they took. Both are of one run, whose
undisturbed iterations lie between the moves: their mean, since a sum of times is compared with a sum of times.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.ablation import committed_moves
from analysis.log import Run
from analysis.measures import job_iterations
from analysis.results import Figure
from analysis.tables import format_s, format_targets
from migration.errors import UserError

_LEAST = 0.995
_TURNS = 2  # iterations after the switch that count as the move's


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of the whole run, job-wide, the first iteration left out."""

    profile: str
    every: int
    num_moves: int
    num_iterations: int
    num_undisturbed: int
    undisturbed_s: float  # mean of an undisturbed iteration
    wall_s: float
    preparing_s: float  # lost in iterations beside a preparation
    pause_s: float  # lost in the iteration in which membership changed
    after_s: float  # lost in the two iterations after it
    downtime_s: float  # of all moves, from their spans
    efficiency: float

    @property
    def target(self) -> Figure:
        return Figure(name="efficiency", value=self.efficiency, at_least=_LEAST)


def compute_speed(run: Run, num_moves: int, every: int) -> Speed:
    """Raises UserError unless all moves were committed, and where no iteration was undisturbed."""
    moves = committed_moves(run, num_moves)
    times = job_iterations(run)
    # From the end of the one before it to its own, so that nothing falls between two, not even where no process has
    # logged the whole iteration: a joiner's begins at the cut. The first warms up.
    lasted_s, times = np.diff(times["end_s"]), times[1:]
    switched = np.array([move.iteration for move in moves if move.iteration is not None])
    cuts = switched - 1  # of an arm that cuts, the pause lies in the iteration before
    after = np.isin(times["iteration"], [at + turn for at in switched for turn in range(1, _TURNS + 1)])
    paused = np.isin(times["iteration"], np.concatenate([switched, cuts]))
    beside = times["disturbed"] & ~paused & ~after
    free = ~(paused | beside | after)
    if not free.any():
        raise UserError(f"{run.path}: no iteration was undisturbed; make moves rarer (--every)")
    usual_s = float(lasted_s[free].mean())

    def lost(which: np.ndarray) -> float:
        return float(lasted_s[which].sum() - usual_s * which.sum())

    wall_s = float(lasted_s.sum())
    return Speed(profile=str(run.config["profile"]), every=every, num_moves=len(moves), num_iterations=len(times),
                 num_undisturbed=int(free.sum()), undisturbed_s=usual_s, wall_s=wall_s, preparing_s=lost(beside),
                 pause_s=lost(paused), after_s=lost(after), downtime_s=sum(move.downtime_s or 0.0 for move in moves),
                 efficiency=usual_s * len(times) / wall_s)


def format_speed(found: Speed) -> str:
    return "\n".join([
        f"rebalance: {found.profile}, a move every {found.every} iterations, {found.num_moves} moves in "
        f"{found.num_iterations} iterations",
        f"  an undisturbed iteration      {format_s(found.undisturbed_s)}, mean of {found.num_undisturbed}",
        f"  all iterations                {format_s(found.wall_s)}",
        f"  lost beside preparations      {format_s(found.preparing_s)}",
        f"  lost where membership changed {format_s(found.pause_s)}, {format_s(found.downtime_s)} of downtime by spans",
        f"  lost in the {_TURNS} after it        {format_s(found.after_s)}",
        "targets:", format_targets([found.target])])


def speed_json(found: Speed) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "target": {**dataclasses.asdict(found.target), "met": found.target.met}}
