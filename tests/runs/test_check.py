"""`harness.py check` as a user runs it: a table and its verdict, a slow process, wrong arguments. No training."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import Finished, Harness, refused

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("--hosts", "b0,b1,b2,b3")


def check(harness: Harness, run: Path, *arguments: object, np: int = 8) -> Finished:
    return harness("check", "--np", np, "--run", run, "--timeout", 60, *arguments, np=None, run=run)


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def problems_but_slow_ones(run: Path) -> list[str]:
    """Of a shared machine's processes and pairs any may be slow by accident, even when it is measured three times."""
    return [p for p in result(run)["problems"] if "less than half" not in p]


@pytest.mark.fast
def test_eight_processes(harness: Harness, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = check(harness, run, *HOSTS)
    assert problems_but_slow_ones(run) == []
    found = result(run)
    assert finished.rc == found["exit_code"] == (1 if found["problems"] else 0)
    assert finished.out.count("preflight for tiny_TP2_PP1") == 1 and "Traceback" not in finished.err
    assert [p["host"] for p in found["processes"]] == [f"b{r // 2}" for r in range(8)]
    assert all(p["flops"] > 0 and p["free_bytes"] > 0 for p in found["processes"])
    assert all(p["latency_s"] > 0 for p in found["processes"][1:]) and found["processes"][0]["latency_s"] is None
    for kind, num_groups in (("pair in a host", 4), ("pair between hosts", 4), ("world, tp_dp", 1), ("tp, tp_pp", 3),
                             ("dp", 2)):
        assert sum(g["kind"] == kind for g in found["groups"]) == num_groups
        assert f"\n{kind} " in finished.out
    assert sorted(p.name for p in run.iterdir()) in (["result.json"], ["mpiexec.log", "result.json"])


def test_slow_process_is_named(harness: Harness, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = check(harness, run, *HOSTS, "--slow-rank", 3)
    assert finished.rc == 1
    named = [p for p in result(run)["problems"] if p.startswith("host b1 (world rank 3): a matrix multiply")]
    assert len(named) == 1 and named[0] in finished.out


def test_too_small_a_world(harness: Harness, tmp_path: Path) -> None:
    """Processes are measured all the same."""
    run = tmp_path / "run"
    finished = check(harness, run, "--hosts", "b0,b1", np=2)
    assert finished.rc == 1 and problems_but_slow_ones(run) == [p for p in result(run)["problems"] if "needs 6" in p]
    assert result(run)["processes"][1]["flops"] > 0


def test_under_own_mpirun(tmp_path: Path) -> None:
    """The exit code comes from mpirun then, whatever order the processes end in."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside Python")
    command = [str(mpirun), "-n", "2", sys.executable, str(ROOT / "harness.py"), "check", "--hosts", "b0,b1"]
    for settings, rc in ((("--set", "tp=1", "--set", "dp=2"), 1), (("--profile", "tiny_TP3"), 2)):
        done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
        assert done.returncode == rc, done.stdout + done.stderr
        assert ("can't be vacated" in done.stdout) is (rc == 1)
    assert done.stderr.count("there is no such profile") == 1


@pytest.mark.parametrize(("arguments", "words"), [
    (("--np", 8, "--profile", "tiny_TP3"), ("tiny_TP3", "tiny_TP2_PP1")),
    (("--np", 8, "--hosts", "b0,b1,b2"), ("b0,b1,b2", "8")),
    (("--np", 8, "--set", "dtype=fp7"), ("fp7",)),
    (("--np", 8, "--timeout", 0), ("--timeout 0",)),
    (("--profile", "tiny_TP2_PP1"), ("--np N", "mpirun")),
    (("--np", 2, "--data", "/nowhere/at/all"), ("/nowhere/at/all", "no such file")),
], ids=lambda value: " ".join(map(str, value)))
def test_wrong_argument(harness: Harness, arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    finished = harness("check", *arguments, np=None, timeout=60)
    refused(finished, *words)
    assert finished.rc == 2
