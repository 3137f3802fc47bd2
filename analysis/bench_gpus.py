"""`python -m analysis.bench_gpus`: moves with a GPU for every process, in under nine minutes, as JSON and Markdown.

    moves     the first three of these moves vacate b0, b1 and b2; the job must equal the same one left alone, bit for
              bit. --moves in a row leave memory, descriptors, threads and communicators as they were. The second grid
              makes three moves
    ablation  a move by every arm in one job, and a save and restart of it, with the largest model that time and memory
              allow, at least 20 GB of state a rank
    switches  old communicators stay connected, are parked, are closed: downtime, memory by phase, slowdown meanwhile
    kill      SIGKILL to a process that holds a slot: detection and recovery

Four virtual hosts, three of them train, one is the spare. Eight GPUs: two a host, TP2 PP1 DP3 and TP1 PP2 DP3; four:
one a host, TP1 PP1 DP3; fewer: eight processes share them, and slowdowns bind nobody. Within a host NCCL takes NVLink,
between virtual hosts what it takes between hosts (on one machine, sockets), since each has an NCCL_HOSTID of its own.

Each part has a share of the time box and its results are written as soon as they are there; one that fails is named,
the others go on, and the exit code is 1. A target that is missed is only said. Parts can be asked for one by one
(--parts), and with --runs FOLDER a later call finds the undisturbed runs of an earlier one.

    python -m analysis.bench_gpus --plan              what would be run here, and how long it should take
    python -m analysis.bench_gpus --plan --gpus 8     the same for another machine
    python -m analysis.bench_gpus                     all of it
    python -m analysis.bench_gpus --parts moves,kill --runs /tmp/first
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time

from analysis.bench_parts import Bench, Part, add_arguments, open_bench, positive, run_parts
from analysis.device_memory import free_gpu_bytes
from analysis.gpus_model import LEAST_STATE_BYTES
from analysis.gpus_parts import FEWEST_MOVES, PARTS, Site, pick_model
from analysis.gpus_plan import (FEWEST_SETTLED, Estimate, Layout, build_estimates, build_layout, build_row, format_plan,
                                share_s)
from migration.errors import UserError
from migration.launch import serve_imports
from migration.pacing import parse_share

_H200_GIB = 138


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.gpus is not None:  # another machine's plan
        print(_plan(build_layout(args.gpus, int(args.gpu_gib * 2**30), args.prepare_share), args, can_park=True)[1])
        return 0
    bench = open_bench(args)
    layout = build_layout(len(bench.machine.gpus), free_gpu_bytes() if bench.on_gpu else 0, args.prepare_share)
    estimates, told = _plan(layout, args, can_park=bench.can_park)
    print(told, flush=True)
    if args.plan:
        return 0
    row = build_row(args.moves, spacing=layout.rates.spacing, settle=layout.rates.settle)

    def bind(name: str) -> Part:
        return lambda of: PARTS[name](Site(bench=of, layout=layout, row=row))

    def box(of: Bench, name: str) -> Bench:
        now_s = time.monotonic()
        return dataclasses.replace(of, ends_s=now_s + share_s(name, estimates, of.ends_s - now_s))

    with serve_imports({**os.environ, **bench.environment}) as shared:
        os.environ.update(shared)
        return run_parts("bench_gpus", bench, {each.name: bind(each.name) for each in estimates}, box)


def _plan(layout: Layout, args: argparse.Namespace, *, can_park: bool) -> tuple[list[Estimate], str]:
    """The parts that are asked for, with their seconds; the ablation's model has what the others leave of the box."""
    def build(what: str, seconds: float) -> list[Estimate]:
        every = build_estimates(layout, num_moves=args.moves, ablation=what, ablation_s=seconds, can_park=can_park)
        return [each for each in every if each.name in (args.parts or PARTS)]

    estimates = build("a small model", 90.0)
    if layout.num_gpus:
        others_s = layout.rates.imports_s + sum(each.seconds for each in estimates if each.name != "ablation")
        try:
            model = pick_model(layout, args.time_box - others_s, args.state_gb)
            estimates = build(model.describe(), model.seconds)
        except UserError as error:  # the other parts are possible all the same
            estimates = build(str(error), 0.0)
    return estimates, format_plan(layout, estimates, args.time_box)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis.bench_gpus", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, PARTS, "bench_gpus", time_box_s=525.0, default="all, in this order")
    parser.add_argument("--plan", action="store_true", help="print parts and seconds, and end")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --plan: of a machine with N GPUs that park")
    parser.add_argument("--gpu-gib", type=positive, default=_H200_GIB, metavar="GIB", help="with --gpus: free memory "
                        "of each (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=10, metavar="N", help="moves: in a row; from "
                        f"{FEWEST_SETTLED} on their leavings are judged (default: %(default)s)")
    parser.add_argument("--state-gb", type=positive, default=LEAST_STATE_BYTES / 1e9, metavar="GB",
                        help="ablation: state of a rank at least (default: %(default)g)")
    parser.add_argument("--prepare-share", default="1", metavar="SHARE", help="of all runs, as the harness's; less "
                        "takes longer than the plan says (default: %(default)s, no rests)")
    parser.add_argument("--no-restart", dest="restart", action="store_false", help="ablation: without the save and "
                        "restart")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE",
                        help="of the jobs of all parts")
    args = parser.parse_args(argv)
    if args.moves < FEWEST_MOVES:
        parser.error(f"--moves {args.moves}: at least {FEWEST_MOVES}, of b0, b1 and b2")
    if args.gpus is not None and (not args.plan or args.gpus < 0):
        parser.error("--gpus N goes with --plan, and N isn't below 0")
    try:
        parse_share(args.prepare_share)
    except UserError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    sys.exit(main())
