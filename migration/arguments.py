"""The command line of a run (argument_groups.py) in, a Config and Options out. Imports nothing heavy."""
from __future__ import annotations

import argparse
import os
import time
from typing import NoReturn

from migration.acceptance import DEFAULTS, NONE, parse_limits
from migration.argument_groups import add_all
from migration.arms import get_arms
from migration.communicators.nccl_policy import parse_pins
from migration.config import Config, apply_settings
from migration.errors import UserError
from migration.faults import parse_fault
from migration.options import AT_THE_CUT, STATE_KINDS, Options
from migration.pacing import parse_share
from migration.plan import parse_vacate
from migration.profiles import get_profile
from migration.straggler import FEWEST, parse_slow

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
    add_all(parser)
    return parser


def parse_run(argv: list[str]) -> tuple[Config, Options]:
    """Config and Options of a run. Raises UserError for anything the user got wrong."""
    args = build_parser().parse_args(argv)
    settings = args.settings + ([f"data={os.path.abspath(args.data)}"] if args.data else [])
    config = apply_settings(get_profile(args.profile), settings)
    _check_moves(args, config)
    _check_tests(args, config)
    _check_checkpoints(args, config)
    return config, _build_options(args, config)


def _check_moves(args: argparse.Namespace, config: Config) -> None:
    for text in args.vacate:
        iteration = parse_vacate(text, need_iteration=True).iteration
        last = (args.save_at if args.save_at is not None else config.iterations) - 1
        if iteration > last:
            raise UserError(f"--vacate {text}: the last iteration of the run is {last}")
    if args.lead < 0:
        raise UserError(f"--lead {args.lead}: must be at least 0 iterations")
    if not 0 <= args.transfer_limit < float("inf"):
        raise UserError(f"--transfer-limit {args.transfer_limit:g}: must be 0 (none) or a number of MB/s")
    if args.record_limit < 1:
        raise UserError(f"--record-limit {args.record_limit}: must be at least 1 MiB")
    for device in DEFAULTS:
        parse_limits(args.accept, device)
    if args.nccl_switch == "lazy" and not args.allow_lazy:
        raise UserError("--nccl-switch lazy: closes old communicators before the commit, so that a move that aborts "
                        "later must rebuild them; add --allow-lazy if that will do")
    parse_pins(args.nccl_pin)
    if (args.find_stragglers or args.auto_evict) and config.job_size < FEWEST:
        raise UserError(f"--find-stragglers, --auto-evict: of {config.job_size} slots nobody can say which one is "
                        f"slow; {FEWEST} are needed")
    for name in ("prepare_deadline", "switch_deadline", "heartbeat_timeout", "orphan_timeout", "slurm_poll"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be above 0 s, and finite")


def _check_tests(args: argparse.Namespace, config: Config) -> None:
    """What tests and experiments ask for."""
    for text in args.fault:
        if parse_fault(text).kind == "slow" and args.accept == NONE:
            raise UserError(f"--fault {text}: with --accept {NONE} nobody measures a joiner's speed")
    for text in args.slow:
        parse_slow(text, config.job_size)
    for kind in args.omit_state:
        if kind not in (*STATE_KINDS, AT_THE_CUT):
            raise UserError(f"--omit-state {kind}: there is no such kind of state; kinds are "
                            f"{', '.join((*STATE_KINDS, AT_THE_CUT))}")


def _check_checkpoints(args: argparse.Namespace, config: Config) -> None:
    if args.save_at is not None and not 0 < args.save_at < config.iterations:
        raise UserError(f"--save-at {args.save_at}: must be an iteration between 1 and {config.iterations - 1}")
    if args.checkpoint_every < 0:
        raise UserError(f"--checkpoint-every {args.checkpoint_every}: must be at least 0 iterations")
    if args.keep_checkpoints < 1:
        raise UserError(f"--keep-checkpoints {args.keep_checkpoints}: must be at least 1")


def _build_options(args: argparse.Namespace, config: Config) -> Options:
    run = os.path.abspath(args.run or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.profile}")
    saves = args.checkpoint_every or args.save_at
    checkpoints = args.checkpoints or (os.path.join(run, "checkpoints") if saves else "")
    return Options(
        run=run, hosts=tuple(args.hosts.split(",")) if args.hosts else (), vacate=tuple(args.vacate),
        hold=args.hold, lead=args.lead, arms=get_arms(args.arm), transfer_limit_bytes_s=args.transfer_limit * 1e6,
        leaver_steps=args.leaver_steps, prepare_deadline_s=args.prepare_deadline,
        prepare_share=parse_share(args.prepare_share), switch_deadline_s=args.switch_deadline,
        heartbeat_timeout_s=args.heartbeat_timeout,
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
