"""The command line of a run: arguments in, a Config and Options out. Imports nothing heavy."""
from __future__ import annotations

import argparse
import os
import time
from typing import NoReturn

from migration.acceptance import DEFAULTS, NONE, parse_limits
from migration.arms import ARMS, get_arms
from migration.communicators.nccl_policy import parse_pins
from migration.config import Config, apply_settings
from migration.errors import UserError
from migration.faults import parse_fault
from migration.options import AT_THE_CUT, STATE_KINDS, Options
from migration.pacing import AUTO, SHARES, parse_share
from migration.plan import parse_vacate
from migration.profiles import get_profile
from migration.straggler import FACTOR, FEWEST, IN_A_ROW, parse_slow

DEFAULT_PROFILE = "tiny_TP2_PP1"

EXAMPLES = """examples:
  python harness.py --np 8 --hosts b0,b1,b2,b3 --vacate b1@12     train on 3 hosts of 2 processes, move b1 to b3
  mpirun -n 8 python harness.py --hosts b0,b1,b2,b3 --vacate b1@12                   the same under one's own mpirun
  python harness.py --np 8 --hosts b0,b1,b2,b3 --vacate 'b1->b3@10' --vacate 'b0->b1@20' --vacate 'b2->b0@30'
  python harness.py --np 8 --hosts b0,b1,b2,b3 --data my.txt --set iterations=500 --set dtype=fp16
commands beside a run (each has --help):
  python harness.py request --run RUN --vacate b1     ask a running job to vacate a host
  python harness.py status  --run RUN                 iteration, phase, who is where
  python harness.py cancel  --run RUN                 cancel the move under way, or the next queued one
  python harness.py kill    --run RUN                 end every process of a run on all hosts, also of one that hangs
  python harness.py stop    --run RUN [--requeue]     checkpoint at the next boundary, and end
  python harness.py plan    --profile P --hosts b0,b1,b2,b3 --np 8 --vacate b1       what a move would do, without a job
  python harness.py check   --profile P --hosts b0,b1,b2,b3 --np 8      can these processes run it? (or under mpirun)
  python harness.py sync    --to DIR                  this code, as committed, to every node
  python harness.py demo                              an undisturbed run, a run with a move, and their comparison
  python harness.py --experiment NAME                 ablation, rebalance, straggler, ... (--experiment NAME --help)
afterwards: python -m analysis.report RUN, python -m analysis.compare RUN_A RUN_B
A running process answers SIGUSR2 by asking that its own host be vacated."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors: one line, printed by one rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see python {self.prog} --help)")


def build_parser() -> Parser:
    parser = Parser(prog="harness.py", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES,
                    description="Train a Megatron-Core GPT over MPI processes and move hosts to spare ones while it "
                    "trains:\nno restart, no lost iteration, every later loss bit for bit what it would have been.\n\n"
                    "Start more processes than the profile has slots: the first hosts train, every further process is "
                    "a spare.\nVacating a host moves each of its processes to a spare one; the host then holds "
                    "nothing that the job needs.")
    _add_training(parser)
    _add_place(parser)
    _add_moves(parser)
    _add_deadlines(parser)
    _add_experiments(parser)
    return parser


def _add_training(parser: Parser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--profile", default=DEFAULT_PROFILE, help="a named shape of model and grid (default: "
                      "%(default)s)")
    what.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
                      help="change one field of the profile, such as iterations=100 (a wrong name lists them); "
                      "repeatable")
    what.add_argument("--data", default="", help="a UTF-8 text file or folder, read as bytes, or the prefix of a "
                      "Megatron .bin/.idx dataset (default: text that comes with Python)")
    what.add_argument("--list-profiles", action="store_true", help="show the profiles and end")


def _add_place(parser: Parser) -> None:
    where = parser.add_argument_group("where it runs")
    where.add_argument("--np", type=int, metavar="N", help="start N processes on this machine (mpiexec with the right "
                       "flags); without it, start this program under mpirun or srun")
    where.add_argument("--hosts", default="", metavar="H,H,...", help="treat equal runs of processes as these hosts; "
                       "the first ones train, the rest are spares (default: the real hosts)")
    where.add_argument("--run", default="", help="folder of the run's files (default: runs/<time>-<profile>)")
    where.add_argument("--no-report", action="store_true", help="print no table of the moves at the end")
    where.add_argument("--no-shared-imports", action="store_true", help="with --np: let every process do its own "
                       "imports instead of forking them from one")
    _add_checkpoints(parser.add_argument_group("checkpoints"))


def _add_moves(parser: Parser) -> None:
    moves = parser.add_argument_group("moves")
    moves.add_argument("--vacate", action="append", default=[], metavar="HOST[,HOST][->HOST]@ITERATION",
                       help="move these hosts' processes to spare ones before this iteration, or as soon after it as "
                       "they are prepared; HOST:INDEX is a single process; repeatable")
    moves.add_argument("--hold", action="store_true", help="let training wait at that iteration until the move is "
                       "prepared, so that it takes effect exactly there")
    moves.add_argument("--lead", type=int, default=10, metavar="N", help="start to prepare N iterations ahead "
                       "(default: %(default)s)")
    moves.add_argument("--arm", default="full", metavar="A[,B...]", help=f"how much is done beside training; moves "
                       f"take them in turn: {', '.join(ARMS)} (default: %(default)s; see microbenchmark.md)")
    moves.add_argument("--transfer-limit", type=float, default=0.0, metavar="MB/S", help="a leaver sends its state no "
                       "faster than this while training goes on (default: no limit)")
    moves.add_argument("--prepare-share", default=AUTO, metavar="SHARE", help="after each communicator that is "
                       "prepared beside training, rest until preparing has taken this share of the time, so that "
                       "iterations keep their length; rests end in the first half of --prepare-deadline and of what "
                       "is left of training, with the abort of the move, and where training waits for it; none for a "
                       "node in trouble (--watch-slurm); between closing old ones likewise; 1: no rest (default: "
                       f"{AUTO}, {SHARES['cuda']:g} on GPUs, {SHARES['cpu']:g} on CPUs)")
    moves.add_argument("--require-bitwise", action="store_true", help="abort a move after which sums would have other "
                       "bits, instead of saying so")
    moves.add_argument("--warm-up", default="synthetic", choices=("off", "synthetic", "recorded"), help="a joiner runs "
                       "a shadow iteration that no peer takes part in: with made-up answers, or with those that its "
                       "slot got in the run's first iteration, kept in RUN/recordings; recorded also compares every "
                       "call and the loss, synthetic is left out where all joiners have run their roles before "
                       "(default: %(default)s)")
    moves.add_argument("--record-limit", type=int, default=64, metavar="MIB", help="host memory, and size of the "
                       "file, of such a recording per slot: what is large against it is kept in part (default: "
                       "%(default)s)")
    moves.add_argument("--joiner-traffic", default="real", choices=("real", "none"), help="in the shadow iteration, "
                       "groups whose members are all joiners on one host communicate for real (default: %(default)s)")
    moves.add_argument("--standby", default="auto", choices=("auto", "cold", "warm"), help="warm: spares build and run "
                       "each pipeline role (first, middle, last) once before any move is asked for; auto is warm on "
                       "GPUs and cold on CPUs, where it would take the cores of training (default: %(default)s)")
    moves.add_argument("--accept", default="", metavar="NAME=SHARE,...", help="what a joiner must have of its leaver's "
                       "matmul rate, used memory and bandwidth, else the move aborts (default: " + _default_limits()
                       + "); none: don't measure")
    moves.add_argument("--nccl-switch", default="auto", choices=("auto", "connected", "parked", "lazy"), help="on "
                       "GPUs: keep old and new communicators connected side by side, or park the old ones to make room "
                       "(NCCL 2.30.3), or close them (with --allow-lazy); auto takes what memory allows (default: "
                       "%(default)s)")
    moves.add_argument("--allow-lazy", action="store_true", help="where memory allows nothing better, old "
                       "communicators may be closed before the commit; a move that aborts after that rebuilds them, "
                       "and says so")
    moves.add_argument("--nccl-pin", default="", metavar="NAME=VALUE,...", help="fix what decides in which order NCCL "
                       "adds: ALGO=Ring,PROTO=Simple, MIN_CHANNELS, MAX_CHANNELS, MIN_CTAS, MAX_CTAS; sets NCCL's "
                       "variables of these names on every process")
    moves.add_argument("--connect", default="ahead", choices=("ahead", "pause", "background"), help="on GPUs, where "
                       "memory allows old and new side by side: connect new communicators ahead of the pause, one "
                       "group an iteration, or in the pause, or on the prepare thread, which can deadlock (default: "
                       "%(default)s)")
    moves.add_argument("--recover", default="auto", choices=("auto", "off"), help="when a process that holds a slot is "
                       "lost: a spare takes its slot and all go on from the newest checkpoint, in the same processes, "
                       "or the run ends, to be started again (default: %(default)s)")
    moves.add_argument("--watch-slurm", default="auto", choices=("auto", "off"), help="in a job of Slurm, vacate nodes "
                       "that are drained, fail or are about to be taken away, and give them back (default: "
                       "%(default)s)")
    moves.add_argument("--slurm-poll", type=float, default=5.0, metavar="S", help="look at Slurm every S seconds "
                       "(default: %(default)g)")
    moves.add_argument("--find-stragglers", action="store_true", help="compare what each process works by itself in an "
                       f"iteration, and name one that takes {FACTOR:g} times as long as its peers in {IN_A_ROW} "
                       "iterations in a row")
    moves.add_argument("--auto-evict", action="store_true", help="the same, and vacate its host")


def _add_deadlines(parser: Parser) -> None:
    limits = parser.add_argument_group("deadlines, in seconds")
    for name, default, text in (
            ("prepare-deadline", 300.0, "from the request to all prepared; then the move aborts. Also for all slots to be "
             "ready again when one was lost"),
            ("switch-deadline", 60.0, "from the first arrival at the boundary to the verdict; then the move aborts"),
            ("heartbeat-timeout", 15.0, "a process not heard for so long is lost"),
            ("orphan-timeout", 60.0, "a process that hears no controller for so long ends itself")):
        limits.add_argument(f"--{name}", type=float, default=default, metavar="S",
                            help=f"{text} (default: %(default)g)")


def _add_experiments(parser: Parser) -> None:
    tests = parser.add_argument_group("for tests and experiments")
    tests.add_argument("--fault", action="append", default=[], metavar="KIND@SLOT:PHASE[#MOVE]", help="raise, kill, "
                       "hang, corrupt or cancel at the joiner of SLOT in PREPARING, READY or SWITCHING, or slow in "
                       "PREPARING; kill or hang at its leaver in LEAVING (at the switchover), or at the joiner in "
                       "COMMITTED; repeatable")
    tests.add_argument("--omit-state", action="append", default=[], metavar="KIND", help="leave out this kind of "
                       "state, to see the comparison fail; repeatable")
    tests.add_argument("--leaver-steps", action="store_true", help="a leaver takes the optimizer step of the "
                       "switchover too, and its state is compared with the joiner's; a difference ends the run")
    tests.add_argument("--slow-joiner", type=float, default=0.0, metavar="S", help="a joiner's preparation takes at "
                       "least S seconds")
    tests.add_argument("--slow-checkpoint", type=float, default=0.0, metavar="S", help="a checkpoint takes S seconds "
                       "more before it is finished")
    tests.add_argument("--slow", action="append", default=[], metavar="SLOT:FACTOR@ITERATION", help="the process that "
                       "holds SLOT then works FACTOR times as long from there on, in whatever slot; repeatable")


def _default_limits() -> str:
    return "; ".join(f"matmul={limits.matmul:g},memory={limits.memory:g},bandwidth={limits.bandwidth:g} on a {device}"
                     for device, limits in DEFAULTS.items())
def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--checkpoints", default="", metavar="DIR", help="save Megatron's distributed checkpoints "
                       "there, at the end and as --checkpoint-every says, and start from the newest one that is whole")
    group.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="save before every N-th iteration "
                       "(without --checkpoints: in RUN/checkpoints)")
    group.add_argument("--keep-checkpoints", type=int, default=2, metavar="K", help="keep the last K (default: "
                       "%(default)s)")
    group.add_argument("--save-at", type=int, metavar="ITERATION", help="stop before this iteration with a checkpoint")
    group.add_argument("--load", default="", metavar="DIR", help="start from this checkpoint, or the newest one in "
                       "this folder of them, on whatever hosts, bit for bit")
    group.add_argument("--checkpoint-digests", action="store_true", help="save the digests of all state too; a load "
                       "then compares what came back, bit for bit")


def _check_checkpoints(args: argparse.Namespace, iterations: int) -> None:
    if args.save_at is not None and not 0 < args.save_at < iterations:
        raise UserError(f"--save-at {args.save_at}: must be an iteration between 1 and {iterations - 1}")
    if args.checkpoint_every < 0:
        raise UserError(f"--checkpoint-every {args.checkpoint_every}: must be at least 0 iterations")
    if args.keep_checkpoints < 1:
        raise UserError(f"--keep-checkpoints {args.keep_checkpoints}: must be at least 1")


def parse_run(argv: list[str]) -> tuple[Config, Options]:
    """Config and Options of a run. Raises UserError for anything the user got wrong."""
    args = build_parser().parse_args(argv)
    settings = args.settings + ([f"data={os.path.abspath(args.data)}"] if args.data else [])
    config = apply_settings(get_profile(args.profile), settings)
    for text in args.vacate:
        iteration = parse_vacate(text, need_iteration=True).iteration
        last = (args.save_at if args.save_at is not None else config.iterations) - 1
        if iteration > last:
            raise UserError(f"--vacate {text}: the last iteration of the run is {last}")
    for text in args.fault:
        if parse_fault(text).kind == "slow" and args.accept == NONE:
            raise UserError(f"--fault {text}: with --accept {NONE} nobody measures a joiner's speed")
    if (args.find_stragglers or args.auto_evict) and config.job_size < FEWEST:
        raise UserError(f"--find-stragglers, --auto-evict: of {config.job_size} slots nobody can say which one is "
                        f"slow; {FEWEST} are needed")
    for text in args.slow:
        parse_slow(text, config.job_size)
    for device in DEFAULTS:
        parse_limits(args.accept, device)
    for kind in args.omit_state:
        if kind not in (*STATE_KINDS, AT_THE_CUT):
            raise UserError(f"--omit-state {kind}: there is no such kind of state; kinds are "
                            f"{', '.join((*STATE_KINDS, AT_THE_CUT))}")
    _check_checkpoints(args, config.iterations)
    for name in ("prepare_deadline", "switch_deadline", "heartbeat_timeout", "orphan_timeout", "slurm_poll"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be above 0 s, and finite")
    if args.record_limit < 1:
        raise UserError(f"--record-limit {args.record_limit}: must be at least 1 MiB")
    if not 0 <= args.transfer_limit < float("inf"):
        raise UserError(f"--transfer-limit {args.transfer_limit:g}: must be 0 (none) or a number of MB/s")
    parse_pins(args.nccl_pin)
    prepare_share = parse_share(args.prepare_share)
    if args.nccl_switch == "lazy" and not args.allow_lazy:
        raise UserError("--nccl-switch lazy: closes old communicators before the commit, so that a move that aborts "
                        "later must rebuild them; add --allow-lazy if that will do")
    if args.lead < 0:
        raise UserError(f"--lead {args.lead}: must be at least 0 iterations")
    run = os.path.abspath(args.run or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.profile}")
    saves = args.checkpoint_every or args.save_at
    checkpoints = args.checkpoints or (os.path.join(run, "checkpoints") if saves else "")
    return config, Options(
        run=run, hosts=tuple(args.hosts.split(",")) if args.hosts else (), vacate=tuple(args.vacate),
        hold=args.hold, lead=args.lead, arms=get_arms(args.arm), transfer_limit_bytes_s=args.transfer_limit * 1e6,
        leaver_steps=args.leaver_steps, prepare_deadline_s=args.prepare_deadline, prepare_share=prepare_share,
        switch_deadline_s=args.switch_deadline, heartbeat_timeout_s=args.heartbeat_timeout,
        orphan_timeout_s=args.orphan_timeout, require_bitwise=args.require_bitwise, faults=tuple(args.fault),
        checkpoints=os.path.abspath(checkpoints) if checkpoints else "", checkpoint_every=args.checkpoint_every,
        keep_checkpoints=args.keep_checkpoints, checkpoint_digests=args.checkpoint_digests, save_at=args.save_at,
        report=not args.no_report, accept=args.accept, switch=args.nccl_switch, connect=args.connect,
        allow_lazy=args.allow_lazy, pins=args.nccl_pin,
        load=os.path.abspath(args.load) if args.load else "", omit_state=tuple(args.omit_state),
        find_stragglers=args.find_stragglers or args.auto_evict, auto_evict=args.auto_evict, slow=tuple(args.slow),
        slow_joiner_s=args.slow_joiner, slow_checkpoint_s=args.slow_checkpoint,
        recover=args.recover, watch_slurm=args.watch_slurm, slurm_poll_s=args.slurm_poll,
        warm_up=args.warm_up, record_limit_mib=args.record_limit,
        joiner_traffic=args.joiner_traffic == "real", standby=args.standby)
