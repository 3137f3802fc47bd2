"""Downtime by the number of processes that leave a host together."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.ablation import committed_moves, undisturbed_s
from analysis.log import Run
from analysis.tables import format_bytes, format_ratio, format_s, format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """Moves of `num_leavers` processes; medians, seconds; bytes of all of them together."""

    num_leavers: int
    num_moves: int
    downtime_s: float
    downtimes_s: list[float]
    setup_s: float
    num_groups_rebuilt: int
    pause_bytes: int
    ahead_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    profile: str
    iteration_s: float
    rows: list[ScaleRow]


def compute_scale(run: Run, numbers: Sequence[int]) -> Scale:
    """`numbers`: how many processes each move was to take. Raises UserError unless all were committed."""
    moves = committed_moves(run, len(numbers))
    rows = []
    for number in sorted(set(numbers)):
        some = [move for move in moves if len(move.assignments) == number]
        assert len(some) == list(numbers).count(number), f"{len(some)} moves took {number} processes"
        downtimes_s = [move.downtime_s or 0.0 for move in some]
        rows.append(ScaleRow(
            num_leavers=number, num_moves=len(some), downtime_s=statistics.median(downtimes_s),
            downtimes_s=downtimes_s, setup_s=statistics.median(move.setup_s or 0.0 for move in some),
            num_groups_rebuilt=max(move.num_groups_rebuilt for move in some),
            pause_bytes=int(statistics.median(move.bytes for move in some)),
            ahead_bytes=int(statistics.median(move.ahead_bytes for move in some))))
    return Scale(profile=str(run.config["profile"]), iteration_s=undisturbed_s(moves[0]), rows=rows)


def format_scale(found: Scale) -> str:
    rows = [[str(row.num_leavers), str(row.num_moves), format_s(row.downtime_s), format_s(max(row.downtimes_s)),
             format_ratio(row.downtime_s / found.iteration_s), format_s(row.setup_s), str(row.num_groups_rebuilt),
             format_bytes(row.ahead_bytes), format_bytes(row.pause_bytes)] for row in found.rows]
    return (f"scale_out_of_host: {found.profile}; an undisturbed iteration takes {format_s(found.iteration_s)}; "
            "medians\n" + format_table(["processes", "moves", "downtime", "longest", "in iterations", "setup",
                                        "groups rebuilt", "sent ahead", "in the pause"], rows))


def scale_json(found: Scale) -> dict[str, Any]:
    return dataclasses.asdict(found)


def draw_scale(found: Scale, path: Path) -> None:
    """A point for each move, a line through the medians."""
    from matplotlib.figure import Figure as Picture  # takes a second to load
    picture = Picture(figsize=(7, 4), dpi=130, layout="constrained")
    axes = picture.subplots()
    for row in found.rows:
        axes.plot([row.num_leavers] * row.num_moves, [1e3 * time_s for time_s in row.downtimes_s], "o",
                  color="#08519c", markersize=3, alpha=0.7)
    axes.plot([row.num_leavers for row in found.rows], [1e3 * row.downtime_s for row in found.rows], color="#08519c")
    axes.set(xlabel="processes that leave together", ylabel="downtime (ms)", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{found.profile}: downtime by processes moved", loc="left")
    picture.savefig(path)
