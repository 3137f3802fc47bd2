"""The GPU benchmark runs on the CPU too, whole; what comes out there is for nobody, so only that it does is tested."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.gpu_moves import RunFailed, run_arm
from migration.forkserver import ADDRESS_VARIABLE, ForkServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_every_part_but_the_large_one(fork_server: ForkServer, tmp_path: Path) -> None:
    small = ["--iterations", "10", "--rounds", "5", "--beside-rounds", "2", "--prepare-share", "0.01", "--alone", "3",
             "--stride", "2", "--compare", "40", "--repeats", "2", "--arms", "connected,naive", "--set", "num_layers=2"]
    command = [sys.executable, "-m", "analysis.bench_gpu", "--device", "cpu", "--out", str(tmp_path), *small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", ADDRESS_VARIABLE: fork_server.address}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert [section["title"] for section in sections] == [
        "One move, 8 processes, TP2 PP1 DP3", "Host cost of a collective, two ranks",
        "A slot's state over a pair, each rank its own host",
        "Preparing beside training, two ranks, connected, share 0.01",
        "Preparing 2 groups over and over, two ranks, connected"]
    moves, *_, beside, soak = ({(f["column"], f["name"]): f["value"] for f in section["figures"]} for section in sections)
    for column in ("connected", "naive"):
        assert moves[column, "downtime"] > 0 and moves[column, "groups rebuilt"] == 16
        assert moves[column, "communicators, prepare a group, median"] > 0
        assert moves[column, "memory of the fullest GPU, SWITCHING"] > 0
    assert "bit for bit" in sections[0]["notes"][0]
    assert all("bit for bit" in section["notes"][1] for section in sections[-2:])
    assert beside["", "preparing iterations"] >= 2 and beside["", "undisturbed iterations"] >= 9
    assert beside["", "rests in it, median"] > 0 == soak["", "rests in it, longest"]
    assert sections[-1]["notes"][0].startswith("5 rounds of 5 without a hang")
    markdown = (tmp_path / "bench_gpu.md").read_text()
    assert "| downtime | " in markdown and markdown.rstrip() in done.stdout


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="ended with 2: .*hidden_size=63 is not a multiple"):
        run_arm(tmp_path / "run", ["--np", "2", "--set", "hidden_size=63"], environment={}, on_gpu=False, timeout_s=100)
