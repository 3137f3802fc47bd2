"""Prints a run: a table of each move, a summary, and where the files are; draws the pictures.

Owns the words and the layout. What the figures mean is in measures.py and moves.py, how pictures look in plots.py.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from analysis.log import Run, read_run
from analysis.measures import RunFigures, SpanTime, compute_run
from analysis.moves import MoveFigures, StageCost, compute_moves
from migration.errors import UserError

DESCRIPTION = """\
Print the moves of a run and how it went, and draw it. RUN is the folder that the run printed; it may be going on, or
have been killed. Pictures go into RUN (or --out): iteration_times.png and gantt.png (gantt_move0.png, ... where there
were several moves)."""
EXAMPLE = """\
example:
  python harness.py --np 8 --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3 --vacate b1@12 --run runs/first
  python -m analysis.report runs/first
  python -m analysis.report runs/first --json --no-plots | python -m json.tool"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 2 where the run can't be read or the pictures can't be written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=DESCRIPTION, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run folder, such as runs/first")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON (times in s, sizes in bytes)")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")
    parser.add_argument("--out", metavar="DIR", help="where the pictures go (default: RUN)")
    options = parser.parse_args(argv)
    try:
        run = read_run(options.run)
        pictures = [] if options.no_plots else _draw(run, Path(options.out or options.run))
    except (UserError, OSError) as error:  # OSError: the pictures can't be written there
        print(f"analysis.report: {error}", file=sys.stderr)
        return 2
    print(json.dumps(build_json(run, pictures), indent=1) if options.json else build_text(run, pictures))
    return 0


def report_text(run_path: str | os.PathLike[str]) -> str:
    """What the command prints, without drawing. Raises UserError where the run can't be read."""
    return build_text(read_run(run_path), [])


def build_json(run: Run, pictures: list[Path]) -> dict[str, object]:
    """All figures: times in seconds, sizes in bytes, null where there is none."""
    return {"run": dataclasses.asdict(compute_run(run)),
            "moves": [dataclasses.asdict(move) for move in compute_moves(run)],
            "pictures": [str(picture) for picture in pictures]}


def build_text(run: Run, pictures: list[Path]) -> str:
    """The report as text."""
    blocks = [_format_move(run, move) for move in compute_moves(run)]
    return "\n\n".join([*blocks, _format_run(run, compute_run(run), pictures)])


def _draw(run: Run, folder: Path) -> list[Path]:
    from analysis.plots import draw_run  # matplotlib takes a second to load, and the harness doesn't draw

    return draw_run(run, folder)


def _format_move(run: Run, move: MoveFigures) -> str:
    lines = [(f"move {move.move}" if move.move >= 0 else "request") + f": {move.request}  {move.outcome}"
             + (f" by arm {move.arm}" if move.arm not in ("", "full") else "")
             + (f" at iteration {move.iteration}" if move.iteration is not None else "")
             + (f", generation {move.generation}" if move.generation is not None else "")
             + (f" (controller's term {move.term})" if move.term else "")]
    lines += [f"  reason: {move.reason}"] if move.reason else []
    if move.outcome == "REFUSED":
        return "\n".join(lines)
    lines += [f"  slot {slot:<3} {run.label(leaver)} -> {run.label(joiner)}"
              for slot, leaver, joiner in move.assignments]
    lines += [f"  {name:<10}{format_s(value):>10}   {meaning}" for name, value, meaning in (
        ("setup", move.setup_s, "request to ready, beside training"),
        ("downtime", move.downtime_s, "job-wide: from when all stand at the switch, told to, to the last resumption"),
        ("total", move.total_s, "request to committed"))]
    if move.spans:
        lines += ["  phases: the longest span over the processes, and how many have one"]
        lines += [_format_span(run, span) for span in move.spans]
    lines += _format_transfers(run, move) + _format_stages(move.stages) + _format_memory(run, move)
    lines += [f"  process groups: {move.num_groups_rebuilt} rebuilt, {move.num_groups_kept} kept"]
    return "\n".join(lines + _format_iterations(move))


def _format_span(run: Run, span: SpanTime) -> str:
    size = f"  {format_bytes(span.bytes)} a process" if span.bytes else ""
    return (f"    {span.phase:<10} {span.name:<16}{format_s(span.longest_s):>10}   {run.label(span.world_rank):<10}"
            f" of {span.num_processes}{size}")


def _format_transfers(run: Run, move: MoveFigures) -> list[str]:
    if not move.transfers:
        return []
    lines = [f"  transfer: {format_bytes(move.ahead_bytes)} ahead, {format_bytes(move.transfer_bytes)} in the pause, "
             f"{_format_rate(move.transfer_gb_per_s)} there, all pairs together"]
    return lines + [f"    slot {item.slot:<3} {run.label(item.leaver)} -> {run.label(item.joiner)}  {item.phase:<10} "
                    f"{format_bytes(item.bytes):>9} in {format_s(item.time_s)}, {_format_rate(item.gb_per_s)}"
                    for item in move.transfers]


def _format_stages(stages: list[StageCost]) -> list[str]:
    if not stages:
        return []
    lines = ["  communicators: a group's stage, median and longest; all of a process's groups, longest"]
    for cost in stages:
        memory = f"  {cost.median_device_bytes / 2**20:+.0f} MiB a group" if cost.median_device_bytes else ""
        lines += [f"    {cost.switch:<10} {cost.stage:<8} {cost.num_groups:>3} groups {format_s(cost.median_s):>10} "
                  f"{format_s(cost.longest_s):>10} {format_s(cost.process_s):>10}{memory}"]
    return lines


def _format_memory(run: Run, move: MoveFigures) -> list[str]:
    if not move.memory:
        return []
    lines = ["  memory: peak before the request, and from there to the end of the move (of the process that grew most)"]
    for peak in move.memory:
        grown = "" if peak.before_bytes is None else f"  {(peak.peak_bytes - peak.before_bytes) / 1e6:+.1f} MB"
        before = "-" if peak.before_bytes is None else format_bytes(peak.before_bytes)
        lines += [f"    {peak.role:<7} {peak.kind:<9}{before:>10} -> {format_bytes(peak.peak_bytes)}{grown}   "
                  f"{run.label(peak.world_rank)} of {peak.num_processes}"]
    return lines


def _format_iterations(move: MoveFigures) -> list[str]:
    lines = []
    if move.preparing is not None:
        beside = move.preparing
        slowdown = "" if beside.median_slowdown is None else f", {beside.median_slowdown:+.1%} job-wide"
        lines += [f"  while preparing: iterations {beside.first_iteration} to {beside.last_iteration}, "
                  f"{beside.num_ended_before_ready} ended before ready; stall of a slot: median "
                  f"{format_s(beside.median_stall_s)}, longest {format_s(beside.max_stall_s)}{slowdown}"]
    if move.first_iteration_s is not None:
        ratio = f" ({move.first_iteration_s / move.undisturbed_s:.2f} x)" if move.undisturbed_s else ""
        lines += [f"  first iteration after the switch: {format_s(move.first_iteration_s)}, undisturbed median "
                  f"{format_s(move.undisturbed_s)}{ratio}"]
    return lines


def _format_run(run: Run, figures: RunFigures, pictures: list[Path]) -> str:
    status = {"unfinished": "no result yet: it goes on, or was killed"}.get(figures.status, figures.status)
    loss = "none logged" if figures.final_loss is None else f"{figures.final_loss:.6f}"
    skipped = f", {figures.num_skipped} steps skipped by the loss scaler" if figures.num_skipped else ""
    lines = [f"run: {figures.profile}, {status}" + (f": {figures.error}" if figures.error else ""),
             f"  {figures.num_slots} slots, {figures.num_processes} processes on {figures.num_hosts} hosts, generation "
             f"{'-' if figures.generation is None else figures.generation} at the end",
             f"  iterations   {figures.num_iterations}{skipped}, {format_s(figures.median_s)} each (median of the "
             "undisturbed, job-wide)",
             f"  final loss   {loss}",
             f"  start-up     {format_s(figures.startup_s)}, first process to first iteration"]
    lines += [_format_span(run, span) for span in figures.startup]
    lines += [f"  {words}" for words in figures.recovery_words]
    lines += [_format_span(run, span) for span in figures.recovering]
    lines += ["  fault        " + ", ".join(f"{name} {value}" for name, value in fault.items())
              for fault in figures.faults]
    lines += [f"  logs         {run.path / 'log'} ({len(run.processes)} files)"]
    lines += [f"  result       {run.path / 'result.json'}"] if run.result is not None else []
    return "\n".join(lines + [f"  picture      {picture}" for picture in pictures])


def format_s(time_s: float | None) -> str:
    """A time with its unit, to three digits."""
    if time_s is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(time_s) >= scale:
            number = f"{time_s / scale:#.3g}" if abs(time_s) < 1000 * scale else f"{time_s / scale:.0f}"
            return f"{number.rstrip('.')} {unit}"
    return f"{time_s / 1e-6:.3g} us" if time_s else "0 s"


def format_bytes(num_bytes: int) -> str:
    """A size with its unit, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def _format_rate(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else f"{gb_per_s:.3g} GB/s"


if __name__ == "__main__":
    sys.exit(main())
