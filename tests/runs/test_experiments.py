"""Each experiment as a user would start it, with few processes and few moves: its table and its files are there, and
hold what the job's log says. The figures themselves are for people.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Case, Harness, Undisturbed, assert_equal, refused, undisturbed  # noqa: F401

from analysis.log import read_run
from analysis.moves import compute_moves
from migration.arms import ARMS

SMALL_RANK = ("--profile", "one_rank_20GB", "--np", "2", "--hosts", "b0,b1",
              *(part for setting in ("num_layers=2", "hidden_size=36", "seq_length=32", "vocab_size=256",
                                     "num_microbatches=2") for part in ("--set", setting)))
ONE_PAIR = ("--np", "4", "--hosts", "b0,b1", "--set", "dp=1")  # of tiny_TP2_PP1


def experiment(harness: Harness, folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run it; returns its figures. Its text is on the screen and in the folder."""
    finished = harness("--experiment", name, *arguments, "--run", str(folder), np=None, run=folder, timeout=240)
    assert finished.rc == 0, f"{finished.out[-3000:]}\n{finished.err[-3000:]}"
    assert (folder / f"{name}.txt").read_text() in finished.out
    return json.loads((folder / f"{name}.json").read_text())


def check_restart(folder: Path, iteration: int, parts: dict[str, float]) -> None:
    """The total is the wall time from the last iteration before to the first one after, and nothing is lost."""
    before, after = read_run(folder / "before"), read_run(folder / "after")
    first = after.iterations[after.iterations["iteration"] == iteration]
    stopped_s = max(before.iterations["start_s"] + before.iterations["time_s"])
    assert parts["total_s"] == pytest.approx(max(first["start_s"] + first["time_s"]) - stopped_s)
    assert after.iterations["iteration"].min() == iteration and before.iterations["iteration"].max() == iteration - 1
    assert before.hosts != after.hosts and parts["num_bytes"] > 10_000


def test_ablation_has_every_arm_and_the_restart(harness: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "ablation"
    figures = experiment(harness, folder, "ablation", *SMALL_RANK, "--rounds", "1", "--spacing", "6")
    moves = compute_moves(read_run(folder / "moves"))
    assert [move.arm for move in moves] == list(ARMS)
    for arm, move in zip(figures["arms"], moves, strict=True):
        assert (arm["arm"], arm["downtime_s"], arm["pause_bytes"]) == (move.arm, move.downtime_s, move.bytes)
    ahead = {arm["arm"]: arm["ahead_bytes"] > 0 for arm in figures["arms"]}
    assert ahead == {name: name == "full" for name in ARMS}
    (name, parts), = figures["restarts"]
    full = next(arm for arm in figures["arms"] if arm["arm"] == "full")
    assert name == "save_and_restart" and all(seconds > 0 for key, seconds in parts.items() if key.endswith("_s")), parts
    check_restart(folder / "restart0", 6, parts)
    ratios = {target["name"]: target["value"] for target in figures["targets"]}
    assert ratios["downtime, save_and_restart over full"] == parts["total_s"] / full["downtime_s"]
    assert (folder / "ablation.png").stat().st_size > 10_000


def test_scale_rebalance_and_m24(harness: Harness, tmp_path: Path) -> None:
    scale = experiment(harness, tmp_path / "scale", "scale_out_of_host", *ONE_PAIR, "--rounds", "1", "--spacing", "5")
    assert [(row["num_leavers"], row["num_moves"]) for row in scale["rows"]] == [(1, 2), (2, 2)]
    assert scale["rows"][0]["pause_bytes"] < scale["rows"][1]["pause_bytes"]
    assert (tmp_path / "scale" / "scale_out_of_host.png").exists()
    speed = experiment(harness, tmp_path / "rebalance", "rebalance", *ONE_PAIR, "--every", "9", "--moves", "2")
    run = read_run(tmp_path / "rebalance" / "job")
    assert [move.iteration >= 9 * (index + 1) for index, move in enumerate(compute_moves(run))] == [True, True]
    assert speed["target"]["value"] == speed["efficiency"] > 0
    lost_s = speed["preparing_s"] + speed["pause_s"] + speed["after_s"]
    usual_s = speed["undisturbed_s"] * speed["num_iterations"]
    assert abs(speed["wall_s"] - lost_s - usual_s) < 1e-6  # nothing is left out
    m24 = experiment(harness, tmp_path / "m24", "m24_live_migration", "--profile", "tiny_TP2_PP1", *ONE_PAIR)
    assert [(arm["arm"], arm["num_moves"]) for arm in m24["arms"]] == [("full", 1)]


def test_a_straggler_is_found_and_moved_away(harness: Harness, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The slow process is named, its host vacated, and nothing but time has changed."""
    case = Case(iterations=60)
    figures = experiment(harness, tmp_path / "straggler", "straggler", "--slow", "3:4@8", "--auto-evict",
                         *case.changes)
    run = read_run(tmp_path / "straggler" / "job")
    assert figures["slowed"].startswith("slot 3: this process works 4 times as long from iteration 8 on")
    assert figures["told"][0].startswith("slot 3 (world rank 3) on b1 is slow: "), figures["told"]
    assert 8 < figures["named_at"] < figures["moved_at"] < 60
    move = compute_moves(run)[0]
    assert (move.request, move.outcome, move.iteration) == ("b1", "COMMITTED", figures["moved_at"])
    own_s = {stretch["name"]: stretch["own_s"]["3"] for stretch in figures["stretches"]}
    assert own_s["moved"] < own_s["slow"]  # it stayed slow with the process, not with the slot
    assert_equal(case, undisturbed(case), run.path)


def test_what_is_wrong_is_said_before_anything_is_started(harness: Harness, tmp_path: Path) -> None:
    for arguments, words in ((("nonsense",), ("invalid choice: 'nonsense'", "ablation")),
                             (("ablation", "--np", "6"), ("no host has 2 spare processes",)),
                             (("straggler", "--slow", "9:2@4"), ("--slow 9:2@4", "the last slot is 5")),
                             (("rebalance", "--no-such-flag"), ("--no-such-flag",)),
                             (("rebalance", "--every", "0"), ("--every", "at least 1"))):
        refused(harness("--experiment", *arguments, "--run", str(tmp_path / "x"), np=None, run=tmp_path / "x"), *words)
    assert not (tmp_path / "x").exists()
