"""The report: figures as the log has them, with units, also of a run without moves, aborted, killed or just begun."""
from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import BOUNDARY, BYTES, make_run

from analysis.log import read_run
from analysis.measures import compute_run, find_disturbed
from analysis.moves import compute_moves
from analysis.report import format_bytes, format_s, main, report_text


def test_the_table_of_a_committed_move(tmp_path: Path) -> None:
    said = report_text(make_run(tmp_path))
    for line in ("move 0: b1->b3@12  COMMITTED at iteration 12, generation 1",
                 "  slot 2   w2 b1 -> w6 b3",
                 "  setup         2.90 s   request to ready",
                 "  downtime     20.0 ms   job-wide",
                 "    PREPARING  prepare_groups      2.00 s   w7 b3      of 8",
                 "    slot 2   w2 b1 -> w6 b3  SWITCHING       3 MB in 8.00 ms, 0.375 GB/s",
                 "    leaver  resident    30.2 GB -> 31.2 GB  +1000.0 MB   w2 b1 of 2",
                 "    parked     prepare    2 groups    50.0 ms     150 ms     290 ms  +3 MiB a group",
                 "  process groups: 5 rebuilt, 3 kept",
                 "  first iteration after the switch: 550 ms, undisturbed median 550 ms (1.00 x)",
                 "run: tiny_TP2_PP1, completed",
                 "  6 slots, 8 processes on 4 hosts, generation 1 at the end",
                 "  final loss   0.250000",
                 "  start-up     3.00 s, first process to first iteration",
                 f"  logs         {tmp_path / 'log'} (8 files)"):
        assert line in said, f"{line!r} is not in\n{said}"


def test_figures_of_a_move(tmp_path: Path) -> None:
    move, = compute_moves(read_run(make_run(tmp_path)))
    assert move.transfer_bytes == 2 * BYTES
    assert move.transfer_gb_per_s == pytest.approx(0.75, rel=1e-3)  # unix seconds have a resolution of 0.2 us
    assert move.preparing is not None
    assert (move.preparing.first_iteration, move.preparing.last_iteration) == (5, 9)
    assert move.preparing.num_ended_before_ready == 4
    assert move.preparing.max_stall_s == pytest.approx(0.04)
    assert {(peak.role, peak.num_processes) for peak in move.memory} == {("leaver", 2), ("joiner", 2), ("stayer", 4)}
    assert [span.phase for span in move.spans] == sorted(
        (span.phase for span in move.spans), key=["PREPARING", "READY", "SWITCHING", "COMMITTED"].index)


def test_only_preparing_and_the_pause_disturb_not_waiting_for_the_iteration(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path))
    disturbed = set(run.iterations["iteration"][find_disturbed(run)].tolist())
    assert disturbed == {5, 6, 7, 8, 9, 12}  # requested in 5, warm-up ends in 9, the pause is before 12


def test_json_has_the_figures_in_seconds_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_run(tmp_path)), "--json", "--no-plots"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["moves"][0]["downtime_s"] == 0.02
    assert report["moves"][0]["assignments"] == [[2, 2, 6], [3, 3, 7]]
    assert report["run"]["num_iterations"] == 20
    assert not list(tmp_path.glob("*.png"))


def test_an_aborted_move_says_why(tmp_path: Path) -> None:
    said = report_text(make_run(tmp_path, outcome="ABORTED"))
    assert "move 0: b1->b3@12  ABORTED" in said and "  reason: w6: the joiner raised ValueError" in said
    assert "  downtime           -   " in said
    assert "generation 0 at the end" in said


def test_a_run_killed_in_a_move_shows_what_there_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, finished=False, edit_digest=lambda row: None)
    (run / "log" / "w0000.h5").unlink()  # that of the controller, with the outcome
    said = report_text(run)
    assert "move 0: ?  UNFINISHED" in said and "no end was logged" in said
    assert "no result yet: it goes on, or was killed" in said and "generation 1 at the end" in said


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, move=False, finished=False, edit_iteration=lambda row: None, edit_digest=lambda row: None)
    assert main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "iterations   0" in said and "final loss   none logged" in said
    assert [picture.name for picture in tmp_path.glob("*.png")] == ["gantt.png"]


@pytest.mark.parametrize("move", [True, False])
def test_pictures_are_drawn_where_they_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                  move: bool) -> None:
    run, out = make_run(tmp_path / "run", move=move), tmp_path / "pictures"
    assert main([str(run), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for name in ("iteration_times.png", "gantt.png"):
        assert str(out / name) in said
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert not list(run.glob("*.png"))


def test_a_run_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "log")
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no log files" in said


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m analysis.report runs/first" in capsys.readouterr().out


def test_units() -> None:
    assert [format_s(time_s) for time_s in (None, 0.0, 2e-6, 0.0123, 0.8, 1.5, 12345.6)] == [
        "-", "0 s", "2 us", "12.3 ms", "800 ms", "1.50 s", "12346 s"]
    assert [format_bytes(size) for size in (12, 1500, 3_000_000, 2_345_600_000)] == [
        "12 B", "1.5 kB", "3 MB", "2.346 GB"]


REDONE = range(8, 14)


def test_what_a_recovery_went_back_behind_doesnt_count(tmp_path: Path) -> None:
    """Iterations 8 to 13 were done before a recovery, and 8 to 11 again when the run was killed."""
    run = read_run(make_run(tmp_path / "killed", move=False, num_iterations=14, redone=REDONE, finished=False,
                            edit_iteration=lambda row: None if row["iteration"] > 11 else row))
    figures = compute_run(run)
    assert (figures.num_iterations, figures.generation) == (12, 1)
    assert len(run.redone) == len(REDONE) * len(run.slots)
    assert run.iterations["iteration"].max() == 11


def test_start_up_is_that_of_the_first_life(tmp_path: Path) -> None:
    """All iterations are done again, half a minute later."""
    def later(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"start_s": row["start_s"] + 30.0}

    path = make_run(tmp_path / "again", move=False, num_iterations=6, redone=range(6), edit_iteration=later)
    alone = make_run(tmp_path / "alone", move=False, num_iterations=6)
    again, once = (compute_run(read_run(run)).startup_s for run in (path, alone))
    assert again is not None and once is not None and abs(again - once) < 1.0


def test_the_first_iteration_after_a_switch_is_that_of_its_generation(tmp_path: Path) -> None:
    """The job went back behind the switch, and did that iteration again without one, a second longer."""
    run = read_run(make_run(tmp_path / "run"))
    first_s = compute_moves(run)[0].first_iteration_s
    at = run.iterations["iteration"] >= BOUNDARY
    newer = run.iterations[at].copy()
    newer["generation"], newer["boundary_s"] = 2, 0.0
    newer["time_s"] += 1.0
    newer["start_s"] += 60.0
    recovered = dataclasses.replace(run, iterations=np.concatenate((run.iterations[~at], newer)),
                                    redone=run.iterations[at], recoveries={2: BOUNDARY})
    assert compute_moves(recovered)[0].first_iteration_s == first_s
    assert find_disturbed(run)[at].any()
    assert not find_disturbed(recovered)[recovered.iterations["generation"] == 2].any()
