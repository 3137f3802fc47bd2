"""A slowed process in the log of a run: who worked how long by itself, when it was named, and what a move changed.

Owns these figures. What is a straggler decides migration/straggler.py, while the job runs.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.log import Run, text
from analysis.measures import job_iterations
from analysis.moves import compute_moves
from analysis.tables import format_s, format_table
from migration.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Undisturbed iterations of one part of the run; medians, seconds. `own_s`: by slot."""

    name: str
    first: int
    last: int
    iteration_s: float
    own_s: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """`told` and `slowed`: as the run said it. `named_at`: the iteration that was running then, -1 if never."""

    profile: str
    slowed: str
    told: list[str]
    slowed_at: int
    named_at: int
    moved_at: int
    stretches: list[Stretch]


def compute_straggling(run: Run) -> Straggling:
    """Raises UserError if the run has no process that was slowed on purpose."""
    slowed = [text(event["text"]) for event in run.events if event["kind"] == b"slow"]
    if not slowed:
        raise UserError(f"{run.path}: no process was slowed; did the run come to the iteration of --slow?")
    slowed_at = min(_iteration_at(run, event["time_s"]) for event in run.events if event["kind"] == b"slow")
    named = [event for event in run.events if event["kind"] == b"straggler"]
    moves = [move.iteration for move in compute_moves(run) if move.iteration is not None]
    last = int(run.iterations["iteration"].max())
    moved_at = moves[0] if moves else -1
    ends = [("before", 1, slowed_at - 1), ("slow", slowed_at, moved_at - 1 if moves else last)]
    ends += [("moved", moved_at + 1, last)] if moves else []
    stretches = [stretch for name, first, end in ends if (stretch := _stretch(run, name, first, end)) is not None]
    return Straggling(profile=str(run.config["profile"]), slowed=slowed[0], told=[text(e["text"]) for e in named],
                      slowed_at=slowed_at, named_at=_iteration_at(run, named[0]["time_s"]) if named else -1,
                      moved_at=moved_at, stretches=stretches)


def _iteration_at(run: Run, time_s: float) -> int:
    """The first iteration that some slot began after `time_s`."""
    later = run.iterations["iteration"][run.iterations["start_s"] >= time_s]
    return int(later.min()) if len(later) else int(run.iterations["iteration"].max()) + 1


def _stretch(run: Run, name: str, first: int, last: int) -> Stretch | None:
    rows = run.iterations[(run.iterations["iteration"] >= first) & (run.iterations["iteration"] <= last)
                          & (run.iterations["disturbed"] == 0)]
    times = job_iterations(run)
    times = times[np.isin(times["iteration"], rows["iteration"])]
    if not len(rows):
        return None
    return Stretch(name=name, first=first, last=last, iteration_s=float(np.median(times["longest_s"])),
                   own_s={slot: float(np.median(rows["own_s"][rows["slot"] == slot]))
                          for slot in sorted(set(rows["slot"].tolist()))})


def format_straggling(found: Straggling) -> str:
    slots = sorted({slot for stretch in found.stretches for slot in stretch.own_s})
    rows = [[f"{stretch.name} ({stretch.first}-{stretch.last})", format_s(stretch.iteration_s),
             *(format_s(stretch.own_s.get(slot)) for slot in slots)] for stretch in found.stretches]
    named = (f"named in iteration {found.named_at}, {found.named_at - found.slowed_at} after it got slow"
             if found.told else "nobody was named")
    moved = f"; moved away before iteration {found.moved_at}" if found.moved_at >= 0 else ""
    return "\n".join([f"straggler: {found.profile}; {found.slowed}", *(f"  {told}" for told in found.told),
                      f"  {named}{moved}", "own work an iteration, medians of undisturbed iterations:",
                      format_table(["iterations", "an iteration", *(f"slot {slot}" for slot in slots)], rows)])


def straggling_json(found: Straggling) -> dict[str, Any]:
    return dataclasses.asdict(found)
