"""The arm that moves are compared with: its parts add up to the wall time of what happened, and nothing is lost."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from analysis.log import read_run
from analysis.restart_arm import measure_restart
from migration.errors import UserError


@pytest.mark.timeout(800)  # every process imports for itself, twice
def test_parts_of_a_restart(tmp_path: Path) -> None:
    arguments = ["--profile", "tiny_TP1_PP2", "--set", "num_microbatches=1"]
    times = measure_restart(arguments, 3, "b0,b1,b2", "b2,b0,b1", tmp_path, num_processes=6, timeout_s=350)
    parts = {k: v for k, v in dataclasses.asdict(times).items() if k.endswith("_s")}
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert times.num_bytes > 100_000
    before, after = read_run(tmp_path / "before"), read_run(tmp_path / "after")
    first = after.iterations[after.iterations["iteration"] == 3]
    stopped_s = max(before.iterations["start_s"] + before.iterations["time_s"])
    assert times.total_s == pytest.approx(max(first["start_s"] + first["time_s"]) - stopped_s)
    assert after.iterations["iteration"].min() == 3 and before.iterations["iteration"].max() == 2
    assert before.hosts != after.hosts


def test_a_run_that_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        measure_restart(["--profile", "nowhere"], 3, "b0", "b0", tmp_path, num_processes=2)
