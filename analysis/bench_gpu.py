"""`python -m analysis.bench_gpu`: what moves cost on this machine's GPUs, part by part, as JSON and Markdown.

    moves   8 processes on 4 virtual hosts, TP2 PP1 DP3 and a spare host: connected ahead, in the pause, parked, naive
    m24     32 processes on one GPU, TP4 PP2 DP3 and a spare host (--twin: an undisturbed run too, to be equal to)
    host    the host's cost of a collective against stock ProcessGroupNCCL, two ranks
    state   a slot's state over a pair against one bare send of as many bytes, two ranks
    beside  two ranks train while a thread prepares the next generation of all their groups, with rests, and discards it
    soak    the same for many short rounds: of a few groups, without rests

beside and soak also draw their iterations over time, by what went on beside each: beside_parked.png and so on.
Results are written after each part, in place of that part's older ones. The exit code is 0 unless a part failed or an
equality broke; a target that is missed is only said. --device cpu runs the same on Gloo.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from analysis.bench_parts import EQUAL, Bench, Part, add_arguments, names_of, open_bench, run_parts
from analysis.beside_plot import draw_beside
from analysis.gpu_figures import beside_figures, host_cost_figures, job_series, state_figures
from analysis.gpu_moves import RunFailed, inequality, move_figures
from analysis.ranks import run_ranks
from analysis.results import Figure, Section
from migration.communicators.nccl_policy import CLOSE_BY, SWITCHES
from migration.errors import UserError
from migration.pacing import choose_share, parse_share

AHEAD_AT_MOST = 0.05  # downtime connected ahead, over that of the naive arm: stop, build all, go
ARMS = {  # the naive one last: the others are compared with it
    "connected": ("--nccl-switch", "connected"), "connected in the pause": ("--connect", "pause"),
    "parked": ("--nccl-switch", "parked"), "naive": ("--arm", "naive")}
EQUAL_LOSSES = "Losses and gradient norms equal those of the same job left alone, bit for bit"
_ROUNDS_SHARE = 0.6  # of the time box: the rest is for the start and for the same job left alone
HOSTS = ("--hosts", "b0,b1,b2,b3")
AT_ONCE = ("--prepare-share", "1")  # these runs are too short for rests; beside looks at what they are good for
MOVES = ("--np", "8", *HOSTS, *AT_ONCE)
M24 = ("--np", "32", *HOSTS, *AT_ONCE, "--set", "tp=4", "--set", "pp=2", "--set", "dp=3")
M24_ALONE = 4  # iterations before the request; all but the first, which is longer, say what an undisturbed one takes
M24_DEADLINES = ("--prepare-deadline", "500", "--switch-deadline", "400", "--heartbeat-timeout", "120",
                 "--orphan-timeout", "240")
# an iteration of 30 to 100 ms on an H200, and a state of 5 GB; a CPU has small ones
BESIDE = {True: ("tp=2", "dp=1", "num_layers=4", "hidden_size=2048", "num_attention_heads=16", "seq_length=1024",
                 "num_microbatches=2", "lr=1e-4"),
          False: ("tp=2", "dp=1", "num_layers=2", "hidden_size=32", "seq_length=16", "num_microbatches=1")}
STATE = {True: ("num_layers=8", "hidden_size=4096", "num_attention_heads=32"),
         False: ("num_layers=2", "hidden_size=64")}


# ---- the parts


def moves(bench: Bench) -> Iterable[Section]:
    """One move of b1, an arm after the other; the section is there again, with a column more, after each."""
    half = bench.args.iterations // 2
    sizes = ("--set", f"iterations={bench.args.iterations}")
    alone = bench.train("undisturbed", (*MOVES, *sizes))
    vacate = ("--vacate", f"b1->b3@{half}", "--lead", f"{half - 2}")
    downtimes_s, figures, commands, problems = {}, [], [], []
    for name in bench.args.arms:
        if name == "parked" and not bench.can_park:
            continue
        try:
            arm = bench.train(name.replace(" ", "-"), (*MOVES, *sizes, *vacate, *ARMS[name]))
            figures += move_figures(arm, name)
            downtimes_s[name] = arm.only_move().downtime_s
            commands.append(arm.command)
            problems.append(inequality(arm, alone.run))
        except RunFailed as error:  # the other arms are still worth having
            problems.append(f"{name}: {error}")
        if name == "naive" and name in downtimes_s:
            figures += [Figure(name="downtime over that of naive", column=other, value=seconds / downtimes_s[name],
                               unit="x", at_most=AHEAD_AT_MOST if bench.on_gpu and other == "connected" else None)
                        for other, seconds in downtimes_s.items()]
        yield bench.section("One move, 8 processes, TP2 PP1 DP3", figures, *commands,
                            problem="; ".join(filter(None, problems)), notes=("" if any(problems) else EQUAL,))


def m24(bench: Bench) -> Iterable[Section]:
    """b1 of 24 slots, all processes on GPU 0."""
    half = bench.args.m24_iterations // 2
    sizes = (*M24, "--set", f"iterations={bench.args.m24_iterations}", *M24_DEADLINES)
    lead = max(1, half - M24_ALONE)
    options = ("--vacate", f"b1->b3@{half}", "--lead", f"{lead}", "--connect", bench.args.m24_connect)
    # NCCL's buffers between hosts are in host memory, of which 32 processes with old and new communicators side by side
    # took more than 128 GiB
    one_gpu = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_BUFFSIZE": str(1 << 20)} if bench.on_gpu else {}
    arm = bench.train("m24", (*sizes, *options), environment=one_gpu)
    title, figures = "The m24 shape on one GPU, 32 processes, TP4 PP2 DP3", move_figures(arm, "")
    yield bench.section(title, figures, arm.command,
                        notes=("Not compared with an undisturbed run; leaver and joiner were, by digest.",))
    if bench.args.twin:
        problem = inequality(arm, bench.train("m24-undisturbed", sizes, environment=one_gpu).run)
        yield bench.section(title, figures, arm.command, problem=problem, notes=("" if problem else EQUAL,))


def host(bench: Bench) -> Iterable[Section]:
    arguments = {"repeats": bench.args.repeats * 10, "calls": 50}
    rows = run_ranks("analysis.gpu_bodies:host_cost", world=2, hosts=_own_gpus(bench), device=bench.device,
                     timeout_s=bench.left_s(200.0), arguments=arguments, environment=bench.environment)
    figures = host_cost_figures(rows[0]["costs"], bound=bench.on_gpu)
    yield bench.section("Host cost of a collective, two ranks", figures)


def state(bench: Bench) -> Iterable[Section]:
    for hosts, way in (("one", "one host"), ("each", "each rank its own host")):
        if hosts == "one" and len(bench.machine.gpus) < 2:
            continue  # ranks of a host can't share a GPU; to Gloo hosts are all the same
        arguments = {"repeats": bench.args.repeats, "settings": bench.args.state_set or STATE[bench.on_gpu]}
        rows = run_ranks("analysis.gpu_bodies:state_rate", world=2, hosts=hosts, device=bench.device,
                         timeout_s=bench.left_s(200.0), arguments=arguments, environment=bench.environment)
        yield bench.section(f"A slot's state over a pair, {way}", state_figures(rows, bound=bench.on_gpu))


def beside(bench: Bench) -> Iterable[Section]:
    share = choose_share(bench.args.prepare_share, bench.device)
    for switch in _switches(bench):
        title = f"Preparing beside training, {_two_ranks(bench)}, {switch}, share {share:g}"
        yield _prepare_beside(bench, "beside", title, switch, rounds=bench.args.beside_rounds, share=share,
                              num_groups=None, alone=bench.args.alone)


def soak(bench: Bench) -> Iterable[Section]:
    for switch in _switches(bench):
        title = f"Preparing {bench.args.soak_groups} groups over and over, {_two_ranks(bench)}, {switch}"
        yield _prepare_beside(bench, "soak", title, switch, rounds=bench.args.rounds, share=1.0,
                              num_groups=bench.args.soak_groups, alone=2)


def _prepare_beside(bench: Bench, part: str, title: str, switch: str, *, rounds: int, share: float,
                    num_groups: int | None, alone: int) -> Section:
    arguments = {"rounds": rounds, "rounds_s": bench.left_s(580.0) * _ROUNDS_SHARE, "share": share, "alone": alone,
                 "num_groups": num_groups, "stride": bench.args.stride, "switch": switch, "twin": bench.args.compare,
                 "close_by": bench.args.close_by, "settings": [*BESIDE[bench.on_gpu], *bench.args.beside_set]}
    rows = run_ranks("analysis.prepare_beside:beside", world=2, hosts=_own_gpus(bench), device=bench.device,
                     timeout_s=bench.left_s(580.0), arguments=arguments, environment=bench.environment)
    bound = len(bench.machine.gpus) >= 2
    picture = draw_beside(job_series(rows), title, bench.out / f"{part}_{switch}.png")
    print(f"bench_gpu: picture: {picture}", flush=True)
    figures, problem = beside_figures(rows, bound=bound and num_groups is None, parked=switch == "parked")
    told = (f"{len(rows[0]['rounds'])} rounds of {rounds} without a hang; {rows[0]['num_losses']} iterations; "
            f"{rows[0]['num_groups']} groups a round; closed by {bench.args.close_by}; "
            f"{' '.join(arguments['settings'])}.")
    equal = EQUAL
    if rows[0]["num_compared"] < rows[0]["num_losses"]:
        equal = f"{EQUAL_LOSSES} ({rows[0]['num_compared']} iterations)."
    shared = "" if bound else "The ranks share a processor or a GPU: slowdown and memory are not judged."
    return bench.section(title, figures, problem=problem, notes=(told, "" if problem else equal, shared))


PARTS: dict[str, Part] = {
    "moves": moves, "host": host, "state": state, "beside": beside, "soak": soak, "m24": m24}


def _switches(bench: Bench) -> list[str]:
    """How old and new communicators get along in beside and soak."""
    return bench.args.beside_switch or (["parked"] if bench.can_park else ["connected"])


def _own_gpus(bench: Bench) -> str:
    """Two ranks are one host where each has a GPU of its own."""
    return "one" if len(bench.machine.gpus) >= 2 else "each"


def _two_ranks(bench: Bench) -> str:
    """In a title, so that ranks that share a GPU never replace the figures of those that don't."""
    return "two ranks of one GPU" if len(bench.machine.gpus) == 1 else "two ranks"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    bench = open_bench(args)
    names = args.parts or (PARTS if bench.on_gpu else [part for part in PARTS if part != "m24"])
    return run_parts("bench_gpu", bench, {name: PARTS[name] for name in names})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis.bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, PARTS, "bench_gpu", time_box_s=3600.0, default="all; m24 needs a GPU")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE",
                        help="of the jobs of moves and m24")
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS), help=f"moves: some of {', '.join(ARMS)}")
    parser.add_argument("--iterations", type=int, default=120, help="moves: of each run (default: %(default)s)")
    parser.add_argument("--m24-iterations", type=int, default=24, help="m24: 8 s each on an H200, 18 of them from the "
                        "request to the switch when connected ahead (default: %(default)s)")
    parser.add_argument("--m24-connect", choices=("ahead", "pause"), default="ahead")
    parser.add_argument("--twin", action="store_true", help="m24: an undisturbed run too")
    parser.add_argument("--repeats", type=int, default=10, help="host, state: (default: %(default)s)")
    parser.add_argument("--state-set", action="append", default=[], metavar="FIELD=VALUE", help="state: the job")
    parser.add_argument("--prepare-share", type=_share, help="beside: as in a run (default: auto)")
    parser.add_argument("--beside-rounds", type=int, default=2, help="beside: preparations (default: %(default)s)")
    parser.add_argument("--alone", type=int, default=60, help="beside: undisturbed iterations before the first and "
                        "after each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="soak: preparations (default: %(default)s)")
    parser.add_argument("--soak-groups", type=int, default=2, help="soak: groups in each (default: %(default)s)")
    parser.add_argument("--beside-switch", type=names_of(SWITCHES), help="beside, soak: one after the other (default: "
                        "parked where NCCL can, else connected)")
    parser.add_argument("--close-by", choices=CLOSE_BY, default=CLOSE_BY[0], help="beside, soak: what frees a parked "
                        "communicator (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=10, help="beside, soak: iterations after which ranks compare "
                        "whether a round is over (default: %(default)s)")
    parser.add_argument("--compare", type=int, default=1000, help="beside, soak: at most so many iterations are "
                        "compared with the job left alone (default: %(default)s)")
    parser.add_argument("--beside-set", action="append", default=[], metavar="FIELD=VALUE",
                        help="beside, soak: the job")
    return parser.parse_args(argv)


def _share(text: str) -> float | None:
    try:
        return parse_share(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
