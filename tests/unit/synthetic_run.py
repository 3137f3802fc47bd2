"""SYNTHETIC runs for tests of the log's readers: made up, no training behind them.

Eight processes on four hosts, six slots, iterations of half a second. With `move`, b1 (world ranks 2 and 3) goes to
b3 (6 and 7) at iteration 12. All figures are functions of (iteration, slot), so that two runs are equal, and a test
can break one.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from analysis.log import Run
from migration.config import Config
from migration.timeline import Timeline

HOSTS = ["b0", "b0", "b1", "b1", "b2", "b2", "b3", "b3"]
NUM_SLOTS = 6
ASSIGNMENTS = [[2, 2, 6], [3, 3, 7]]
REQUESTED, BOUNDARY = 5, 12  # iterations
SLOWER_S = 0.04  # an iteration while preparing
ITERATION_S = 0.5
PAUSE_S = 0.02
STARTUP_S = 3.0
KINDS = ("parameters", "optimizer", "rng")
BYTES = 3_000_000  # a pair

Row = dict[str, Any]
Edit = Callable[[Row], Row | None]


def make_run(path: Path, *, move: bool = True, num_iterations: int = 20, outcome: str = "COMMITTED",
             edit_iteration: Edit = dict, edit_digest: Edit = dict, finished: bool = True, redone: range = range(0),
             edit_redone: Edit = dict, recovers: bool = True) -> Path:
    """Writes a run folder. The edits change a row before it is written, or return None to leave it out.

    `redone`: iterations that were done before a recovery, by the same processes, and again after it, with the final
    digests; without `recovers` the log doesn't say why.
    """
    config = dataclasses.asdict(Config(profile="tiny_TP2_PP1", tp=2, iterations=num_iterations))
    timelines = [Timeline(path / "log" / f"w{rank:04d}.h5", world_rank=rank, host=HOSTS[rank], config=config,
                          options={}, versions={}, hosts=HOSTS) for rank in range(len(HOSTS))]
    origin_s = timelines[0].clock.started_s
    switched = {slot: joiner for slot, _, joiner in ASSIGNMENTS} if move and outcome == "COMMITTED" else {}
    for rank, timeline in enumerate(timelines):
        for number, name in enumerate(("import", "groups", "build")):
            timeline.add_span(name, "STARTUP", origin_s + number, origin_s + number + 1 - 0.05 * rank)
    for iteration in range(num_iterations):
        for slot in range(NUM_SLOTS):
            owner = switched.get(slot, slot) if iteration >= BOUNDARY else slot
            built = build_iteration(iteration, slot, origin_s, move=move, switched=bool(switched))
            if iteration in redone and (lost := edit_redone(built)) is not None:
                timelines[owner].add_iteration(**lost)
            recovered = bool(redone and iteration >= redone.start)
            row = edit_iteration(built | {"generation": built["generation"] + recovered})
            if row is not None:
                timelines[owner].add_iteration(**row)
    for timeline in timelines if redone and recovers else ():
        timeline.add_span("connect", "RECOVERING", origin_s, origin_s + 1, generation=1, iteration=redone.start)
    if move:
        _add_move(timelines, origin_s, outcome)
    for slot in range(NUM_SLOTS):
        for kind in KINDS:
            digest = edit_digest({"slot": slot, "kind": kind, "digest": f"{slot:02x}{len(kind):02x}" * 16})
            for _ in range(1 + bool(redone and recovers) if digest is not None else 0):
                timelines[switched.get(slot, slot)].add_digest(**digest)
    for timeline in timelines:
        timeline.close()
    if finished:
        (path / "result.json").write_text(json.dumps({"schema_version": 1, "status": "completed", "error": None}))
    return path


def build_iteration(iteration: int, slot: int, origin_s: float, *, move: bool, switched: bool) -> Row:
    """The columns of one iteration; those of a run with the move differ in times only."""
    preparing = move and REQUESTED <= iteration < BOUNDARY
    pause_s = PAUSE_S if move and iteration == BOUNDARY else 0.0
    start_s = compute_start_s(iteration, origin_s, move=move)
    return {"iteration": iteration, "generation": int(switched and iteration >= BOUNDARY), "slot": slot,
            "start_s": start_s + pause_s, "boundary_s": pause_s,
            "time_s": ITERATION_S * (3 if iteration == 0 else 1) + 0.01 * slot + (SLOWER_S if preparing else 0.0),
            "loss": 5.0 / (iteration + 1) if slot >= 4 else None, "grad_norm": 1.0 + iteration / 7, "skipped": 0,
            "consumed_samples": 12 * iteration, "samples": f"{iteration:08x}{slot:08x}", "num_groups": 8,
            "rss_bytes": 30_000_000_000 + 100_000_000 * (slot + 10 * preparing),  # above any test process
            "disturbed": preparing or pause_s > 0}


def compute_start_s(iteration: int, origin_s: float, *, move: bool) -> float:
    """When the iteration, or the pause before it, begins; slot 5 is the slowest, and the others wait for it."""
    num_slower = max(0, min(iteration, BOUNDARY) - REQUESTED) if move else 0
    return (origin_s + STARTUP_S + iteration * (ITERATION_S + 0.05) + (2 * ITERATION_S if iteration else 0.0)
            + num_slower * SLOWER_S + (PAUSE_S if move and iteration > BOUNDARY else 0.0))


def add_switchover(run: Run) -> Run:
    """`run` with the span of its move's switchover."""
    span = run.spans[:1].copy()
    begins_s = compute_start_s(BOUNDARY, min(process.started_s for process in run.processes.values()), move=True)
    span["move"], span["name"], span["start_s"], span["end_s"] = 0, b"switchover", begins_s, begins_s + PAUSE_S
    return dataclasses.replace(run, spans=np.append(run.spans, span))


def _add_move(timelines: list[Timeline], origin_s: float, outcome: str) -> None:
    requested_s = compute_start_s(REQUESTED, origin_s, move=True)
    boundary_s = compute_start_s(BOUNDARY, origin_s, move=True)  # when the pause begins
    for rank, timeline in enumerate(timelines):
        late_s = 0.001 * (rank % 3)
        spans = [("PREPARING", "prepare_groups", requested_s + 0.1, requested_s + 1.4 + 0.1 * rank, 0)]
        if rank in (6, 7):
            spans += [("PREPARING", "build", requested_s + 0.1, requested_s + 0.9, 0),
                      ("PREPARING", "warm_up", requested_s + 0.9, requested_s + 2.8, 0)]
        arrived_s = boundary_s - (0.01 * (5 - rank) if rank < 6 else 0.8)
        spans += [("READY", "wait_boundary", arrived_s, boundary_s + late_s, 0)]
        if rank in (2, 3, 6, 7):
            spans += [("SWITCHING", "transfer", boundary_s + 0.003, boundary_s + 0.009 + late_s, BYTES),
                      ("SWITCHING", "digest", boundary_s + 0.011, boundary_s + 0.014, 0)]
        spans += [("SWITCHING", "verdict", boundary_s + 0.014, boundary_s + 0.016, 0),
                  ("SWITCHING", "activate", boundary_s + 0.016, boundary_s + 0.019, 0),
                  (outcome, "close_old", boundary_s + 0.05, boundary_s + 0.3, 0)]
        for phase, name, start_s, end_s, num_bytes in spans:
            timeline.add_span(name, phase, start_s, end_s, move=0, bytes=num_bytes)
    for rank in range(NUM_SLOTS):
        for number in range(2):
            timelines[rank].add_communicator(
                move=0, slot=rank, communicator=f"g1/{number}", group="DATA_PARALLEL", num_members=3, switch="parked",
                stage="prepare", time_s=0.04 + 0.01 * number + 0.1 * (rank == 5), device_bytes=3 << 20)
    committed = outcome == "COMMITTED"
    timelines[0].add_event("request", "b1->b3@12", move=0)
    timelines[0].add_move(
        move=0, request="b1->b3@12", arm="full", outcome=outcome,
        reason="" if committed else "w6: the joiner raised ValueError",
        iteration=BOUNDARY if committed else -1, generation=int(committed), term=0, requested_s=requested_s,
        setup_s=2.9, downtime_s=PAUSE_S if committed else None,
        total_s=boundary_s + PAUSE_S - requested_s if committed else None,
        bytes=2 * BYTES if committed else 0, num_groups_rebuilt=5, num_groups_kept=3, assignments=ASSIGNMENTS)
