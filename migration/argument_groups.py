"""What can be said on the command line of a run, group by group, as --help shows it. arguments.py reads it."""
from __future__ import annotations

import argparse

from migration.acceptance import DEFAULTS
from migration.arms import ARMS
from migration.pacing import AUTO, SHARES
from migration.profiles import DEFAULT_PROFILE
from migration.straggler import FACTOR, IN_A_ROW


def add_all(parser: argparse.ArgumentParser) -> None:
    """Every group of arguments, in the order of --help."""
    for add in (_add_training, _add_place, _add_checkpoints, _add_moves, _add_joiners, _add_communicators, _add_trouble,
                _add_deadlines, _add_experiments):
        add(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--profile", default=DEFAULT_PROFILE, help="a named shape of model and grid (default: "
                      "%(default)s)")
    what.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
                      help="change one field of the profile, such as iterations=100 (a wrong name lists them); "
                      "repeatable")
    what.add_argument("--data", default="", help="a UTF-8 text file or folder, read as bytes, or the prefix of a "
                      "Megatron .bin/.idx dataset (default: text that comes with Python)")
    what.add_argument("--list-profiles", action="store_true", help="show the profiles and end")


def _add_place(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    where.add_argument("--np", type=int, metavar="N", help="start N processes on this machine (mpiexec with the right "
                       "flags); without it, start this program under mpirun or srun")
    where.add_argument("--hosts", default="", metavar="H,H,...", help="treat equal runs of processes as these hosts; "
                       "the first ones train, the rest are spares (default: the real hosts; with --np each process is "
                       "one: r0, r1, ...)")
    where.add_argument("--run", default="", help="folder of the run's files (default: runs/<time>-<profile>)")
    where.add_argument("--no-report", action="store_true", help="print no table of the moves at the end")
    where.add_argument("--no-shared-imports", action="store_true", help="with --np: let every process do its own "
                       "imports instead of forking them from one")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    saves = parser.add_argument_group("checkpoints")
    saves.add_argument("--checkpoints", default="", metavar="DIR", help="save Megatron's distributed checkpoints "
                       "there, at the end and as --checkpoint-every says, and start from the newest one that is whole")
    saves.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="save before every N-th iteration "
                       "(without --checkpoints: in RUN/checkpoints)")
    saves.add_argument("--keep-checkpoints", type=int, default=2, metavar="K", help="keep the last K (default: "
                       "%(default)s)")
    saves.add_argument("--save-at", type=int, metavar="ITERATION", help="stop before this iteration with a checkpoint")
    saves.add_argument("--load", default="", metavar="DIR", help="start from this checkpoint, or the newest one in "
                       "this folder of them, on whatever hosts, bit for bit")
    saves.add_argument("--checkpoint-digests", action="store_true", help="save the digests of all state too; a load "
                       "then compares what came back, bit for bit")


def _add_moves(parser: argparse.ArgumentParser) -> None:
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


def _add_joiners(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what joiners do before they take over")
    group.add_argument("--warm-up", default="synthetic", choices=("off", "synthetic", "recorded"), help="a joiner runs "
                       "a shadow iteration that no peer takes part in: with made-up answers, or with those that its "
                       "slot got in the run's first iteration, kept in RUN/recordings; recorded also compares every "
                       "call and the loss, synthetic is left out where all joiners have run their roles before "
                       "(default: %(default)s)")
    group.add_argument("--record-limit", type=int, default=64, metavar="MIB", help="host memory, and size of the "
                       "file, of such a recording per slot: what is large against it is kept in part (default: "
                       "%(default)s)")
    group.add_argument("--joiner-traffic", default="real", choices=("real", "none"), help="in the shadow iteration, "
                       "groups whose members are all joiners on one host communicate for real (default: %(default)s)")
    group.add_argument("--standby", default="auto", choices=("auto", "cold", "warm"), help="warm: spares build and run "
                       "each pipeline role (first, middle, last) once before any move is asked for; auto is warm on "
                       "GPUs and cold on CPUs, where it would take the cores of training (default: %(default)s)")
    group.add_argument("--accept", default="", metavar="NAME=SHARE,...", help="what a joiner must have of its leaver's "
                       "matmul rate, used memory and bandwidth, else the move aborts (default: " + _default_limits()
                       + "); none: don't measure")


def _add_communicators(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("communicators on GPUs")
    group.add_argument("--nccl-switch", default="auto", choices=("auto", "connected", "parked", "lazy"), help="on "
                       "GPUs: keep old and new communicators connected side by side, or park the old ones to make room "
                       "(NCCL 2.30.3), or close them (with --allow-lazy); auto takes what memory allows; those that "
                       "training doesn't use are not connected at all (default: %(default)s)")
    group.add_argument("--allow-lazy", action="store_true", help="where memory allows nothing better, old "
                       "communicators may be closed before the commit; a move that aborts after that rebuilds them, "
                       "and says so")
    group.add_argument("--nccl-pin", default="", metavar="NAME=VALUE,...", help="fix what decides in which order NCCL "
                       "adds: ALGO=Ring,PROTO=Simple, MIN_CHANNELS, MAX_CHANNELS, MIN_CTAS, MAX_CTAS; sets NCCL_ALGO, "
                       "NCCL_PROTO, NCCL_MIN_NCHANNELS and so on, on every process")
    group.add_argument("--connect", default="ahead", choices=("ahead", "pause", "background"), help="on GPUs: "
                       "connect new communicators ahead of the pause, a few an iteration, all within ten (needs room "
                       "for one more where old ones are parked), or in the pause, or on the prepare thread, which can "
                       "deadlock (default: %(default)s)")


def _add_trouble(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes and nodes in trouble")
    group.add_argument("--recover", default="host", choices=("host", "slot", "off"), help="when a process that holds a "
                       "slot is lost: spares take all slots of its host, where another host has room for them, or its "
                       "slot only, and all go on from the newest checkpoint, in the same processes; off: the run ends, "
                       "to be started again (default: %(default)s)")
    group.add_argument("--watch-slurm", default="auto", choices=("auto", "off"), help="in a job of Slurm, vacate nodes "
                       "that are drained, fail or are about to be taken away, and give them back (default: "
                       "%(default)s)")
    group.add_argument("--slurm-poll", type=float, default=5.0, metavar="S", help="look at Slurm every S seconds "
                       "(default: %(default)g)")
    group.add_argument("--find-stragglers", action="store_true", help="compare what each process works by itself in an "
                       f"iteration, and name one that takes {FACTOR:g} times as long as its peers in {IN_A_ROW} "
                       "iterations in a row")
    group.add_argument("--auto-evict", action="store_true", help="the same, and vacate its host")


def _default_limits() -> str:
    return "; ".join(f"matmul={limits.matmul:g},memory={limits.memory:g},bandwidth={limits.bandwidth:g} on a {device}"
                     for device, limits in DEFAULTS.items())


def _add_deadlines(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("deadlines, in seconds")
    for name, default, text in (
            ("prepare-deadline", 300.0, "from the request to all prepared; then the move aborts. Also for all slots to "
             "be ready again when one was lost"),
            ("switch-deadline", 60.0, "from the first arrival at the boundary to the verdict, then the move aborts; "
             "and from the verdict to its acknowledgement, then who is missing is lost"),
            ("heartbeat-timeout", 15.0, "a process not heard for so long is lost"),
            ("orphan-timeout", 60.0, "a process that hears no controller for so long ends itself")):
        limits.add_argument(f"--{name}", type=float, default=default, metavar="S",
                            help=f"{text} (default: %(default)g)")


def _add_experiments(parser: argparse.ArgumentParser) -> None:
    tests = parser.add_argument_group("for tests and experiments")
    tests.add_argument("--fault", action="append", default=[], metavar="KIND@SLOT:PHASE[#MOVE]", help="raise, kill, "
                       "hang, corrupt or cancel at the joiner of SLOT in PREPARING, READY or SWITCHING, or slow in "
                       "PREPARING; kill or hang at its leaver in LEAVING (at the switchover), or at the joiner in "
                       "COMMITTED; kill at the controller in VERDICT (its deputy alone has it) or PARKING (one member "
                       "alone makes room); repeatable")
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
