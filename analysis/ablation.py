"""What the arms of a move cost beside each other, from the log of one job in which they took turns.

Owns the figures of an arm, the targets, and how they are shown. Medians over the moves of an arm; each figure of a move
is from spans (moves.py). The peer `save_and_restart` comes from restart_arm.py, in runs of its own.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.log import Run
from analysis.moves import BYTES_PER_GB, MoveFigures, compute_moves
from analysis.results import Figure
from analysis.tables import format_bytes, format_ratio, format_s, format_table, format_targets
from migration.errors import UserError

RESTART = "save_and_restart"
_OVER_RESTART = {"GPU": 100.0, "CPU": 20.0}
_OVER_NAIVE = 10.0
MOST_ITERATIONS = 0.1
_MOST_ITERATIONS_ALONE = 0.02  # a job of one rank on a GPU: no group has to be switched
MOST_WHILE_STREAMING = 1.05
_MOST_FIRST = 1.05
MOST_PARKED = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """Medians over the moves of one arm; times in seconds, bytes of one leaver. `pause`: the longest span of each name
    inside the switchover."""

    arm: str
    num_moves: int
    downtime_s: float
    downtime_max_s: float
    downtime_iterations: float
    setup_s: float
    total_s: float
    preparing_ratio: float | None  # iterations beside the preparation over undisturbed ones; None: there were none
    first_iteration_ratio: float
    pause_bytes: int
    ahead_bytes: int
    pause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The whole table. `restarts`: (name, its parts in seconds)."""

    profile: str
    device: str  # CPU or GPU
    job_size: int
    iteration_s: float  # undisturbed median of the job
    arms: list[ArmFigures]
    downtimes_s: dict[str, list[float]]  # of every move
    restarts: list[tuple[str, dict[str, float]]]
    targets: list[Figure]


def compute_ablation(run: Run, num_moves: int, restarts: Sequence[tuple[str, dict[str, float]]]) -> Ablation:
    """Raises UserError unless all `num_moves` moves were committed."""
    return build_ablation(run, committed_moves(run, num_moves), restarts)


def build_ablation(run: Run, moves: Sequence[MoveFigures],
                   restarts: Sequence[tuple[str, dict[str, float]]]) -> Ablation:
    """Of these moves, all of them committed. Raises UserError where no iteration was free of them."""
    iteration_s = undisturbed_s(moves[0])
    names = list(dict.fromkeys(move.arm for move in moves))
    arms = [_compute_arm(name, [move for move in moves if move.arm == name]) for name in names]
    device = "GPU" if int(run.iterations["device_bytes"].max()) else "CPU"
    job_size = len(run.slots)
    return Ablation(profile=str(run.config["profile"]), device=device, job_size=job_size, iteration_s=iteration_s,
                    arms=arms, restarts=list(restarts),
                    downtimes_s={name: [move.downtime_s or 0.0 for move in moves if move.arm == name]
                                 for name in names},
                    targets=_compute_targets(arms, restarts, device, job_size, moves))


def committed_moves(run: Run, num_moves: int) -> list[MoveFigures]:
    """All moves of the run. Raises UserError, with what went wrong first, unless there are so many committed ones."""
    moves = compute_moves(run)
    failed = [move for move in moves if move.outcome != "COMMITTED"]
    if failed or len(moves) != num_moves:
        why = f"; move {failed[0].request} {failed[0].outcome}: {failed[0].reason}" if failed else ""
        raise UserError(f"{run.path}: {len(moves) - len(failed)} of {num_moves} moves were committed{why}")
    return moves


def undisturbed_s(move: MoveFigures) -> float:
    """Of the run that the move belongs to. Raises UserError where moves were so dense that no iteration was free."""
    if move.undisturbed_s is None:
        raise UserError("no iteration of the job was undisturbed: give moves more room (--spacing)")
    return move.undisturbed_s


def _compute_arm(name: str, moves: list[MoveFigures]) -> ArmFigures:
    iteration_s = undisturbed_s(moves[0])
    downtimes_s = [move.downtime_s or 0.0 for move in moves]
    downtime_s = statistics.median(downtimes_s)
    slowdowns = [move.preparing.median_slowdown for move in moves
                 if move.preparing is not None and move.preparing.median_slowdown is not None]
    return ArmFigures(
        arm=name, num_moves=len(moves), downtime_s=downtime_s, downtime_max_s=max(downtimes_s),
        downtime_iterations=downtime_s / iteration_s, setup_s=statistics.median(m.setup_s or 0.0 for m in moves),
        total_s=statistics.median(move.total_s or 0.0 for move in moves),
        preparing_ratio=1 + statistics.median(slowdowns) if slowdowns else None,
        first_iteration_ratio=statistics.median(move.first_iteration_s or 0.0 for move in moves) / iteration_s,
        pause_bytes=int(statistics.median(move.bytes / len(move.assignments) for move in moves)),
        ahead_bytes=int(statistics.median(move.ahead_bytes / len(move.assignments) for move in moves)),
        pause=_pause(moves))


def _pause(moves: list[MoveFigures]) -> dict[str, float]:
    """What a switchover consists of: spans of SWITCHING that lie in it, medians of the longest, the longest first."""
    spans: dict[str, list[float]] = {}
    for move in moves:
        for span in move.spans:
            if span.phase == "SWITCHING" and span.name not in ("digest_state", "gradients"):  # these are before it
                spans.setdefault(span.name, []).append(span.longest_s)
    medians = {name: statistics.median(times) for name, times in spans.items()}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def compute_parked(moves: Sequence[MoveFigures]) -> float | None:
    """Downtime over what it must hold where old communicators are parked to make room: connecting one group, and the
    pause's bytes at the measured rate. Median over such moves; None if there are none."""
    ratios = []
    for move in moves:
        connects_s = [cost.median_s for cost in move.stages if (cost.switch, cost.stage) == ("parked", "connect")]
        if connects_s and move.transfer_gb_per_s and move.downtime_s is not None:
            bytes_s = move.bytes / (move.transfer_gb_per_s * BYTES_PER_GB)
            ratios.append(move.downtime_s / (connects_s[0] + bytes_s))
    return statistics.median(ratios) if ratios else None


def _compute_targets(arms: list[ArmFigures], restarts: Sequence[tuple[str, dict[str, float]]], device: str,
                     job_size: int, moves: Sequence[MoveFigures]) -> list[Figure]:
    by_name = {arm.arm: arm for arm in arms}
    if (full := by_name.get("full")) is None:
        return []
    parked = compute_parked([move for move in moves if move.arm == "full"])
    most = _MOST_ITERATIONS_ALONE if (device, job_size) == ("GPU", 1) else MOST_ITERATIONS
    pause = (Figure(name="full: downtime over an iteration", value=full.downtime_iterations, at_most=most, unit="x")
             if parked is None else
             Figure(name="full, parked: downtime over connecting one group and the pause's bytes", value=parked,
                    at_most=MOST_PARKED, unit="x"))
    targets = [pause,
               Figure(name="full: iterations while preparing over undisturbed", value=full.preparing_ratio,
                      at_most=MOST_WHILE_STREAMING, unit="x"),
               Figure(name="full: first iteration after the switch over undisturbed",
                      value=full.first_iteration_ratio, at_most=_MOST_FIRST, unit="x")]
    if "naive" in by_name:
        targets.append(Figure(name="downtime, naive over full", value=by_name["naive"].downtime_s / full.downtime_s,
                              at_least=_OVER_NAIVE, unit="x"))
    return targets + [Figure(name=f"downtime, {name} over full", value=parts["total_s"] / full.downtime_s,
                             at_least=_OVER_RESTART[device], unit="x") for name, parts in restarts]


def format_ablation(found: Ablation) -> str:
    rows = [[arm.arm, str(arm.num_moves), format_s(arm.downtime_s), format_s(arm.downtime_max_s),
             format_ratio(arm.downtime_iterations), format_s(arm.setup_s), format_ratio(arm.preparing_ratio),
             format_ratio(arm.first_iteration_ratio), format_bytes(arm.ahead_bytes), format_bytes(arm.pause_bytes)]
            for arm in found.arms]
    rows += [[name, "", format_s(parts["total_s"]), "", format_ratio(parts["total_s"] / found.iteration_s),
              "-", "-", "-", "-", format_bytes(int(parts["num_bytes"]))] for name, parts in found.restarts]
    header = ["arm", "moves", "downtime", "longest", "in iterations", "setup", "iterations meanwhile",
              "first iteration", "sent ahead", "in the pause"]
    blocks = [f"ablation: {found.profile}, {found.job_size} slots, {found.device}; an undisturbed iteration takes "
              f"{format_s(found.iteration_s)}; medians, bytes of one process",
              format_table(header, rows)]
    blocks += ["what the pause consists of, the longest of each (they overlap):",
               "\n".join(f"  {arm.arm}: " + ", ".join(f"{name} {format_s(time_s)}" for name, time_s in
                                                     list(arm.pause.items())[:6]) for arm in found.arms)]
    for name, parts in found.restarts:
        blocks.append(f"  {name}: " + ", ".join(f"{part.removesuffix('_s')} {format_s(time_s)}" for part, time_s in
                                                parts.items() if part.endswith("_s") and part != "total_s"))
    if found.targets:
        blocks += ["targets:", format_targets(found.targets)]
    return "\n".join(blocks)


def ablation_json(found: Ablation) -> dict[str, Any]:
    rows = dataclasses.asdict(found)
    return {**rows, "targets": [{**dataclasses.asdict(target), "met": target.met} for target in found.targets]}


def draw_ablation(found: Ablation, path: Path) -> None:
    """Downtimes on a logarithmic scale, a point for each move; an iteration as a line."""
    from matplotlib.figure import Figure as Picture  # takes a second to load
    picture = Picture(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = picture.subplots()
    names = [*found.downtimes_s, *(name for name, _ in found.restarts)]
    times_s = [*found.downtimes_s.values(), *([parts["total_s"]] for _, parts in found.restarts)]
    for place, (name, of_moves) in enumerate(zip(names, times_s, strict=True)):
        middle = statistics.median(of_moves)
        axes.bar(place, middle, color="#9ecae1", width=0.6)
        axes.plot([place] * len(of_moves), of_moves, "o", color="#08519c", markersize=3, alpha=0.7)
        axes.annotate(format_s(middle), (place, max(of_moves)), ha="center", va="bottom", fontsize=9)
    axes.axhline(found.iteration_s, color="#b30000", linewidth=1, linestyle=":")
    axes.annotate("an iteration", (len(names) - 0.5, found.iteration_s), ha="right", va="bottom", color="#b30000",
                  fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("downtime (s)")
    axes.set_title(f"{found.profile} on {found.device}: downtime by arm", loc="left")
    picture.savefig(path)
