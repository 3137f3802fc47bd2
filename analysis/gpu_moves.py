"""Whole runs with moves, and the figures that their logs give. Knows nothing of GPUs' insides.

Each run is compared with an undisturbed one, bit for bit; memory is sampled beside it.
"""
from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.compare import compare_runs
from analysis.device_memory import MemorySampler, Sample, peak_by_phase
from analysis.log import Run, read_run
from analysis.measures import job_iterations
from analysis.moves import MoveFigures, compute_moves
from analysis.results import Figure
from migration.versions import CODE_ROOT

_GRACE_S = 20.0  # for a launcher that was told to end
PHASES = ("PREPARING", "READY", "SWITCHING")  # whose spans are figures

Beside = Callable[[Path, Callable[[], bool]], None]  # gets a run's folder, and whether the run has ended


class RunFailed(RuntimeError):
    """A run that didn't complete, or not in time; its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A run that has ended, and the memory that was in use beside it."""

    run: Run
    command: str
    samples: list[Sample]
    ended_s: float  # unix, of the last process

    def moves(self, num_moves: int) -> list[MoveFigures]:
        """All moves of the run. Raises RunFailed unless there are so many, all of them committed."""
        moves = compute_moves(self.run)
        if [move.outcome for move in moves] != ["COMMITTED"] * num_moves:
            raise RunFailed(f"{self.run.path}: {num_moves} committed moves were expected: "
                            f"{[(m.request, m.outcome, m.reason) for m in moves]}")
        return moves

    def only_move(self) -> MoveFigures:
        """Raises RunFailed if it wasn't committed."""
        return self.moves(1)[0]


def run_arm(folder: Path, arguments: Sequence[str], *, environment: Mapping[str, str], on_gpu: bool, timeout_s: float,
            beside: Beside | None = None) -> Arm:
    """`python harness.py arguments --run folder`. Raises RunFailed.

    `beside` is called as soon as the run is started; what it raises ends the run, and its time counts. What the run
    says goes to folder.said.
    """
    command = ["harness.py", *arguments, "--run", str(folder)]
    ends_s, said = time.monotonic() + timeout_s, folder.with_name(folder.name + ".said")
    said.parent.mkdir(parents=True, exist_ok=True)
    with MemorySampler(on_gpu=on_gpu) as sampler, said.open("wb") as output:
        process = subprocess.Popen([sys.executable, *command], cwd=CODE_ROOT, env={**os.environ, **environment},
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            if beside is not None:
                beside(folder, lambda: process.poll() is not None)
            process.wait(max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{shlex.join(command)} wasn't done after {timeout_s:.0f} s: {_last_words(said)}") from None
        finally:
            _end(process)
        ended_s = time.time()
    if process.returncode:
        raise RunFailed(f"{shlex.join(command)} ended with {process.returncode}: {_last_words(said)}")
    shown = [argument for argument in command if argument not in ("--run", str(folder))]
    return Arm(run=read_run(folder), command=f"python {shlex.join(shown)}", samples=sampler.samples, ended_s=ended_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of a run that isn't wanted any more: the launcher ends the job in order. Nothing, if it has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(said: Path) -> str:
    return said.read_text(errors="replace")[-1500:]


def inequality(arm: Arm, undisturbed: Run) -> str:
    """Where the arm's run first differs from the undisturbed one; empty if it is equal bit for bit."""
    verdict = compare_runs(arm.run, undisturbed)
    return "" if verdict.equal else f"{arm.run.path.name} isn't equal to the undisturbed run: {verdict.text}"


def move_figures(arm: Arm, name: str) -> list[Figure]:
    """The figures of its only move, in the column `name`."""
    return figures_of(arm, arm.only_move(), name)


def figures_of(arm: Arm, move: MoveFigures, name: str) -> list[Figure]:
    """The figures of one move of the run, in the column `name`."""
    iteration_s = move.undisturbed_s
    figures = [("iteration, undisturbed median", _ms(iteration_s), "ms"),
               ("setup, request to ready", move.setup_s, "s"),
               ("downtime", _ms(move.downtime_s), "ms"),
               ("downtime over an iteration", _ratio(move.downtime_s, iteration_s), "x"),
               ("groups rebuilt", move.num_groups_rebuilt, ""), ("groups kept", move.num_groups_kept, ""),
               ("state, ahead", move.ahead_bytes / 1e6, "MB"), ("state, in the pause", move.transfer_bytes / 1e6, "MB"),
               ("state, in the pause, all pairs", move.transfer_gb_per_s, "GB/s"),
               ("first iteration after the switch, over undisturbed", _ratio(move.first_iteration_s, iteration_s), "x"),
               *_stage_rows(move), *_slowdown_rows(arm.run, move),
               *((f"memory of the fullest GPU, {phase}", mib, "MiB")
                 for phase, mib in peak_by_phase(arm.samples, phases_of(arm.run, move)).items())]
    return [Figure(name=what, value=value, unit=unit, column=name) for what, value, unit in figures]


def _stage_rows(move: MoveFigures) -> list[tuple[str, float | str | None, str]]:
    """Each stage of the communicators, a group; then the spans of the move."""
    rows: list[tuple[str, float | str | None, str]] = []
    for cost in move.stages:
        name = f"communicators, {cost.stage} a group"
        rows += [(f"{name}, median", cost.median_s, "s"), (f"{name}, longest", cost.longest_s, "s"),
                 (f"{name}, device memory, whoever took it", cost.median_device_bytes / 2**20, "MiB"),
                 (f"communicators, {cost.stage} of all groups of a process, longest", cost.process_s, "s")]
    rows.append(("old and new communicators", ", ".join(dict.fromkeys(cost.switch for cost in move.stages)), ""))
    return rows + [(f"span {span.name} ({span.phase}), longest", span.longest_s, "s") for span in move.spans
                   if span.phase in PHASES]


def _slowdown_rows(run: Run, move: MoveFigures) -> list[tuple[str, float | None, str]]:
    """Iterations beside the preparation over the undisturbed ones of the same run, job-wide.

    An iteration before which groups were connected is neither: what that costs is a span of its own.
    """
    times = job_iterations(run)
    connects = run.spans[(run.spans["phase"] == b"READY") & (run.spans["name"] == b"connect")]
    free = ~np.isin(times["iteration"], connects["iteration"])
    free[0] = False  # warms up
    usual = times["longest_s"][free & ~times["disturbed"]]
    beside = times["longest_s"][free & np.isin(times["iteration"], _beside(move))]
    rows: list[tuple[str, float | None, str]] = [("iterations beside the preparation", len(beside), "")]
    for name, percent in (("median", 50), ("p95", 95)):
        ratio = float(np.percentile(beside, percent) / np.percentile(usual, percent)) if len(beside) and len(
            usual) else None
        rows.append((f"{name} of iterations while preparing, over undisturbed", ratio, "x"))
    return rows


def _beside(move: MoveFigures) -> range:
    if move.preparing is None:
        return range(0)
    return range(move.preparing.first_iteration, move.preparing.last_iteration + 1)


def phases_of(run: Run, move: MoveFigures) -> dict[str, tuple[float, float]]:
    """Unix seconds from which and to which the job was in each phase; on either side up to another move, if there is
    one."""
    paused_s, resumed_s = pause_of(run, move)
    ready_s = move.requested_s + (move.setup_s or 0.0)
    last = run.iterations[-1]
    others = [other for other in compute_moves(run) if other.move != move.move]
    begins_s = max([float(run.iterations["start_s"].min()),
                    *(other.end_s for other in others if other.end_s <= move.requested_s)])
    ends_s = min([float(last["start_s"] + last["time_s"]),
                  *(other.requested_s for other in others if other.requested_s >= resumed_s)])
    return {"undisturbed": (begins_s, move.requested_s), "PREPARING": (move.requested_s, ready_s),
            "READY": (ready_s, paused_s), "SWITCHING": (paused_s, resumed_s), "afterwards": (resumed_s, ends_s)}


def pause_of(run: Run, move: MoveFigures) -> tuple[float, float]:
    """From the first arrival at the switchover of a committed move to the last resumption, unix seconds."""
    pauses = run.spans[(run.spans["move"] == move.move) & (run.spans["name"] == b"switchover")]
    return float(pauses["start_s"].min()), float(pauses["end_s"].max())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ratio(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None
