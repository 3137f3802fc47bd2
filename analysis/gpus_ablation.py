"""The ablation of bench_gpus.py: a move by each arm in one job with a large state, then a save and restart of that job.

The job is stopped, with a checkpoint, when the last arm has been seen or its time is up, and that is where the restart
goes on: nothing is started that isn't measured. What is there when something fails is still a result.
"""
from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from analysis.ablation import RESTART, Ablation, build_ablation
from analysis.bench_parts import Bench
from analysis.gpu_moves import Arm, RunFailed, figures_of
from analysis.gpus_model import LEAST_STATE_BYTES, Model
from analysis.gpus_plan import HOSTS_SWAPPED, Layout
from analysis.log import read_run
from analysis.moves import BYTES_PER_GB, compute_moves
from analysis.restart_arm import compute_times
from analysis.results import Figure, Section
from migration.errors import UserError
from migration.versions import CODE_ROOT

# What matters most comes first, should the time not do for all. Training waits for the naive one at its iteration, by
# which every move before it would have to be through: so none is.
ARMS = ("naive", "full", "two_stage+warmup", "two_stage")
TITLE = "All arms"
_FIRST, _SPACING = 4, 2   # iterations; a move that is late comes as soon as it can
_ITERATIONS = 10_000      # it is stopped before
_DEADLINES = ("--switch-deadline", "120", "--heartbeat-timeout", "60", "--orphan-timeout", "120")
_LOOK_S, _STOP_S = 0.5, 60.0
_RESTART_SHARE = 0.5      # of the part's time, where there is no model to tell


def ablation(bench: Bench, layout: Layout, job: Callable[[int], tuple[str, ...]],
             model: Model | None) -> Iterable[Section]:
    """`job`: the harness's arguments for so many iterations. `model`: what they say, None on a CPU. The section is
    there again when the restart has been measured."""
    checkpoints = bench.runs / "ablation" / "checkpoints"
    share = model.restart_s / model.seconds if model else _RESTART_SHARE
    moves_end_s = time.monotonic() + bench.left_s(580.0) * (1 - share * bench.args.restart)
    told = _told(layout, model)
    try:
        arm = bench.train("ablation", (*layout.launch(), *job(_ITERATIONS), *build_requests(), *_DEADLINES,
                                       "--checkpoints", str(checkpoints)),
                          beside=lambda run, has_ended: _stop_when_done(run, has_ended, moves_end_s))
    except RunFailed as error:  # the arms that came so far are still worth having
        try:
            begun = read_run(bench.runs / "ablation")
        except UserError:  # none came
            raise error from None
        left = Arm(run=begun, command="", samples=[], ended_s=time.time())
        yield _section(bench, left, (), layout, told, failed=str(error))
        return
    yield _section(bench, arm, (), layout, told)
    if bench.args.restart:
        times = _restart(bench, arm, layout, job, checkpoints)
        yield _section(bench, arm, ((RESTART, times),), layout, told)


def build_requests() -> list[str]:
    """Arguments of the moves, to and fro, one after the other without a gap."""
    there_and_back = ("b1->b3", "b3->b1")
    asked = (part for index in range(len(ARMS))
             for part in ("--vacate", f"{there_and_back[index % 2]}@{_FIRST + _SPACING * index}"))
    return [*asked, "--lead", "2", "--arm", ",".join(ARMS)]


def _stop_when_done(run: Path, has_ended: Callable[[], bool], ends_s: float) -> None:
    """Ask the job to save and end once every move has ended, or at `ends_s` (monotonic). Raises RunFailed."""
    while not has_ended() and time.monotonic() < ends_s and _num_ended(run) < len(ARMS):
        time.sleep(_LOOK_S)
    if has_ended():
        return
    command = [sys.executable, "harness.py", "stop", "--run", str(run)]
    done = subprocess.run(command, cwd=CODE_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=_STOP_S)
    if done.returncode:
        raise RunFailed(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def _num_ended(run: Path) -> int:
    try:
        return int((read_run(run).moves["move"] >= 0).sum())
    except UserError:  # a log is only being made; one that stays unreadable is told when the run has ended
        return 0


def _restart(bench: Bench, arm: Arm, layout: Layout, job: Callable[[int], tuple[str, ...]],
             checkpoints: Path) -> dict[str, float]:
    """The parts of a start from the job's checkpoint, with b1's processes on b3: every process anew, nothing shared."""
    assert arm.run.result is not None
    iteration = int(arm.run.result["checkpoints"][-1]["iteration"])
    try:
        after = bench.train("restart", (*layout.launch(HOSTS_SWAPPED), *job(iteration + 2), *_DEADLINES,
                                        "--no-shared-imports", "--load", str(checkpoints)))
    finally:
        shutil.rmtree(checkpoints)  # tens of GB, and of no use any more
    times = compute_times(arm.run, after.run, iteration, arm.ended_s)
    return {**dataclasses.asdict(times), "total_s": times.total_s}


def _section(bench: Bench, arm: Arm, restarts: tuple[tuple[str, dict[str, float]], ...], layout: Layout,
             told: tuple[str, ...], failed: str = "") -> Section:
    """Of the moves that were committed. `failed`: why the job didn't end as it should."""
    moves = compute_moves(arm.run)
    committed = [move for move in moves if move.outcome == "COMMITTED"]
    lost = [f"{move.arm or move.request}: {move.outcome}: {move.reason}" for move in moves if move not in committed]
    missing = set(ARMS) - {move.arm for move in moves}
    problem = "; ".join(filter(None, [failed, *lost, *(f"{name}: no time" for name in ARMS if name in missing)]))
    commands = [arm.command] if arm.command else []
    if not committed:
        return bench.section(TITLE, [], *commands, problem=problem, notes=told)
    found = build_ablation(arm.run, committed, restarts)
    figures = [figure for move in committed for figure in figures_of(arm, move, move.arm)]
    figures += _restart_figures(found) + found.targets
    sent = max(row.pause_bytes for row in found.arms) / BYTES_PER_GB
    figures.append(Figure(name="state of a rank, as sent in one piece", value=sent, unit="GB",
                          at_least=LEAST_STATE_BYTES / BYTES_PER_GB if layout.processes_a_gpu == 1 else None))
    return bench.section(TITLE, figures, *commands, problem=problem, notes=told)


def _restart_figures(found: Ablation) -> list[Figure]:
    figures = []
    for name, parts in found.restarts:
        values: list[tuple[str, Any, str]] = [("downtime", parts["total_s"] * 1e3, "ms"),
                                              ("downtime over an iteration", parts["total_s"] / found.iteration_s, "x"),
                                              ("checkpoint", parts["num_bytes"] / 1e6, "MB")]
        values += [(f"restart, {part.removesuffix('_s')}", time_s, "s") for part, time_s in parts.items()
                   if part.endswith("_s") and part != "total_s"]
        figures += [Figure(name=what, value=value, unit=unit, column=name) for what, value, unit in values]
    return figures


def _told(layout: Layout, model: Model | None) -> tuple[str, ...]:
    gaps = "The moves follow each other without a gap."
    if model is None:
        return "A small model: there is no GPU.", gaps
    few = "" if model.state_bytes >= LEAST_STATE_BYTES else "Less than 20 GB: so much memory isn't free here."
    shared = "Processes share GPUs: slowdowns bind nobody." if layout.processes_a_gpu > 1 else ""
    return f"{layout.shapes[0].name}, {model.describe()}.", few, gaps, shared
