"""Whether moves leave anything behind: what is there after one move against what is there a cycle of moves later.

After both the same host is the spare one and all that the move made useless has been closed. Owns what "flat" means.
NumPy only.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.device_memory import Sample
from analysis.gpu_figures import DEVICE_SLACK_MIB, THREAD_SLACK
from analysis.gpu_moves import pause_of
from analysis.log import Run
from analysis.moves import MoveFigures
from analysis.results import Figure, format_value

_RSS_AT_MOST = 1.05
# How many a process has depends on its slot and on which hosts its groups' members are on, so the mean is judged, and
# of one process only what would be two a move.
_FDS_MEAN_AT_MOST, _FDS_AT_MOST = 1, 8
_LAST_PART = 0.3  # of the time after a move: the samples of it that count
# Of a process, on its GPU: a communicator or two that are not closed yet when it is looked at. A generation that was
# left behind would be ten times as much.
_LATE_MIB = 100
_WHEN = "in the last four moves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """After a move: the last iteration of each slot, and MiB in use on each GPU."""

    rows: np.ndarray
    device_mib: dict[int, float]

    def by_process(self, column: str) -> dict[int, int]:
        return {int(row["world_rank"]): int(row[column]) for row in self.rows}

    @property
    def groups(self) -> dict[int, int]:
        """Communicators of each slot."""
        return {int(row["slot"]): int(row["num_groups"]) for row in self.rows}


def look_after(run: Run, samples: Sequence[Sample], moves: Sequence[MoveFigures], index: int) -> Settled:
    """What was there at the end of the time between the move `index` and the next one, or the end of the run."""
    begins_s = pause_of(run, moves[index])[1]
    done_s = run.iterations["start_s"] + run.iterations["time_s"]
    ends_s = moves[index + 1].requested_s if index + 1 < len(moves) else float(done_s.max())
    inside = run.iterations[(run.iterations["start_s"] >= begins_s) & (done_s <= ends_s)]
    rows = [inside[inside["slot"] == slot][-1] for slot in run.slots if (inside["slot"] == slot).any()]
    late_s = ends_s - _LAST_PART * (ends_s - begins_s)
    late = [(gpu, used) for at_s, gpu, used in samples if late_s <= at_s <= ends_s]
    return Settled(rows=np.array(rows, dtype=run.iterations.dtype), device_mib={
        gpu: float(np.median([used for other, used in late if other == gpu])) for gpu in sorted({g for g, _ in late})})


def flatness_figures(before: Settled, after: Settled, *, on_gpu: bool,
                     processes_a_gpu: int) -> tuple[list[Figure], str]:
    """(figures, what grew; empty if nothing)."""
    fds = before.by_process("num_fds"), after.by_process("num_fds")
    figures = [_growth("descriptors", *fds, _FDS_AT_MOST),
               _growth("descriptors, mean of all processes", *fds, _FDS_MEAN_AT_MOST, of=statistics.fmean),
               _growth("threads", before.by_process("num_threads"), after.by_process("num_threads"), THREAD_SLACK),
               _growth("communicators of a slot", before.groups, after.groups, 0),
               _rss(before.by_process("rss_bytes"), after.by_process("rss_bytes"))]
    if on_gpu:  # else it is the machine's memory, whoever uses it
        figures.append(_growth("memory of a GPU", before.device_mib, after.device_mib,
                               _LATE_MIB * processes_a_gpu, "MiB"))
        figures.append(_growth("tensors of a process", _mib(before), _mib(after), DEVICE_SLACK_MIB, "MiB"))
    grown = [figure for figure in figures if figure.met is False]
    return figures, "; ".join(f"{figure.name}: {format_value(figure.value)}" for figure in grown)


def _mib(settled: Settled) -> dict[int, float]:
    return {rank: value / 2**20 for rank, value in settled.by_process("device_bytes").items()}


def _growth(what: str, before: dict[int, float] | dict[int, int], after: dict[int, float] | dict[int, int],
            at_most: float, unit: str = "", of: Callable[[list[float]], float] = max) -> Figure:
    """The most of any that is in both, or what `of` makes of them; None, which is not flat, where there is none."""
    grown = [after[key] - before[key] for key in before if key in after]
    return Figure(name=f"{what}, grown {_WHEN}", value=of(grown) if grown else None, unit=unit, at_most=at_most)


def _rss(before: dict[int, int], after: dict[int, int]) -> Figure:
    most = max((after[key] / before[key] for key in before if key in after), default=None)
    return Figure(name=f"resident memory of a process, grown {_WHEN}", value=most, unit="x", at_most=_RSS_AT_MOST)
