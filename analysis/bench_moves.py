"""`python -m analysis.bench_moves`: N moves in one run, and a plain save-and-restart of the same job, as one table.

Everything is measured on this machine, one after the other, and every figure comes from spans in the logs. The restart
(restart_arm.py) is timed from the end of the last iteration before the save to the end of the first one after the load.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.log import Run, read_run
from analysis.measures import compute_run
from analysis.moves import compute_moves
from analysis.restart_arm import measure_restart

_ROOT = Path(__file__).resolve().parent.parent
_SPACING = 8  # iterations from one move to the next


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.bench_moves", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=20, help="b1->b3 and back, so often (default: %(default)s)")
    parser.add_argument("--restarts", type=int, default=3, help="saves and restarts (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    parser.add_argument("--warm-up", default="synthetic", choices=("off", "synthetic", "recorded"),
                        help="of joiners, as in harness.py (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_moves(Path(folder), args.moves, args.settings, args.warm_up)
        for name, shared in (("restart", False), ("restart_shared_imports", True)):
            if args.restarts:
                figures[name] = measure_restarts(Path(folder) / name, args.restarts, args.settings,
                                                 shared_imports=shared)
                figures[f"{name}_over_downtime"] = figures[name]["total_s"] / figures["downtime_s"]
    print(json.dumps(figures, indent=1) if args.json else _table(figures, args.moves, args.restarts))
    return 0


def measure_moves(folder: Path, num_moves: int, settings: list[str], warm_up: str = "synthetic") -> dict[str, Any]:
    """One run with `num_moves` moves of host b1 to b3 and back. Seconds, medians over the moves."""
    moves = []
    for i in range(num_moves):
        moves += ["--vacate", f"{('b1->b3', 'b3->b1')[i % 2]}@{_SPACING * (i + 1)}"]
    arguments = [*settings_arguments(settings), "--set", f"iterations={_SPACING * (num_moves + 2)}", "--lead", "4",
                 "--warm-up", warm_up]
    run = _train(folder / "moves", [*arguments, *moves])
    rows = [m for m in compute_moves(run) if m.outcome == "COMMITTED"]
    if len(rows) != num_moves:
        sys.exit(f"bench_moves: {len(rows)} of {num_moves} moves were committed; see the run's output")
    whole = compute_run(run)

    def median(values: Sequence[float | None]) -> float:
        return statistics.median(v for v in values if v is not None)

    return {"num_moves": len(rows), "start_up_s": whole.startup_s, "iteration_s": whole.median_s,
            "setup_s": median([m.setup_s for m in rows]), "downtime_s": median([m.downtime_s for m in rows]),
            "downtime_max_s": max(m.downtime_s for m in rows),
            "downtime_iterations": median([m.downtime_s for m in rows]) / whole.median_s,
            "preparing_slowdown": median([m.preparing.median_slowdown if m.preparing else None for m in rows]),
            "preparing_stall_s": median([m.preparing.median_stall_s if m.preparing else None for m in rows]),
            "first_iteration_s": median([m.first_iteration_s for m in rows]),
            "first_iteration_over_median": median([m.first_iteration_s for m in rows]) / whole.median_s,
            # every later joiner has trained before: this one alone shows what a warm-up is worth
            "cold_first_iteration_over_median": rows[0].first_iteration_s / whole.median_s}


def measure_restarts(folder: Path, num_restarts: int, settings: list[str], *, shared_imports: bool) -> dict[str, float]:
    """Medians of `num_restarts` saves and restarts on other hosts. Seconds."""
    times = [measure_restart(settings_arguments(settings), _SPACING, "b0,b1,b2,b3", "b0,b3,b2,b1", folder / f"{i}",
                             num_processes=8, shared_imports=shared_imports) for i in range(num_restarts)]
    rows = [{**dataclasses.asdict(t), "total_s": t.total_s} for t in times]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def settings_arguments(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _train(run: Path, arguments: list[str], hosts: str = "b0,b1,b2,b3") -> Run:
    command = [sys.executable, "harness.py", "--np", "8", "--hosts", hosts, "--run", str(run), *arguments]
    done = subprocess.run(command, cwd=_ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench_moves: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
                 f"{done.stderr[-2000:]}")
    return read_run(run)


def _table(figures: dict[str, Any], num_moves: int, num_restarts: int) -> str:
    ms = {k: v * 1e3 for k, v in figures.items() if k.endswith("_s")}
    lines = [f"{num_moves} moves of 2 of 6 slots, 8 processes, tiny_TP2_PP1; medians",
             f"  start-up                               {figures['start_up_s']:8.2f} s",
             f"  iteration, undisturbed                 {ms['iteration_s']:8.0f} ms",
             f"  setup (request to ready)               {ms['setup_s']:8.0f} ms",
             f"  downtime                               {ms['downtime_s']:8.0f} ms   "
             f"{figures['downtime_iterations']:.2f} iterations; longest {ms['downtime_max_s']:.0f} ms",
             f"  stall of an iteration while preparing  {ms['preparing_stall_s']:8.0f} ms   "
             f"{figures['preparing_slowdown']:+.0%} job-wide",
             f"  first iteration after the switch       {ms['first_iteration_s']:8.0f} ms   "
             f"{figures['first_iteration_over_median']:.2f} x the median; after the first move, to processes that had "
             f"not trained before, {figures['cold_first_iteration_over_median']:.2f} x"]
    for name, title in (("restart", "every process imports for itself"), ("restart_shared_imports", "shared imports")):
        if name in figures:
            parts = {k.removesuffix("_s"): v for k, v in figures[name].items() if k.endswith("_s")}
            total_s = parts.pop("total")
            lines += [f"{num_restarts} saves and restarts of the same job, {title}; medians",
                      f"  stop of the last iteration to end of the first  {total_s:8.2f} s   "
                      f"{figures[f'{name}_over_downtime']:.0f} x the downtime",
                      "  of it: " + ", ".join(f"{part} {s:.2f}" for part, s in parts.items()) + " s"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
