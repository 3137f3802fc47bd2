"""The figures and tables of experiments, from SYNTHETIC runs whose figures are known."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from synthetic_run import BOUNDARY, BYTES, PAUSE_S, REQUESTED, SLOWER_S, Row, make_run

from analysis.ablation import ablation_json, compute_ablation, compute_parked, draw_ablation, format_ablation
from analysis.log import read_run
from analysis.moves import compute_moves
from analysis.scale import compute_scale, draw_scale, format_scale
from analysis.speed import compute_speed, format_speed
from analysis.straggling import compute_straggling
from analysis.tables import format_table
from migration.errors import UserError

ITERATION_S = 0.5 + 0.05  # the slowest slot's
RESTART = {"save_s": 1.0, "load_s": 3.0, "total_s": 4.0, "num_bytes": 1_000_000}


def test_ablation_of_one_move(tmp_path: Path) -> None:
    found = compute_ablation(read_run(make_run(tmp_path / "run")), 1, [("save_and_restart", RESTART)])
    assert found.iteration_s == pytest.approx(ITERATION_S) and found.device == "CPU" and found.job_size == 6
    arm, = found.arms
    assert (arm.arm, arm.num_moves, arm.pause_bytes, arm.downtime_s) == ("full", 1, BYTES, PAUSE_S)
    assert arm.preparing_ratio == pytest.approx(1 + SLOWER_S / ITERATION_S)
    assert set(arm.pause) == {"transfer", "digest", "verdict", "activate"}
    targets = {target.name: (target.value, target.met) for target in found.targets}
    assert targets["downtime, save_and_restart over full"] == (4.0 / PAUSE_S, True)
    assert targets["full: downtime over an iteration"] == (pytest.approx(PAUSE_S / ITERATION_S), True)
    assert targets["full: iterations while preparing over undisturbed"][1] is False
    assert [target["met"] for target in ablation_json(found)["targets"]] == [t.met for t in found.targets]
    text = format_ablation(found)
    assert "an undisturbed iteration takes 550 ms" in text and "save_and_restart: save 1.00 s, load 3.00 s" in text
    assert "downtime, save_and_restart over full: 200 x, at least 20: met" in text
    draw_ablation(found, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").stat().st_size > 10_000


def test_a_parked_pause_is_compared_with_one_connection_and_its_bytes(tmp_path: Path) -> None:
    move, = compute_moves(read_run(make_run(tmp_path / "run")))
    assert compute_parked([move]) is None, "its groups are prepared to be parked, but never connected"
    connect = dataclasses.replace(move.stages[0], stage="connect", median_s=0.006)
    move = dataclasses.replace(move, stages=[*move.stages, connect], transfer_gb_per_s=2 * BYTES / 0.004 / 1e9)
    assert compute_parked([move]) == pytest.approx(PAUSE_S / (0.006 + 0.004))


def test_a_move_that_failed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 of 1 moves were committed; move b1->b3@12 ABORTED: w6: the joiner raised"):
        compute_ablation(read_run(make_run(tmp_path / "run", outcome="ABORTED")), 1, ())
    with pytest.raises(UserError, match="1 of 2 moves were committed$"):
        compute_ablation(read_run(make_run(tmp_path / "other")), 2, ())


def test_speed_adds_up(tmp_path: Path) -> None:
    """Iterations 5 to 11 are slower, and the pause lies before iteration 12: nothing else is lost. 5 to 9 are beside
    the preparation, 11 is where the cut would be; so 10, ready and waiting, is one of ten that count as undisturbed."""
    found = compute_speed(read_run(make_run(tmp_path / "run")), 1, 12)
    usual_s = ITERATION_S + SLOWER_S / 10
    wall_s = 19 * ITERATION_S + SLOWER_S * (BOUNDARY - REQUESTED) + PAUSE_S
    assert (found.num_iterations, found.num_undisturbed) == (19, 10)
    assert (found.undisturbed_s, found.wall_s) == (pytest.approx(usual_s), pytest.approx(wall_s))
    assert found.preparing_s == pytest.approx(5 * (ITERATION_S + SLOWER_S - usual_s))
    assert found.preparing_s + found.pause_s + found.after_s == pytest.approx(wall_s - 19 * usual_s)
    assert found.efficiency == pytest.approx(19 * usual_s / wall_s)
    assert found.target.met is False and "at least 0.995: missed" in format_speed(found)


def test_no_time_is_lost_where_every_slot_has_moved(tmp_path: Path) -> None:
    """Nobody has logged the whole iteration then: joiners begin at the cut."""
    def from_the_cut(row: Row) -> Row:
        late = {"start_s": row["start_s"] + 0.4, "time_s": row["time_s"] - 0.4}
        return {**row, **late} if row["iteration"] == BOUNDARY - 1 else row

    whole = compute_speed(read_run(make_run(tmp_path / "whole")), 1, 12)
    found = compute_speed(read_run(make_run(tmp_path / "half", edit_iteration=from_the_cut)), 1, 12)
    assert found.wall_s == pytest.approx(whole.wall_s) and found.efficiency == pytest.approx(whole.efficiency)


def test_scale_of_one_move(tmp_path: Path) -> None:
    found = compute_scale(read_run(make_run(tmp_path / "run")), [2])
    row, = found.rows
    assert (row.num_leavers, row.downtimes_s, row.pause_bytes) == (2, [PAUSE_S], 2 * BYTES)
    assert "6 MB" in format_scale(found)
    draw_scale(found, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 5_000


def test_a_run_without_a_slowed_process_is_no_straggler_experiment(tmp_path: Path) -> None:
    def with_own_time(row: Row) -> Row:
        return {**row, "own_s": 0.1}

    run = read_run(make_run(tmp_path / "run", edit_iteration=with_own_time))
    assert set(run.iterations["own_s"].tolist()) == {0.1}
    with pytest.raises(UserError, match="no process was slowed"):
        compute_straggling(run)


def test_table_is_aligned() -> None:
    assert format_table(["arm", "s"], [["naive", "1"], ["x", "100"]]) == "arm      s\nnaive    1\nx      100"
