"""The background is real: training goes on while a move is prepared, and the pause holds little but the transfer."""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from running import Running
from support import (LONG, Case, Harness, Undisturbed, assert_equal, completed, last_iteration, pid_of,  # noqa: F401
                     undisturbed)

from analysis.log import Run, read_run, text
from migration.config import Config, apply_settings
from migration.profiles import get_profile
from migration.sizes import slot_state_bytes

SLOW_JOINER_S = 2.0
LEAVERS, JOINERS = {2: 2, 3: 3}, {2: 6, 3: 7}  # slot: world rank
BUILDING = {"groups", "prepare_groups", "connect"}
AHEAD = {"digest_state", "gradients"}  # before the pause, in its iteration
AFTERWARDS = {"replay", "follow"}  # while all wait for the agreed stop
MIN_ITERATIONS = 3
MAX_SPARE_CPU = 0.25  # of a core


@pytest.fixture(scope="module")
def moved_runs() -> dict[str, Run]:
    return {}


@pytest.fixture
def moved(harness: Harness, moved_runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose joiners take their time; training doesn't wait for them."""
    if not moved_runs:
        run = tmp_path_factory.mktemp("background") / "run"
        move = ("--vacate", "b1->b3@14", "--slow-joiner", SLOW_JOINER_S)
        result = completed(harness(*LONG.arguments(8), *move, run=run))
        assert [move["outcome"] for move in result["moves"]] == ["COMMITTED"]
        moved_runs["run"] = read_run(run)
    return moved_runs["run"]


def spans(run: Run, phase: str, *names: str) -> np.ndarray:
    """Spans of the only move in a phase; of these names, if any are given."""
    of_phase = run.spans[(run.spans["move"] == 0) & (run.spans["phase"] == phase.encode())]
    return of_phase[np.isin(of_phase["name"], [name.encode() for name in names])] if names else of_phase


def switching(run: Run) -> tuple[float, float]:
    """From the first process that stops to the last that goes on."""
    found = spans(run, "SWITCHING")
    found = found[~np.isin(found["name"], [name.encode() for name in AHEAD])]
    assert len(found), "no span in SWITCHING"
    return float(found["start_s"].min()), float(found["end_s"].max())


def test_iterations_end_while_preparing(moved: Run) -> None:
    start_s = spans(moved, "PREPARING")["start_s"].min()
    preparing = spans(moved, "PREPARING")
    ready_s = preparing["end_s"][~np.isin(preparing["name"], [name.encode() for name in AFTERWARDS])].max()
    assert ready_s <= switching(moved)[0]
    ends = moved.iterations["start_s"] + moved.iterations["time_s"]
    for slot in moved.slots:
        inside = (moved.iterations["slot"] == slot) & (ends > start_s) & (ends < ready_s)
        assert inside.sum() >= MIN_ITERATIONS, f"slot {slot}: {inside.sum()} iterations ended while preparing"


def test_no_communicator_is_built_while_switching(moved: Run) -> None:
    start_s, end_s = switching(moved)
    building = moved.spans[np.isin(moved.spans["name"], [name.encode() for name in BUILDING])]
    assert len(spans(moved, "PREPARING", *BUILDING)), "the next generation's communicators have no span"
    inside = building[(building["end_s"] > start_s) & (building["start_s"] < end_s)]
    assert len(inside) == 0, [(text(row["phase"]), text(row["name"]), int(row["world_rank"])) for row in inside]


def test_every_member_builds_beside_training(moved: Run) -> None:
    """b1's slots are of data-parallel groups with members everywhere: all who are of the next generation take part."""
    builders = set(spans(moved, "PREPARING", *BUILDING)["world_rank"].tolist())
    assert builders >= {0, 1, 2, 3, 4, 5, 6, 7} - set(LEAVERS.values())


def test_joiners_are_warm_before_the_switch(moved: Run) -> None:
    for world_rank in JOINERS.values():
        of_joiner = moved.spans[(moved.spans["world_rank"] == world_rank)
                                & (moved.spans["end_s"] <= switching(moved)[0])]
        names = {text(name) for name in of_joiner["name"]}
        assert {"build", "warm_up"} <= names, f"world rank {world_rank}: {sorted(names)}"


def test_bytes_beside_training_and_inside_the_pause(moved: Run) -> None:
    """By arithmetic: what the optimizer steps goes beside training, and in the pause the gradients of the own shard."""
    (move,) = moved.moves
    config: Config = apply_settings(get_profile(LONG.profile), LONG.changes[1::2])
    total = 0
    for slot in LEAVERS:
        def bytes_of(world_rank: int, phase: str, name: str, slot: int = slot) -> int:
            found = spans(moved, phase, name)
            return int(found["bytes"][(found["slot"] == slot) & (found["world_rank"] == world_rank)].sum())

        expected = slot_state_bytes(config, slot)
        streamed = bytes_of(LEAVERS[slot], "PREPARING", "stream")
        # shards of a data-parallel group differ by a little
        assert 0.99 * (expected.main_parameters + expected.moments) <= streamed, f"slot {slot}"
        sent, received = (bytes_of(rank[slot], "SWITCHING", "transfer") for rank in (LEAVERS, JOINERS))
        # a shard's gradients take as much as its main parameters, and padding comes on top; the rest are words
        assert 0.99 * expected.main_parameters <= received <= 1.1 * expected.main_parameters + 4096, f"slot {slot}"
        assert received < sent <= received + 131072, f"slot {slot}"
        total += sent
    assert int(move["bytes"]) == total


def test_figures_of_the_move(moved: Run) -> None:
    (move,) = moved.moves
    assert move["setup_s"] >= SLOW_JOINER_S  # the joiner took its time, and that is set-up, not downtime
    assert 0 < move["downtime_s"] < move["total_s"]
    assert move["total_s"] >= move["setup_s"]
    assert move["num_groups_rebuilt"] > 0 and move["num_groups_kept"] > 0
    assert move["iteration"] >= 14


def test_equal(moved: Run, undisturbed: Undisturbed) -> None:
    assert_equal(LONG, undisturbed(LONG), moved.path)


def test_spares_do_not_burn_a_core_and_are_not_missed(start_harness: Callable[..., Running]) -> None:
    job = start_harness(*Case(iterations=90, settings=("num_microbatches=1",)).arguments(8))
    job.wait_for(lambda: last_iteration(job.run) >= 4, "iteration 4 to end")
    spares = {world_rank: psutil.Process(pid_of(job.run, world_rank)) for world_rank in (6, 7)}
    started_s, before = time.monotonic(), {rank: cpu_s(spare) for rank, spare in spares.items()}
    job.wait_for(lambda: last_iteration(job.run) >= 30, "iteration 30 to end")
    share = {rank: (cpu_s(spare) - before[rank]) / (time.monotonic() - started_s) for rank, spare in spares.items()}
    assert max(share.values()) < MAX_SPARE_CPU, f"share of a core by world rank: {share}"
    spares[7].kill()
    completed(job.wait())


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
