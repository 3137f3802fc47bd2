"""`python harness.py --experiment NAME`: run the experiment's jobs on this machine, print its table, write it down.

Owns the command line and the files: RUN/<name>.json, .txt and, where there is one, .png, beside the jobs' own folders.
What a job is says migration/experiments.py; what its figures mean, the module of each experiment.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis import ablation, scale, speed, straggling
from analysis.log import Run, read_run
from analysis.restart_arm import measure_restart
from migration import experiments
from migration.arguments import Parser, parse_run
from migration.config import apply_settings
from migration.errors import UserError
from migration.experiments import EXPERIMENTS, Site, build_site
from migration.launch import run_child
from migration.profiles import get_profile

_M24_PROFILE, _PROFILE = "tiny_TP4_PP2", "tiny_TP2_PP1"
_M24_SPACING, _SPACING = 12, 8
_PATHS = ("data", "load", "checkpoints")  # arguments of a run

Table = tuple[str, dict[str, Any], Callable[[Path], None] | None]  # text, JSON, how to draw it


def main(argv: list[str]) -> int:
    """Returns 0 if every job completed and the table is written. Raises UserError for anything else."""
    args, passed_on = _parse(argv)
    profile = args.profile or (_M24_PROFILE if args.experiment == "m24_live_migration" else _PROFILE)
    arguments = ["--profile", profile, *(part for text in args.settings for part in ("--set", text)), *passed_on]
    config = apply_settings(get_profile(profile), args.settings)
    site = build_site(config, args.np, args.hosts.split(",") if args.hosts else (), arguments)
    folder = Path(os.path.abspath(args.run or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{args.experiment}"))
    if (folder / f"{args.experiment}.json").exists():
        raise UserError(f"--run {folder}: there is a finished experiment in it; name another folder")
    text, figures, draw = _TABLES[args.experiment](args, site, folder)
    _write(folder, args.experiment, text, figures, draw, argv)
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own arguments, and those that every job gets as they are."""
    names = "\n".join(f"  {name:20s} {what}" for name, what in EXPERIMENTS.items())
    parser = Parser(prog="harness.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                    description=f"Run an experiment on this machine and print its table.\n\n{names}",
                    epilog="Further arguments of harness.py, such as --connect, go to each job as they are.")
    parser.add_argument("--experiment", required=True, choices=EXPERIMENTS, metavar="NAME")
    parser.add_argument("--profile", default="", help=f"default: {_PROFILE}; of m24_live_migration {_M24_PROFILE}")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings")
    for name in _PATHS:
        parser.add_argument(f"--{name}", default="", metavar="PATH", help="of each job (see python harness.py --help)")
    parser.add_argument("--np", type=int, metavar="N", help="processes (default: the job's hosts and a spare one)")
    parser.add_argument("--hosts", default="", metavar="H,H,...", help="virtual hosts (default: b0,b1,...)")
    parser.add_argument("--run", default="", help="folder of the experiment (default: runs/<time>-<name>)")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="ablation: moves by each arm; "
                        "scale_out_of_host: there and back, so often (default: %(default)s)")
    parser.add_argument("--spacing", type=_positive, metavar="N", help="iterations to the first move, from one to the "
                        "next, and after the last one; more where a move takes longer to prepare (default: "
                        f"{_SPACING}; of m24_live_migration {_M24_SPACING})")
    parser.add_argument("--restarts", type=int, default=1, metavar="N", help="ablation: so often a save and restart of "
                        "the same job; 0: none (default: %(default)s)")
    parser.add_argument("--every", type=_positive, default=50, metavar="N", help="rebalance: iterations from one move "
                        "to the next (default: %(default)s)")
    parser.add_argument("--moves", type=_positive, default=4, metavar="N",
                        help="rebalance: moves (default: %(default)s)")
    parser.add_argument("--slow", default="", metavar="SLOT:FACTOR@ITERATION", help="straggler: which process gets "
                        "slow, how much, and when (default: the first slot of the second host, 3, 10)")
    parser.add_argument("--auto-evict", action="store_true", help="straggler: vacate the host that is found")
    args, passed_on = parser.parse_known_args(argv)
    # jobs are started in the code's folder: paths are those seen from here
    paths = [(f"--{name}", os.path.abspath(path)) for name in _PATHS if (path := getattr(args, name))]
    args.settings = [re.sub("^data=(.+)", lambda found: f"data={os.path.abspath(found[1])}", text)
                     for text in args.settings]
    return args, [*(part for pair in paths for part in pair), *passed_on]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


# ---- the experiments


def _ablation(args: argparse.Namespace, site: Site, folder: Path) -> Table:
    spacing = args.spacing or _SPACING
    arguments, arms = experiments.ablation_job(site, args.rounds, spacing)
    run = run_job(site, arguments, folder / "moves")
    restarts = [("save_and_restart", _restart(site, folder, number, spacing)) for number in range(args.restarts)]
    found = ablation.compute_ablation(run, len(arms), _median(restarts))
    return (ablation.format_ablation(found), ablation.ablation_json(found),
            lambda path: ablation.draw_ablation(found, path))


def _restart(site: Site, folder: Path, number: int, iteration: int) -> dict[str, float]:
    """The parts of a save and restart of the site's job at the iteration of the first move, with the vacated host's
    processes on the spare one."""
    names = list(site.host_names)
    here, there = names.index(site.vacated), names.index(site.spare)
    swapped = list(names)
    swapped[here], swapped[there] = names[there], names[here]
    print(f"\n=== save and restart {number + 1}", flush=True)
    times = measure_restart(site.arguments, iteration, ",".join(names), ",".join(swapped),
                            folder / f"restart{number}", num_processes=len(site.hosts))
    shutil.rmtree(folder / f"restart{number}" / "before" / "checkpoints")  # tens of GB, and of no use any more
    return {**dataclasses.asdict(times), "total_s": times.total_s}


def _median(restarts: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """The one in the middle, by its total: its parts add up."""
    by_total = sorted(restarts, key=lambda row: row[1]["total_s"])
    return by_total[len(by_total) // 2:][:1]


def _rebalance(args: argparse.Namespace, site: Site, folder: Path) -> Table:
    run = run_job(site, experiments.to_and_fro(site, args.moves, args.every), folder / "job")
    found = speed.compute_speed(run, args.moves, args.every)
    return speed.format_speed(found), speed.speed_json(found), None


def _scale(args: argparse.Namespace, site: Site, folder: Path) -> Table:
    arguments, numbers = experiments.scale_job(site, args.rounds, args.spacing or _SPACING)
    found = scale.compute_scale(run_job(site, arguments, folder / "job"), numbers)
    return scale.format_scale(found), scale.scale_json(found), lambda path: scale.draw_scale(found, path)


def _straggler(args: argparse.Namespace, site: Site, folder: Path) -> Table:
    run = run_job(site, experiments.straggler_job(site, args.slow, evict=args.auto_evict), folder / "job")
    found = straggling.compute_straggling(run)
    return straggling.format_straggling(found), straggling.straggling_json(found), None


def _m24(args: argparse.Namespace, site: Site, folder: Path) -> Table:
    run = run_job(site, experiments.m24_job(site, args.spacing or _M24_SPACING), folder / "job")
    found = ablation.compute_ablation(run, 1, ())
    return ablation.format_ablation(found), ablation.ablation_json(found), None


_TABLES: dict[str, Callable[[argparse.Namespace, Site, Path], Table]] = {
    "m24_live_migration": _m24, "ablation": _ablation, "rebalance": _rebalance, "straggler": _straggler,
    "scale_out_of_host": _scale}


# ---- running, writing


def run_job(site: Site, arguments: Sequence[str], run: Path) -> Run:
    """One job by the harness, whose output goes where ours goes. Raises UserError if it doesn't complete."""
    at_once = ("--prepare-share", "1")  # moves follow each other sooner than rests allow
    own = ["--hosts", ",".join(site.host_names), "--run", str(run), "--no-report", *at_once, *site.arguments,
           *arguments]
    parse_run(own)  # what is wrong is said before anything is started
    command = ["harness.py", "--np", str(len(site.hosts)), *own]
    print(f"=== python {shlex.join(command)}", flush=True)
    code = run_child(command).returncode
    if code:
        raise UserError(f"the experiment's job ended with exit code {code}: see above, and {run}")
    return read_run(run)


def _write(folder: Path, name: str, text: str, figures: dict[str, Any], draw: Callable[[Path], None] | None,
           argv: list[str]) -> None:
    text += f"\ncommand: python harness.py {shlex.join(argv)}"
    print(f"\n{text}")
    (folder / f"{name}.txt").write_text(text + "\n")
    if draw is not None:
        draw(folder / f"{name}.png")
        print(f"picture: {folder / f'{name}.png'}")
    (folder / f"{name}.json").write_text(json.dumps({"command": argv, **figures}, indent=1) + "\n")
    print(f"figures: {folder / f'{name}.json'}")
