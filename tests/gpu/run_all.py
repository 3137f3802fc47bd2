"""`make test-gpu`: every test that means something on a GPU, and a file with the outcome and the figures of each.

The tests in 4 ranks (tests/mpi) on NCCL, then tests/gpu. After each part the results are written to
analysis/results/test_gpu.json and .md, or into --out; a part that is run again replaces its old rows. Without a GPU the
same tests run on Gloo as far as they can, into build/results.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # it is started by its path

from analysis.machine import ask_machine  # noqa: E402
from analysis.results import format_value, markdown_table, write_whole  # noqa: E402

COMMANDS = {"mpi": ["bash", "tests/run_mpi_tests.sh"],
            "gpu": [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/gpu"]}
TIMED_OUT, GRACE_S = 124, 15.0
TITLES = {"mpi": "The tests in 4 ranks (tests/mpi)", "gpu": "Memory, policies, aborts and whole runs (tests/gpu)"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run_all.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(COMMANDS), help="one part (default: both)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--time-box", type=float, default=3600.0, metavar="S", help="for everything; a part that would "
                        "outlast it is ended, and what it had found is kept (default: %(default)g)")
    parser.add_argument("pytest", nargs="*", help="passed to pytest, after --")
    args = parser.parse_args(argv)
    ends_s = time.monotonic() + args.time_box
    machine = ask_machine()
    out = args.out or ROOT / ("analysis/results" if machine.gpus else "build/results")
    file = out / "test_gpu.json"
    parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in [args.only] if args.only else COMMANDS:
        parts[name] = run_part(name, args.pytest, ends_s - time.monotonic()) | {"machine": machine.describe()}
        write_whole(file, json.dumps(parts, indent=1) + "\n")
        write_whole(out / "test_gpu.md", build_markdown(parts))
    print(build_markdown(parts))
    print(f"written to {file} and {file.with_suffix('.md')}")
    return 1 if any(part["exit_code"] for part in parts.values()) else 0


def run_part(name: str, options: list[str], timeout_s: float) -> dict[str, Any]:
    """Runs one part; its output goes where this program's goes. Returns the exit code and a row for each test.

    Of the tests in 4 ranks each file by itself: the first that fails ends all ranks, and so the rest of its file.
    """
    ends_s = time.monotonic() + timeout_s
    files = sorted(str(path) for path in (ROOT / "tests" / "mpi").glob("test_*.py")) if name == "mpi" else [""]
    found = [run_file(name, file, options, ends_s - time.monotonic()) for file in files]
    return {"exit_code": max(part["exit_code"] for part in found),
            "rows": [row for part in found for row in part["rows"]]}


def run_file(name: str, file: str, options: list[str], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        process = subprocess.Popen([*COMMANDS[name], "--results", str(path), *options], cwd=ROOT,
                                   stdin=subprocess.DEVNULL, env={
                                       **os.environ, "PYTHON": sys.executable, **({"MPI_TESTS": file} if file else {})})
        try:
            code = process.wait(max(timeout_s, 1.0))
        except subprocess.TimeoutExpired:
            print(f"run_all: {name} {file} isn't done and the time box is used up; it is ended", file=sys.stderr,
                  flush=True)
            code = TIMED_OUT
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = path.read_text().splitlines() if path.exists() else []
    return {"exit_code": code, "rows": [json.loads(line) for line in lines]}


def build_markdown(parts: dict[str, Any]) -> str:
    blocks = ["# Tests on GPUs", "Written by `make test-gpu`; the same with all figures is in `test_gpu.json`."]
    for name, part in parts.items():
        rows = part["rows"]
        counts = [f"{n} {outcome}" for outcome in ("passed", "failed", "skipped")
                  if (n := sum(row["outcome"] == outcome for row in rows))]
        ending = f"**ended with exit code {part['exit_code']}**" if part["exit_code"] else "exit code 0"
        blocks += [f"## {TITLES[name]}", part["machine"], f"{', '.join(counts) or 'no test'}; {ending}."]
        blocks += [markdown_table(("test", "outcome", "seconds", "figures"), [_cells(row) for row in _folded(rows)])]
    return "\n\n".join(blocks) + "\n"


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all parameters of a test that passed with all of them and has no figures."""
    found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for i, row in enumerate(rows):
        alone = row["outcome"] != "passed" or row["figures"]
        found.setdefault((row["test"].partition("[")[0], i if alone else None), []).append(row)
    return [some[0] if len(some) == 1 else {**some[0], "test": f"{key[0]} ({len(some)} times)",
                                            "seconds": sum(row["seconds"] for row in some)}
            for key, some in found.items()]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    outcome = {"failed": "**failed**"}.get(row["outcome"], row["outcome"]) + (f": {row['why']}" if row["why"] else "")
    figures = ", ".join(f"{name} {format_value(value)}" for name, value in row["figures"].items()
                        if isinstance(value, (int, float, str)))
    return row["test"].removeprefix("tests/"), outcome, f"{row['seconds']:.1f}", figures


if __name__ == "__main__":
    sys.exit(main())
