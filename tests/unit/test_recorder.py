"""What came out of each test goes into a file as it is known, and from there into the table of `make test-gpu`."""
from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = '''
import pytest

def test_passes(record_property):
    record_property("figures", {"seconds": 0.25})

def test_fails():
    assert 1 == 2, "one isn't two"

def test_is_skipped():
    pytest.skip("no GPU")

@pytest.mark.parametrize("n", range(3))
def test_many(n):
    pass

@pytest.fixture
def broken():
    raise RuntimeError("no store")

def test_cannot_start(broken):
    pass
'''


def record(folder: Path, rank: str) -> list[dict[str, Any]]:
    (folder / "test_some.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PMI_RANK": rank}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "recorder", "-p", "no:cacheprovider", "-c",
                           os.devnull, "--rootdir", str(folder), "--results", str(folder / "rows"), str(folder)],
                          cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = folder / "rows"
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def test_a_line_a_test(tmp_path: Path) -> None:
    rows = record(tmp_path, "0")
    found = {row["test"].rpartition("::")[2]: (row["outcome"], row["why"], row["figures"]) for row in rows}
    assert found == {
        "test_passes": ("passed", "", {"seconds": 0.25}),
        "test_fails": ("failed", "AssertionError: one isn't two", {}), "test_is_skipped": ("skipped", "no GPU", {}),
        "test_many[0]": ("passed", "", {}), "test_many[1]": ("passed", "", {}), "test_many[2]": ("passed", "", {}),
        "test_cannot_start": ("failed", "RuntimeError: no store", {})}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert record(tmp_path, "1") == []


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program of `make test-gpu`, which is no module of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    return importlib.import_module("run_all")


def test_the_table(run_all: Any) -> None:
    passed = {"outcome": "passed", "why": "", "figures": {}}
    rows = [{"test": "tests/mpi/test_a.py::test_many[0]", "seconds": 1.0, **passed},
            {"test": "tests/mpi/test_a.py::test_many[1]", "seconds": 2.0, **passed},
            {"test": "tests/mpi/test_a.py::test_many[2]", "outcome": "failed", "seconds": 3.0, "why": "lost",
             "figures": {"mib": 4.0, "rows": [1]}}]
    text = run_all.build_markdown({"tests/mpi/test_a.py": {"exit_code": 1, "rows": rows, "machine": "a machine"},
                                   "tests/mpi/test_b.py": {"exit_code": 0, "rows": rows[:1], "machine": "another"}})
    one, another = text.split("another")
    assert another.splitlines()[:3] == ["", "", "1 passed; exit code 0."]
    assert one.strip().splitlines()[-6:] == [
        "2 passed, 1 failed; **tests/mpi/test_a.py ended with exit code 1**.", "",
        "| test | outcome | seconds | figures |",
        "| --- | --- | --- | --- |", "| mpi/test_a.py::test_many (2 times) | passed | 3.0 |  |",
        "| mpi/test_a.py::test_many[2] | **failed**: lost | 3.0 | mib 4 |"]


def test_parts_and_files_are_asked_for_by_name(run_all: Any) -> None:
    files = run_all.find_files("mpi,gpu")
    assert files[0].startswith("tests/mpi/test_") and files[-1] == "tests/gpu/test_nccl_communicator.py"
    assert run_all.find_files("test_transfer.py,test_moves,test_transfer") == [
        "tests/mpi/test_transfer.py", "tests/gpu/test_moves.py"]
    for wrong in ("nccl", ""):
        with pytest.raises(ValueError, match="--only"):
            run_all.find_files(wrong)
