"""The ablation's section from a SYNTHETIC run with one move: what is told, and what is kept of a job that failed."""
from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import PAUSE_S, add_switchover, make_run

from analysis import gpus_ablation
from analysis.bench_parts import Bench
from analysis.gpu_moves import Arm, RunFailed
from analysis.gpus_plan import build_layout
from analysis.log import Run, read_run
from analysis.machine import Machine
from analysis.results import Section

MACHINE = Machine(date="2026-01-01", gpus=(), driver="none", torch="2", nccl="none", megatron_core="0", cores=2,
                  python="3", code="0" * 64)


def make_moved(path: Path, **options: Any) -> Run:
    """One move by the arm full."""
    return add_switchover(read_run(make_run(path, **options)))


def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, *, fails: bool) -> list[Section]:
    def train(bench: Bench, name: str, arguments: object, **_: object) -> Arm:
        if fails:
            raise RunFailed("it hung")
        return Arm(run=run, command="the command", samples=[], ended_s=time.time())

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(gpus_ablation, "read_run", lambda folder: run)
    bench = Bench(args=argparse.Namespace(restart=False, time_box=60.0), machine=MACHINE, out=tmp_path, runs=tmp_path,
                  ends_s=time.monotonic() + 60)
    return list(gpus_ablation.ablation(bench, build_layout(0, 0), lambda iterations: (), None))


def test_arms_that_did_not_come_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, = sections(tmp_path, monkeypatch, make_moved(tmp_path / "run"), fails=False)
    assert section.problem == "naive: no time; two_stage+warmup: no time; two_stage: no time"
    downtime, = (f for f in section.figures if f.name == "downtime")
    assert (downtime.column, downtime.value) == ("full", PAUSE_S * 1e3)
    assert section.commands == ("the command",)


def test_what_a_job_did_before_it_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, = sections(tmp_path, monkeypatch, make_moved(tmp_path / "run"), fails=True)
    assert section.problem.startswith("it hung; naive: no time") and section.commands == ()
    assert [f.value for f in section.figures if f.name == "downtime"] == [PAUSE_S * 1e3]


def test_a_move_that_aborted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, = sections(tmp_path, monkeypatch, make_moved(tmp_path / "run", outcome="ABORTED"), fails=False)
    assert section.problem.startswith("full: ABORTED: w6: the joiner raised ValueError; naive: no time")
    assert section.figures == ()
