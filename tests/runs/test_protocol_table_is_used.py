"""The table in migration/protocol.py is what the running system goes by: a transition less, and a move can't be made.

The transition is deleted in a copy of the code, and the copy runs whole jobs. It costs the controller its process, and
its deputy goes on without the move.
"""
from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Running, assert_nothing_left
from support import Case, vacate

from migration.forkserver import ADDRESS_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("migration", "analysis", "nccl_bindings", "third_party")
CASE = Case(profile="tiny_TP1_PP2", iterations=8)
DEADLINES = ("--prepare-deadline", "10", "--switch-deadline", "5")
RAISE = ("--fault", "raise@2:PREPARING")
RunCopy = Callable[..., tuple[int, str, dict]]


@pytest.fixture
def run_copy(tmp_path: Path) -> Iterator[RunCopy]:
    """run_copy(missing, *args) -> (exit code, output, result): a job of a copy of the code whose table lacks a row."""
    started: list[Running] = []

    def run(missing: tuple[str, str] | None, *args: str) -> tuple[int, str, dict]:
        copy = tmp_path / "copy"
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name)  # compiled files too: Python sees which are out of date
        shutil.copy(ROOT / "harness.py", copy)
        if missing:
            with (copy / "migration" / "protocol.py").open("a") as file:
                file.write(f"\ndel TABLE[Phase.{missing[0]}, Event.{missing[1]}]\n")
        # Not the session's fork server: it has imported the code that lacks nothing.
        env = {name: value for name, value in os.environ.items() if name not in (ADDRESS_VARIABLE, "PYTHONPATH")}
        command = [sys.executable, str(copy / "harness.py"), "--np", "6", *CASE.arguments(6), *DEADLINES,
                   *vacate("b1->b2@4"), *args, "--run", str(tmp_path / "run")]
        job = Running(command, run=tmp_path / "run", env=env)
        started.append(job)
        finished = job.wait(120)
        result = job.run / "result.json"
        return finished.rc, finished.out + finished.err, json.loads(result.read_text()) if result.exists() else {}

    yield run
    for job in started:
        assert_nothing_left(job.run)


def committed(result: dict) -> list[bool]:
    return [move["outcome"] == "COMMITTED" for move in result.get("moves", [])]


def assert_one_controller_was_lost(output: str, result: dict) -> None:
    (recovery,) = result["recoveries"]
    assert (recovery["lost"], result["term"]) == ([0], 1), result
    assert "world rank 0 on b0, the controller, is lost: its process has died" in output
    assert output.count("Traceback") == 1 and "control thread of world rank 0 failed" in output


def test_whole_table_commits(run_copy: RunCopy) -> None:
    rc, output, result = run_copy(None)
    assert rc == 0, output
    assert committed(result) == [True]


@pytest.mark.parametrize("missing", [("TRAINING", "REQUESTED"), ("SWITCHING", "ALL_VERIFIED")], ids="-".join)
def test_without_a_transition_no_move_is_made(run_copy: RunCopy, missing: tuple[str, str]) -> None:
    rc, output, result = run_copy(missing)
    assert rc == 0 and True not in committed(result), output
    assert_one_controller_was_lost(output, result)
    assert f"event {missing[1]}" in output and f"phase {missing[0]}" in output, output


def test_without_the_way_back_a_failed_move_costs_the_controller(run_copy: RunCopy) -> None:
    missing = ("PREPARING", "MEMBER_FAILED")
    rc, output, result = run_copy(missing, *RAISE)
    assert rc == 0 and True not in committed(result), output
    assert_one_controller_was_lost(output, result)
    assert f"event {missing[1]}" in output and f"phase {missing[0]}" in output, output


def test_without_the_way_to_a_recovery_a_lost_slot_ends_the_job(run_copy: RunCopy) -> None:
    missing = ("COMMITTED", "SLOT_REPLACED")
    rc, output, result = run_copy(missing, "--fault", "kill@2:COMMITTED")
    assert rc != 0 and True not in committed(result), output
    assert f"event {missing[1]}" in output and f"phase {missing[0]}" in output, output
