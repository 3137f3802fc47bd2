"""`python -m analysis.bench_moves`: N moves in one run, and a plain save-and-restart of the same job, as one table.

Everything is measured on this machine, one after the other, and every figure comes from spans in the logs. The restart
is timed from the end of the last iteration before the save to the end of the first iteration after the load.
"""
from __future__ import annotations

import argparse
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
        restarts = [measure_restart(Path(folder) / f"restart{i}", args.settings) for i in range(args.restarts)]
    if restarts:
        figures |= {name: statistics.median(r[name] for r in restarts) for name in restarts[0]}
        figures["restart_over_downtime"] = figures["restart_s"] / figures["downtime_s"]
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


def measure_restart(folder: Path, settings: list[str]) -> dict[str, float]:
    """Save before iteration 8, launch every process anew on other hosts, load, train on. Seconds."""
    arguments = [*settings_arguments(settings), "--set", "iterations=16"]
    before = _train(folder / "before", [*arguments, "--save-at", "8"])
    after = _train(folder / "after", [*arguments, "--load", str(folder / "before" / "checkpoint")],
                   hosts="b0,b3,b2,b1")
    last, first = before.iterations, after.iterations
    stopped_s = max(last["start_s"] + last["time_s"])
    rows = first[first["iteration"] == 8]
    saved_s = max(s["end_s"] for s in before.spans if s["name"] == b"save")
    started_s = min(s["start_s"] for s in after.spans)
    return {"restart_s": float(max(rows["start_s"] + rows["time_s"]) - stopped_s),
            "restart_save_s": float(saved_s - stopped_s),
            "restart_launch_s": float(started_s - saved_s),
            "restart_start_up_s": float(min(rows["start_s"]) - started_s)}


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
    if num_restarts:
        lines += [f"{num_restarts} saves and restarts of the same job; medians",
                  f"  stop of the last iteration to end of the first  {ms['restart_s']:8.0f} ms   "
                  f"{figures['restart_over_downtime']:.0f} x the downtime",
                  f"  of it: save {ms['restart_save_s']:.0f} ms, end and launch {ms['restart_launch_s']:.0f} ms, "
                  f"start-up and load {ms['restart_start_up_s']:.0f} ms"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
