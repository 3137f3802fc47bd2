"""The benchmark with a GPU for every process runs on the CPU too, small; that all parts do is what is tested."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from migration.forkserver import ADDRESS_VARIABLE, ForkServer

ROOT = Path(__file__).resolve().parents[2]
MOVES, ARMS, SWITCHES = ("b0->b3", "b1->b0", "b2->b1"), ("naive", "full", "two_stage+warmup", "two_stage"), (
    "connected", "lazy")


def by_column(section: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(figure["column"], figure["name"]): figure["value"] for figure in section["figures"]}


@pytest.mark.timeout(600)
def test_every_part(fork_server: ForkServer, tmp_path: Path) -> None:
    small = ["--moves", "3", "--no-restart", "--set", "num_layers=2"]
    command = [sys.executable, "-m", "analysis.bench_gpus", "--device", "cpu", "--out", str(tmp_path), "--runs",
               str(tmp_path / "runs"), *small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", ADDRESS_VARIABLE: fork_server.address}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=560)
    sections = json.loads((tmp_path / "bench_gpus.json").read_text())
    first, second, arms, switches, killed = sections
    assert [section["title"] for section in sections[:4]] == [
        "Moves of b0, b1 and b2, TP2 PP1 DP3", "Moves of b0, b1 and b2, TP1 PP2 DP3", "All arms",
        "Making room for new communicators, TP2 PP1 DP3"]
    assert not any(section["problem"] for section in sections[:4]), done.stdout + done.stderr
    for section, columns in ((first, MOVES), (second, MOVES), (arms, ARMS), (switches, SWITCHES)):
        assert all(by_column(section)[column, "downtime"] > 0 for column in columns)
    assert all("bit for bit" in section["notes"][0] for section in (first, second, switches))
    assert by_column(arms)["", "downtime, naive over full"] > 0
    assert by_column(switches)["lazy", "old and new communicators"] == "lazy, connected"
    _check_kill(killed, done.returncode)
    assert f"bench_gpus: part kill; " in done.stdout and "| downtime | " in (tmp_path / "bench_gpus.md").read_text()


def _check_kill(section: dict[str, Any], returncode: int) -> None:
    assert not section["problem"] and returncode == 0
    assert by_column(section)["", "recovery"] > 0 and by_column(section)["", "sums keep their bits"] == "yes"
    assert "bit for bit" in section["notes"][1]
