"""What moves in a row leave behind, from a SYNTHETIC run and from figures that are known."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import add_switchover, compute_start_s, make_run

from analysis.flatness import Settled, flatness_figures, look_after
from analysis.gpu_moves import pause_of, phases_of
from analysis.log import Run, read_run
from analysis.moves import MoveFigures, compute_moves

COLUMNS = [("world_rank", "i4"), ("slot", "i4"), ("num_fds", "i8"), ("num_threads", "i8"), ("num_groups", "i8"),
           ("rss_bytes", "i8"), ("device_bytes", "i8")]


def settled(*, gpu: float = 500.0, **changes: int) -> Settled:
    row = {"world_rank": 3, "slot": 1, "num_fds": 50, "num_threads": 20, "num_groups": 12, "rss_bytes": 1000,
           "device_bytes": 1 << 30} | changes
    return Settled(rows=np.array([tuple(row[name] for name, _ in COLUMNS)], COLUMNS), device_mib={0: gpu, 1: 400.0})


@pytest.mark.parametrize("changes, grown", [
    ({}, ""), ({"num_fds": 51, "num_threads": 21, "rss_bytes": 1050, "gpu": 600.0}, ""),
    ({"num_fds": 52}, "descriptors, mean of all processes, grown in the last four moves: 2"),
    ({"num_fds": 59}, "descriptors, grown in the last four moves: 9"),
    ({"num_threads": 22}, "threads, grown in the last four moves: 2"),
    ({"num_groups": 13}, "communicators of a slot, grown in the last four moves: 1"),
    ({"rss_bytes": 1060}, "resident memory of a process, grown in the last four moves: 1.06"),
    ({"gpu": 601.0}, "memory of a GPU, grown in the last four moves: 101"),
    ({"device_bytes": (1 << 30) + (20 << 20)}, "tensors of a process, grown in the last four moves: 20"),
    ({"world_rank": 4}, "descriptors, grown in the last four moves: -")])
def test_what_grew_is_named(changes: dict[str, int], grown: str) -> None:
    _, told = flatness_figures(settled(), settled(**changes), on_gpu=True, processes_a_gpu=1)
    assert told.startswith(grown) and bool(told) == bool(grown)


def test_the_memory_of_the_machine_is_not_judged() -> None:
    assert flatness_figures(settled(), settled(gpu=9000.0), on_gpu=False, processes_a_gpu=0)[1] == ""


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Run, MoveFigures, float]:
    """A run with a switchover, its move, and when the process began."""
    run = add_switchover(read_run(make_run(tmp_path / "run")))
    return run, compute_moves(run)[0], min(process.started_s for process in run.processes.values())


def test_looks_at_the_end_of_the_time_after_a_move(moved: tuple[Run, MoveFigures, float]) -> None:
    run, move, origin_s = moved
    begins_s = pause_of(run, move)[1]
    last = look_after(run, [], [move], 0)
    assert last.rows["iteration"].tolist() == [19] * 6 and last.rows["slot"].tolist() == list(range(6))
    following = dataclasses.replace(move, move=1, requested_s=compute_start_s(16, origin_s, move=True))
    samples = [(begins_s + 0.1, 0, 900.0), (following.requested_s - 0.2, 0, 500.0),
               (following.requested_s - 0.1, 1, 300.0), (following.requested_s + 0.1, 0, 700.0)]
    first = look_after(run, samples, [move, following], 0)
    assert set(first.rows["iteration"].tolist()) == {15}
    assert first.device_mib == {0: 500.0, 1: 300.0}
    assert first.by_process("num_groups")[6] == 8 and 2 not in first.by_process("num_groups")


def test_phases_end_where_another_move_begins(moved: tuple[Run, MoveFigures, float],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    run, move, origin_s = moved
    alone = phases_of(run, move)
    before = dataclasses.replace(move, move=1, requested_s=0.0, end_s=compute_start_s(3, origin_s, move=True))
    after = dataclasses.replace(move, move=2, requested_s=compute_start_s(16, origin_s, move=True), end_s=1e12)
    monkeypatch.setattr("analysis.gpu_moves.compute_moves", lambda _: [before, move, after])
    among = phases_of(run, move)
    assert among["undisturbed"][0] == before.end_s > alone["undisturbed"][0]
    assert among["afterwards"][1] == after.requested_s < alone["afterwards"][1]
    assert all(among[name] == alone[name] for name in ("PREPARING", "READY", "SWITCHING"))
