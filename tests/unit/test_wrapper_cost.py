"""The wrapper's microbenchmark runs and says what it measured; what comes out is for people, not for a test."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "analysis.wrapper_cost", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_few_repeats() -> None:
    done = run("--repeats", "2", "--calls", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    collectives = {row["collective"] for row in rows}
    assert collectives >= {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}
    assert {(row["collective"], row["group_size"]) for row in rows} == {(c, n) for c in collectives for n in (1, 2)}
    assert all(row["bare_us"] > 0 and row["handle_us"] > 0 for row in rows)


def test_table() -> None:
    from analysis.wrapper_cost import Cost, build_table
    text = build_table([Cost(collective="all_reduce", group_size=2, bare_us=100.0, handle_us=100.5, added_us=0.5,
                             spread_us=0.25)])
    head, row, *_ = text.splitlines()
    assert head.split()[-5:] == ["bare", "group", "handle", "added", "spread"] and "[us]" in head
    assert row.split() == ["all_reduce", "2", "100.00", "100.50", "+0.50", "0.25"]


def test_help_and_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    from analysis.wrapper_cost import main
    for arguments, code in ((["--help"], 0), (["--repeats", "one"], 2)):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == code
    shown = capsys.readouterr()
    assert "--repeats" in shown.out and "'one' is not a whole number" in shown.err
