"""`make test-gpu`: every test that means something on a GPU, and a file with the outcome and the figures of each.

The tests in 4 ranks (tests/mpi) on NCCL, then tests/gpu, file by file. After each file the results are written to
analysis/results/test_gpu.json and .md, or into --out; a file that is run again replaces its old rows, so that what a
time box cut off can be run by itself: --only test_moves. Without a GPU the same tests run on Gloo as far as they can,
into build/results.
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

PARTS = {"mpi": "The tests in 4 ranks (tests/mpi)", "gpu": "Memory, policies, aborts and whole runs (tests/gpu)"}
TIMED_OUT, GRACE_S = 124, 15.0
LEAST_S = 1.0  # no file is begun with less

Outcome = dict[str, Any]  # of a file: exit_code, rows (tests/recorder.py), machine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run_all.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="mpi,gpu", metavar="NAMES", help="comma-separated: mpi, gpu, or files of "
                        "either, as test_moves (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--time-box", type=float, default=3600.0, metavar="S", help="for everything; a file that would "
                        "outlast it is ended, and what it had found is kept (default: %(default)g)")
    parser.add_argument("pytest", nargs="*", help="passed to pytest, after --")
    args = parser.parse_args(argv)
    try:
        files = find_files(args.only)
    except ValueError as error:
        parser.error(str(error))
    ends_s = time.monotonic() + args.time_box
    machine = ask_machine()
    out = args.out or ROOT / ("analysis/results" if machine.gpus else "build/results")
    kept = out / "test_gpu.json"
    outcomes: dict[str, Outcome] = json.loads(kept.read_text()) if kept.exists() else {}
    for i, file in enumerate(files, start=1):
        if (left_s := ends_s - time.monotonic()) < LEAST_S:
            print(f"run_all: the time box is used up; not run: {', '.join(files[i - 1:])}", file=sys.stderr)
            break
        print(f"run_all: {file}, {i} of {len(files)}, {left_s:.0f} s left", file=sys.stderr, flush=True)
        outcomes[file] = run_file(file, args.pytest, left_s) | {"machine": machine.describe()}
        write_whole(kept, json.dumps(outcomes, indent=1) + "\n")
        write_whole(out / "test_gpu.md", build_markdown(outcomes))
    print(build_markdown(outcomes))
    print(f"written to {kept} and {kept.with_suffix('.md')}")
    return 1 if any(file not in outcomes or outcomes[file]["exit_code"] for file in files) else 0


def find_files(names: str) -> list[str]:
    """Of "mpi", "gpu" or names of files, comma-separated: tests/mpi/test_groups.py and so on, each once, in order.

    Raises ValueError for a name that is neither.
    """
    there = {part: sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / part).glob("test_*.py"))
             for part in PARTS}
    by_name = {Path(file).stem: file for files in there.values() for file in files}
    found: list[str] = []
    for name in filter(None, names.split(",")):
        name = name.removesuffix(".py")
        if name not in there and name not in by_name:
            raise ValueError(f"--only {name}: neither a part ({', '.join(PARTS)}) nor a file ({', '.join(by_name)})")
        found += there.get(name) or [by_name[name]]
    if not found:
        raise ValueError("--only names nothing")
    return list(dict.fromkeys(found))


def build_command(file: str) -> list[str]:
    """The first test in 4 ranks that fails ends all ranks, and so the rest of its file."""
    if file.startswith("tests/mpi"):
        return ["bash", "tests/run_mpi_tests.sh"]
    return [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", file]


def run_file(file: str, options: list[str], timeout_s: float) -> Outcome:
    """Its output goes where this program's goes. Returns the exit code and a row for each test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        process = subprocess.Popen([*build_command(file), "--results", str(path), *options], cwd=ROOT,
                                   stdin=subprocess.DEVNULL,
                                   env={**os.environ, "PYTHON": sys.executable, "MPI_TESTS": file})
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"run_all: {file} isn't done and the time box is used up; it is ended", file=sys.stderr, flush=True)
            code = TIMED_OUT
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = path.read_text().splitlines() if path.exists() else []
    return {"exit_code": code, "rows": [json.loads(line) for line in lines]}


def build_markdown(outcomes: dict[str, Outcome]) -> str:
    """A table for each part and machine."""
    blocks = ["# Tests on GPUs", "Written by `make test-gpu`; the same with all figures is in `test_gpu.json`."]
    for part, title in PARTS.items():
        own = {file: outcome for file, outcome in sorted(outcomes.items()) if file.startswith(f"tests/{part}/")}
        blocks += [f"## {title}"] if own else []
        for machine in dict.fromkeys(outcome["machine"] for outcome in own.values()):
            same = {file: outcome for file, outcome in own.items() if outcome["machine"] == machine}
            rows = [row for outcome in same.values() for row in outcome["rows"]]
            counts = [f"{n} {what}" for what in ("passed", "failed", "skipped")
                      if (n := sum(row["outcome"] == what for row in rows))]
            endings = [f"**{file} ended with exit code {outcome['exit_code']}**" for file, outcome in same.items()
                       if outcome["exit_code"]]
            cells = [_cells(row) for row in _folded(rows)]
            blocks += [machine, f"{', '.join(counts) or 'no test'}; {', '.join(endings) or 'exit code 0'}.",
                       markdown_table(("test", "outcome", "seconds", "figures"), cells)]
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
