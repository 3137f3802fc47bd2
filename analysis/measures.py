"""The figures of a run as a whole, computed from its log.

Owns what each figure means. Pure: NumPy only, no files and no text. A figure that the log doesn't give is None.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.log import Run, text

STARTUP = "STARTUP"
RECOVERING = "RECOVERING"
PHASE_ORDER = (STARTUP, "TRAINING", "PREPARING", "READY", "SWITCHING", "COMMITTED", "ABORTED", RECOVERING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTime:
    """The spans of one name in one phase, over all processes."""

    phase: str
    name: str
    longest_s: float
    world_rank: int  # of the longest
    num_processes: int
    bytes: int  # the most of one process; a sum would count what is sent and received twice


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run as a whole."""

    path: str
    profile: str
    status: str  # completed, failed, or unfinished: it goes on or was killed
    error: str | None
    num_slots: int
    num_processes: int
    num_hosts: int
    num_iterations: int  # logged by every slot
    generation: int | None  # of the last iteration
    median_s: float | None  # of the undisturbed iterations, job-wide
    startup_s: float | None  # first process to first iteration
    startup: list[SpanTime]
    recoveries: list[dict[str, Any]]  # as the result has them
    recovery_words: list[str]  # what was said of them
    recovering: list[SpanTime]  # of all recoveries
    final_loss: float | None  # mean over the slots that have one, of the last iteration
    num_skipped: int  # iterations whose step the loss scaler skipped
    faults: list[dict[str, Any]]
    versions: dict[str, str]


def compute_run(run: Run) -> RunFigures:
    """The figures of the run, as far as it has come."""
    rows = run.iterations
    numbers, num_rows = np.unique(rows["iteration"], return_counts=True)
    whole = numbers[num_rows == len(run.slots)]
    last = rows[rows["iteration"] == whole[-1]] if len(whole) else rows[:0]
    losses = last["loss"][~np.isnan(last["loss"])]
    started_s = min(process.started_s for process in run.processes.values())
    all_rows = run.all_iterations
    begun_s = max((float(all_rows["start_s"][all_rows["slot"] == slot].min()) for slot in run.slots), default=None)
    result = run.result or {}
    return RunFigures(
        path=str(run.path), profile=str(run.config.get("profile", "?")), status=result.get("status", "unfinished"),
        error=result.get("error"), num_slots=len(run.slots), num_processes=len(run.hosts),
        num_hosts=len(set(run.hosts)), num_iterations=len(whole),
        generation=int(last["generation"].max()) if len(last) else None,
        median_s=compute_undisturbed_s(job_iterations(run)),
        startup_s=None if begun_s is None else begun_s - started_s,
        startup=compute_span_times(run.spans[run.spans["phase"] == STARTUP.encode()]),
        recoveries=result.get("recoveries", []),
        recovery_words=[text(row["text"]) for row in run.events if text(row["kind"]) == "recovery"],
        recovering=compute_span_times(run.spans[run.spans["phase"] == RECOVERING.encode()]),
        final_loss=float(losses.mean()) if len(losses) else None,
        num_skipped=len(np.unique(rows["iteration"][rows["skipped"] != 0])), faults=result.get("faults", []),
        versions=run.versions)


def job_iterations(run: Run) -> np.ndarray:
    """One row an iteration, job-wide: time_s, pause_s before it, longest_s with it, end_s on the last slot, disturbed
    (see find_disturbed)."""
    rows = run.iterations
    numbers, index = np.unique(rows["iteration"], return_inverse=True)
    times = np.zeros(len(numbers), [("iteration", "i8"), ("time_s", "f8"), ("pause_s", "f8"), ("longest_s", "f8"),
                                    ("end_s", "f8"), ("disturbed", "?")])
    times["iteration"] = numbers
    np.maximum.at(times["time_s"], index, rows["time_s"])
    np.maximum.at(times["longest_s"], index, rows["time_s"] + rows["boundary_s"])
    np.maximum.at(times["end_s"], index, rows["start_s"] + rows["time_s"])
    np.maximum.at(times["pause_s"], index, rows["boundary_s"])
    np.logical_or.at(times["disturbed"], index, find_disturbed(run))
    return times


def find_disturbed(run: Run) -> np.ndarray:
    """Of each row of iterations: whether any process prepared a move beside it, or a move paused the job before it.

    By the spans, not by the log's `disturbed`, which is set as long as there is a move: a move that is ready and waits
    for its iteration disturbs nobody.
    """
    rows, spans = run.iterations, run.spans[run.spans["move"] >= 0]
    preparing = spans[spans["phase"] == b"PREPARING"]
    starts_s, ends_s = preparing["start_s"], np.maximum.accumulate(preparing["end_s"])
    # Of the spans that end after the iteration starts, the first is also the first to start: spans are sorted by that.
    first = np.searchsorted(ends_s, rows["start_s"], side="right")
    beside = np.append(starts_s, np.inf)[first] < rows["start_s"] + rows["time_s"]
    return beside | _find_paused(rows, spans[spans["phase"] == b"SWITCHING"], run.moves)


def _find_paused(rows: np.ndarray, spans: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Of each row: whether its process switched in it or before it, or a move took effect with it.

    By time and generation: an iteration that was done again after a recovery has the number of the one that was paused.
    """
    paused = np.zeros(len(rows), bool)
    begun_s, done_s = rows["start_s"] - rows["boundary_s"], rows["start_s"] + rows["time_s"]
    for move, rank in np.unique(spans[["move", "world_rank"]]).tolist():
        own = spans[(spans["move"] == move) & (spans["world_rank"] == rank)]
        paused |= (rows["world_rank"] == rank) & (begun_s < own["end_s"].max()) & (done_s > own["start_s"].min())
    for move in moves[moves["iteration"] >= 0]:
        paused |= (rows["iteration"] == move["iteration"]) & (rows["generation"] == move["generation"])
    return paused


def first_iteration_s(run: Run, iteration: int, generation: int) -> float | None:
    """The longest of the slots in the first iteration of a generation, whether or not it was done again later."""
    rows = run.all_iterations
    times_s = rows["time_s"][(rows["iteration"] == iteration) & (rows["generation"] == generation)]
    return float(times_s.max()) if len(times_s) else None


def compute_undisturbed_s(times: np.ndarray) -> float | None:
    """Median job-wide time of the iterations beside which no move went on; the first, which warms up, left out."""
    usual = times["longest_s"][1:][~times["disturbed"][1:]]
    return float(np.median(usual)) if len(usual) else None


def compute_span_times(spans: np.ndarray) -> list[SpanTime]:
    """The longest span of each phase and name, in the order of phases and of first starts."""
    groups: dict[tuple[str, str], list[np.void]] = {}
    for span in spans:  # sorted by start
        groups.setdefault((text(span["phase"]), text(span["name"])), []).append(span)
    times = []
    for (phase, name), rows in groups.items():
        longest = max(rows, key=lambda span: span["end_s"] - span["start_s"])
        times.append(SpanTime(phase=phase, name=name, longest_s=float(longest["end_s"] - longest["start_s"]),
                              world_rank=int(longest["world_rank"]), bytes=int(max(span["bytes"] for span in rows)),
                              num_processes=len({int(span["world_rank"]) for span in rows})))
    order = {phase: number for number, phase in enumerate(PHASE_ORDER)}
    return sorted(times, key=lambda time: order.get(time.phase, len(order)))
