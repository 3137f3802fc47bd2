"""The commands beside a run: start it on this machine, ask it, plan a move, show everything in a demo.

Imports nothing heavy; speaks to a running job through requests.py only.
"""
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from migration.arguments import Parser, build_parser, parse_run
from migration.checkpoint_files import find_start
from migration.config import apply_settings
from migration.errors import UserError
from migration.plan import check_moves, initial_roster, parse_vacate, spread_hosts
from migration.plan_report import describe_plan, plan_as_dict
from migration.profiles import DEFAULT_PROFILE, describe_profiles, get_profile
from migration.requests import NoJob, read_result, send_request

_LOOK_S = 0.2


def list_profiles(argv: list[str]) -> int:
    build_parser().parse_args(argv)  # a wrong argument beside it is still an error
    print(describe_profiles())
    return 0


def launch_run(argv: list[str]) -> int:
    """`harness.py --np N ...` outside mpirun: check the arguments and start mpiexec."""
    from migration.launch import launch
    args = build_parser().parse_args(argv)
    config, options = parse_run(argv)
    ends_at = options.last_iteration(config.iterations)
    find_start(options.load, options.checkpoints, config, ends_at=ends_at)  # what is wrong is said before a start
    if args.np is None:
        raise UserError(f"profile {config.profile} needs {config.job_size} processes and spares: start it with --np N, "
                        f"or under mpirun, such as python harness.py --np {config.job_size + 2} ...")
    if args.np < 1:
        raise UserError(f"--np {args.np}: must be at least 1")
    hosts = spread_hosts(options.hosts, args.np) if options.hosts else tuple(f"r{i}" for i in range(args.np))
    check_moves(initial_roster(hosts, config), options.certain_moves())
    rank_argv = [a for i, a in enumerate(argv) if not a.startswith("--np") and (i == 0 or argv[i - 1] != "--np")]
    rank_argv = [a for a in rank_argv if a != "--no-shared-imports"]
    if not args.run:
        rank_argv += ["--run", options.run]
    return launch(args.np, rank_argv, run_dir=Path(options.run), share_imports=not args.no_shared_imports)


def _request(argv: list[str]) -> int:
    parser = Parser(prog="harness.py request", description="Ask a running job to vacate a host. The move begins at "
                    "once, or when the one under way is done.")
    _add_run(parser)
    parser.add_argument("--vacate", required=True, metavar="HOST[,HOST][->HOST][@ITERATION]")
    parser.add_argument("--wait", action="store_true", help="wait until the move is committed, aborted or refused; "
                        "the exit code is 0 only if it is committed")
    args = parser.parse_args(argv)
    reply = send_request(args.run, {"do": "vacate", "vacate": args.vacate})
    print(f"request {reply['id']} accepted: vacate {args.vacate} (job is in phase {reply['phase']})", flush=True)
    if not args.wait:
        return 0
    move = _wait_for_move(args.run, reply["id"])
    print(_describe_move(move))
    return 0 if move["outcome"] == "COMMITTED" else 1


def _wait_for_move(run: str, request_id: int) -> dict[str, Any]:
    """What became of a request. Ends with the run at the latest; raises UserError if that left nothing to tell."""
    while True:
        try:
            known = send_request(run, {"do": "status"}, is_patient=True)
        except NoJob:  # the run may have ended since the last look; then it has said so in its result
            known = read_result(run)
        found = next((move for move in known["moves"] if move["request_id"] == request_id), None)
        if found is not None:
            return found
        if "status" in known:  # the result, not a job's answer
            raise UserError(f"request {request_id}: the run ended ({known['error'] or known['status']}) before the "
                            "move came about")
        time.sleep(_LOOK_S)


def _describe_move(move: dict[str, Any]) -> str:
    if move["outcome"] == "COMMITTED":
        return (f"move {move['request']} committed before iteration {move['iteration']}: downtime "
                f"{move['downtime_s'] * 1e3:.0f} ms, setup {move['setup_s']:.2f} s, {move['bytes'] / 1e6:.2f} MB")
    return f"move {move['request']} {move['outcome'].lower()}: {move['reason']}"


def _status(argv: list[str]) -> int:
    parser = Parser(prog="harness.py status", description="Where a running job stands: iteration, phase, hosts, moves.")
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    args = parser.parse_args(argv)
    status = send_request(args.run, {"do": "status"})
    if args.json:
        print(json.dumps(status, indent=1))
        return 0
    print(f"iteration {status['iteration']}/{status['num_iterations']}, generation {status['generation']}, phase "
          f"{status['progress'] or status['phase']}")
    print(f"controller: world rank {status['controller']}, term {status['term']}"
          + (f"; lost world ranks: {status['lost']}" if status["lost"] else ""))
    for host, row in status["hosts"].items():
        print(f"  {host:12s} slots {', '.join(map(str, row['slots'])) or '-':12s} spares {row['spares']}")
    for move in status["moves"]:
        print("  " + _describe_move(move))
    for recovery in status["recoveries"]:
        print(f"  recovery: world ranks {recovery['lost']} lost, slots {recovery['slots']} to world ranks "
              f"{recovery['to']}, generation {recovery['generation']}, from iteration {recovery['from_iteration']}"
              + {True: ", sums keep their bits", False: ", sums have other bits"}.get(recovery["keeps_bits"], ""))
    if status["queued"]:
        print("  queued: " + ", ".join(status["queued"]))
    return 0


def _cancel(argv: list[str]) -> int:
    parser = Parser(prog="harness.py cancel", description="Cancel the move under way, before its commit, or the next "
                    "one that is queued. The job trains on.")
    _add_run(parser)
    args = parser.parse_args(argv)
    print(f"cancelled: {send_request(args.run, {'do': 'cancel'})['cancelled']}")
    return 0


def _stop(argv: list[str]) -> int:
    parser = Parser(prog="harness.py stop", description="Ask a running job to save a checkpoint at the next iteration "
                    "that all agree on, and to end. Started again with the same --checkpoints it goes on from there.")
    _add_run(parser)
    parser.add_argument("--requeue", action="store_true", help="say in result.json, and by exit code 75 of the run, "
                        "that it is to be started again")
    parser.add_argument("--wait", action="store_true", help="wait until the run has ended")
    args = parser.parse_args(argv)
    reply = send_request(args.run, {"do": "stop", "requeue": args.requeue})
    print(f"request accepted: the job saves a checkpoint in {reply['checkpoints']} and ends (it is in phase "
          f"{reply['phase']})", flush=True)
    result = Path(args.run) / "result.json"
    while args.wait and not result.exists():
        try:
            send_request(args.run, {"do": "status"}, is_patient=True)
        except UserError:  # it no longer answers: it has ended, or is lost
            if not result.exists():
                raise
        time.sleep(0.2)
    return 0


def _plan(argv: list[str]) -> int:
    parser = Parser(prog="harness.py plan", description="Say, without a job, who would move where, which groups would "
                    "be rebuilt and kept, and how many bytes would go over.")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings")
    parser.add_argument("--hosts", required=True, metavar="H,H,...")
    parser.add_argument("--np", type=int, required=True, metavar="N", help="processes in all, spares included")
    parser.add_argument("--vacate", required=True, metavar="HOST[,HOST][->HOST]")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    args = parser.parse_args(argv)
    config = apply_settings(get_profile(args.profile), args.settings)
    roster = initial_roster(spread_hosts(args.hosts.split(","), args.np), config)
    request = parse_vacate(args.vacate, need_iteration=False)
    if args.json:
        print(json.dumps(plan_as_dict(config, roster, request), indent=1))
    else:
        print(describe_plan(config, roster, request))
    return 0


def _demo(argv: list[str]) -> int:
    from migration.demo import demo
    return demo(argv)


def _kill(argv: list[str]) -> int:
    from migration.kill import kill
    return kill(argv)


def _sync(argv: list[str]) -> int:
    from migration.sync import sync
    return sync(argv)


def _check(argv: list[str]) -> int:
    from migration.check import launch_check
    return launch_check(argv)


def _add_run(parser: Parser) -> None:
    parser.add_argument("--run", required=True, help="folder of the running job, as it was printed at its start")


COMMANDS = {"request": _request, "status": _status, "cancel": _cancel, "stop": _stop, "kill": _kill, "plan": _plan,
            "check": _check, "sync": _sync, "demo": _demo}


def run(argv: list[str]) -> int:
    """Run the command named by argv[0]."""
    return COMMANDS[argv[0]](argv[1:])
