"""The figures of each move of a run, computed from its log.

Owns what each figure of a move means. Pure: NumPy only, no files and no text. A figure that the log doesn't give is
None. Times of different processes are by their own clocks: on several hosts they compare as well as these agree.
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from analysis.log import Run, text
from analysis.measures import (PHASE_ORDER, SpanTime, compute_span_times, compute_undisturbed_s, find_disturbed,
                               first_iteration_s, job_iterations)

TRANSFER = "transfer"  # name of the spans in which state is sent or received
FOLLOW = "follow"  # of the span in which a joiner takes what comes beside training
BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one leaver sent to its joiner in one phase. The time is from when both were at it to the end of both: the
    joiner may have waited for long."""

    slot: int
    phase: str
    leaver: int  # world rank
    joiner: int  # world rank
    bytes: int
    start_s: float  # unix
    time_s: float
    gb_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The process of a role whose memory grew most: its peak before the request, and from there to the move's end."""

    role: str  # leaver, joiner, stayer
    kind: str  # resident or device
    world_rank: int
    num_processes: int  # of the role
    before_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """The iterations that ran beside the preparation of a move."""

    first_iteration: int
    last_iteration: int
    num_ended_before_ready: int
    median_stall_s: float | None  # over iterations and slots
    max_stall_s: float | None
    median_slowdown: float | None  # job-wide iteration time over the undisturbed one, minus 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage of the communicators took, over the groups that switched in one way and the members of each."""

    switch: str  # connected, parked, lazy
    stage: str
    num_groups: int
    median_s: float  # of a group, at a member
    longest_s: float
    process_s: float  # all groups of a process together, the longest
    median_device_bytes: int  # what the device lost meanwhile, to whomever


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigures:
    """One move. `outcome` UNFINISHED: there are spans of it, but the controller logged no end."""

    move: int
    request: str
    arm: str
    outcome: str
    reason: str
    iteration: int | None
    generation: int | None
    term: int | None
    requested_s: float  # unix
    end_s: float  # unix, of its last span
    setup_s: float | None
    downtime_s: float | None
    total_s: float | None
    bytes: int
    num_groups_rebuilt: int
    num_groups_kept: int
    assignments: list[list[int]]  # slot, leaver, joiner
    spans: list[SpanTime]
    transfers: list[Transfer]
    transfer_bytes: int
    ahead_bytes: int  # that came beside training, all pairs
    transfer_gb_per_s: float | None  # all pairs, first start to last end, of the phase with the most bytes
    stages: list[StageCost]
    memory: list[MemoryPeak]
    preparing: Preparing | None
    first_iteration_s: float | None  # the longest over slots, without the pause
    undisturbed_s: float | None


def compute_moves(run: Run) -> list[MoveFigures]:
    """All moves of the run, in the order of their requests."""
    logged = [compute_move(run, int(row["move"]), row) for row in run.moves]
    known = set(run.moves["move"].tolist())
    unfinished = sorted({int(move) for move in run.spans["move"] if move >= 0} - known)
    return logged + [compute_move(run, move, None) for move in unfinished]


def compute_move(run: Run, move: int, row: np.void | None) -> MoveFigures:
    """The figures of one move; `row` is its row of the log, None if there is none."""
    spans = run.spans[(run.spans["move"] == move) & (move >= 0)]  # a refused request has no number, and no spans
    requested_s = float(spans["start_s"].min()) if row is None else float(row["requested_s"])
    setup_s, downtime_s, total_s = (None if row is None else _number(row[name])
                                    for name in ("setup_s", "downtime_s", "total_s"))
    end_s = max([requested_s + (total_s or setup_s or 0.0), *spans["end_s"].tolist()])
    assignments = [] if row is None else [[int(value) for value in pair] for pair in json.loads(row["assignments"])]
    iteration = None if row is None or row["iteration"] < 0 else int(row["iteration"])
    transfers = _compute_transfers(spans, assignments)
    times = job_iterations(run)
    return MoveFigures(
        move=move, request="?" if row is None else text(row["request"]),
        arm="" if row is None else text(row["arm"]),
        outcome="UNFINISHED" if row is None else text(row["outcome"]),
        reason="no end was logged: the run goes on, or was killed" if row is None else text(row["reason"]),
        iteration=iteration, generation=None if row is None else int(row["generation"]),
        term=None if row is None else int(row["term"]), requested_s=requested_s, end_s=end_s, setup_s=setup_s,
        downtime_s=downtime_s, total_s=total_s, bytes=0 if row is None else int(row["bytes"]),
        num_groups_rebuilt=0 if row is None else int(row["num_groups_rebuilt"]),
        num_groups_kept=0 if row is None else int(row["num_groups_kept"]), assignments=assignments,
        spans=compute_span_times(spans), transfers=transfers,
        transfer_bytes=sum(transfer.bytes for transfer in transfers),
        ahead_bytes=int(spans["bytes"][spans["name"] == FOLLOW.encode()].sum()),
        transfer_gb_per_s=_total_rate(transfers),
        stages=compute_stages(run.communicators[(run.communicators["move"] == move) & (move >= 0)]),
        memory=_compute_memory(run, assignments, requested_s, end_s),
        preparing=None if not len(spans) else _compute_preparing(
            run, requested_s, requested_s + setup_s if setup_s else end_s, iteration),
        first_iteration_s=None if iteration is None else first_iteration_s(run, iteration, int(row["generation"])),
        undisturbed_s=compute_undisturbed_s(times))


def compute_stages(rows: np.ndarray) -> list[StageCost]:
    """Of rows of the log's `communicators`, in the order in which stages first came."""
    found = []
    for switch, stage in dict.fromkeys(zip(rows["switch"].tolist(), rows["stage"].tolist())):
        of = rows[(rows["switch"] == switch) & (rows["stage"] == stage)]
        by_process = [float(of["time_s"][of["world_rank"] == rank].sum()) for rank in set(of["world_rank"].tolist())]
        found.append(StageCost(switch=text(switch), stage=text(stage), num_groups=len(set(of["communicator"].tolist())),
                               median_s=float(np.median(of["time_s"])), longest_s=float(of["time_s"].max()),
                               process_s=max(by_process), median_device_bytes=int(np.median(of["device_bytes"]))))
    return found


def _compute_transfers(spans: np.ndarray, assignments: list[list[int]]) -> list[Transfer]:
    transfers = []
    for phase in PHASE_ORDER:
        rows = spans[(spans["phase"] == phase.encode()) & (spans["name"] == TRANSFER.encode())]
        for slot, leaver, joiner in assignments:
            ends = [end for rank in (leaver, joiner) if len(end := rows[rows["world_rank"] == rank])]
            num_bytes = max((int(end["bytes"].sum()) for end in ends), default=0)
            if num_bytes:
                start_s, end_s = _both_at_it(ends)
                transfers.append(Transfer(slot=slot, phase=phase, leaver=leaver, joiner=joiner, bytes=num_bytes,
                                          start_s=start_s, time_s=end_s - start_s,
                                          gb_per_s=_rate(num_bytes, end_s - start_s)))
    return transfers


def _both_at_it(ends: list[np.ndarray]) -> tuple[float, float]:
    return max(float(end["start_s"].min()) for end in ends), max(float(end["end_s"].max()) for end in ends)


def _total_rate(transfers: list[Transfer]) -> float | None:
    sums: dict[str, int] = {}
    for transfer in transfers:
        sums[transfer.phase] = sums.get(transfer.phase, 0) + transfer.bytes
    if not sums:
        return None
    phase = max(sums, key=lambda name: sums[name])
    some = [transfer for transfer in transfers if transfer.phase == phase]
    time_s = max(item.start_s + item.time_s for item in some) - min(item.start_s for item in some)
    return _rate(sums[phase], time_s)


def _compute_memory(run: Run, assignments: list[list[int]], requested_s: float, end_s: float) -> list[MemoryPeak]:
    # up to the first iterations after the move, which the joiner runs with all it has taken over
    after = run.iterations["start_s"][run.iterations["start_s"] >= end_s]
    until_s = float(after.min()) if len(after) else math.inf
    leavers, joiners = {pair[1] for pair in assignments}, {pair[2] for pair in assignments}
    before = run.iterations[run.iterations["start_s"] < requested_s]
    roles = {"leaver": leavers, "joiner": joiners,
             "stayer": set(before["world_rank"].tolist()) - leavers - joiners}
    peaks = []
    for kind, column in (("resident", "rss_bytes"), ("device", "device_bytes")):
        for role, ranks in roles.items():
            grown = [peak for rank in sorted(ranks)
                     if (peak := _compute_peak(run, rank, column, requested_s, until_s)) is not None]
            if grown:
                before_bytes, peak_bytes, rank = max(grown, key=lambda peak: peak[1] - (peak[0] or 0))
                peaks.append(MemoryPeak(role=role, kind=kind, world_rank=rank, num_processes=len(ranks),
                                        before_bytes=before_bytes, peak_bytes=peak_bytes))
    return peaks


def _compute_peak(run: Run, rank: int, column: str, requested_s: float,
                  until_s: float) -> tuple[int | None, int, int] | None:
    """(peak before, peak during, rank), or None without a sample during the move."""
    rows = run.iterations[run.iterations["world_rank"] == rank]
    times, values = rows["start_s"] + rows["time_s"], rows[column]
    if column == "rss_bytes":  # spans carry it too: a spare has no iterations
        spans = run.spans[run.spans["world_rank"] == rank]
        times, values = np.concatenate([times, spans["end_s"]]), np.concatenate([values, spans[column]])
    during = values[(times >= requested_s) & (times <= until_s)]
    before = values[times < requested_s]
    if not len(during) or not during.max():
        return None
    return int(before.max()) if len(before) else None, int(during.max()), rank


def _compute_preparing(run: Run, requested_s: float, ready_s: float, boundary: int | None) -> Preparing | None:
    rows = run.iterations
    end_s = rows["start_s"] + rows["time_s"]
    beside = (end_s > requested_s) & (rows["start_s"] < ready_s)
    if boundary is not None:
        beside &= rows["iteration"] < boundary
    if not beside.any():
        return None
    # The log's stall_s knows only what came before it; here each slot's median is over the whole run.
    undisturbed = rows[~find_disturbed(run)]
    usual = {slot: np.median(some) for slot in run.slots
             if len(some := _whole_s(undisturbed[undisturbed["slot"] == slot])[1:])}
    stall_s = [max(0.0, float(_whole_s(row) - usual[row["slot"]])) for row in rows[beside] if row["slot"] in usual]
    numbers = np.unique(rows["iteration"][beside])
    last_ends = [end_s[rows["iteration"] == number].max() for number in numbers]
    times = job_iterations(run)
    usual_s = compute_undisturbed_s(times)
    slow = np.median(times["longest_s"][np.isin(times["iteration"], numbers)])
    return Preparing(first_iteration=int(numbers[0]), last_iteration=int(numbers[-1]),
                     num_ended_before_ready=sum(bool(end <= ready_s) for end in last_ends),
                     median_stall_s=float(np.median(stall_s)) if stall_s else None,
                     max_stall_s=max(stall_s, default=None),
                     median_slowdown=float(slow / usual_s - 1) if usual_s else None)


def _whole_s(rows: np.ndarray | np.void) -> np.ndarray:
    return rows["time_s"] + rows["boundary_s"]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _rate(num_bytes: int, time_s: float) -> float | None:
    return num_bytes / time_s / BYTES_PER_GB if time_s > 0 else None
