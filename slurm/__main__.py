"""python -m slurm render|submit|verdict: jobs; up|down|status: a Slurm of four virtual nodes on this machine."""
from __future__ import annotations

import sys
import time
from pathlib import Path

from migration.arguments import Parser
from migration.errors import UserError
from slurm import cluster, cluster_up
from slurm.submit import render_command, submit_command
from slurm.verdict import judge


def _up(argv: list[str]) -> int:
    parser = _folder_parser("up", "Start a Slurm of virtual nodes on this machine, for development and tests. Needs "
                            "root and Debian's packages.")
    parser.add_argument("--nodes", default=",".join(cluster_up.NODES), metavar="N,N,...", help="(default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=8, metavar="N", help="CPUs that each declares (default: "
                        "%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs that each declares; files stand for "
                        "them (default: %(default)s)")
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    made = cluster_up.up(args.folder, nodes=tuple(args.nodes.split(",")), cpus=args.cpus, gpus=args.gpus)
    print(f"# {len(made.nodes)} nodes up in {time.monotonic() - start_s:.2f} s: {', '.join(made.nodes)}; "
          f"down again: python -m slurm down --folder {made.folder}")
    print(f"export SLURM_CONF={made.conf}")
    return 0


def _down(argv: list[str]) -> int:
    args = _folder_parser("down", "Cancel the jobs of the local Slurm and end every process of it.").parse_args(argv)
    found = cluster.find(args.folder)
    if found is None:
        print(f"no cluster is up in {args.folder}")
        return 0
    cluster.down(found)
    print(f"down: nothing of {found.folder} runs; its logs are there")
    return 0


def _status(argv: list[str]) -> int:
    args = _folder_parser("status", "Nodes, daemons and jobs of the local Slurm.").parse_args(argv)
    found = cluster.find(args.folder)
    if found is None:
        print(f"no cluster is up in {args.folder}")
        return 1
    for name, daemon in found.daemons.items():
        print(f"{name:12s} pid {daemon.pid:7d} {'runs' if daemon.lives() else 'is gone'}")
    print(found.command("sinfo", "-N", "-o", "%N %T %E"), end="")
    print(found.command("squeue", "-o", "%i %j %T %M %N %r"), end="")
    print(f"export SLURM_CONF={found.conf}")
    return 0


def _verdict(argv: list[str]) -> int:
    parser = Parser(prog="-m slurm verdict", usage="python -m slurm verdict [options]",
                    description="How a run ended, for a batch script: exit code 0 completed, 75 requeue it, 1 failed.")
    parser.add_argument("--run", required=True, type=Path, help="the run's folder")
    parser.add_argument("--checkpoints", type=Path, help="the job's folder of checkpoints")
    args = parser.parse_args(argv)
    code, why = judge(args.run, args.checkpoints)
    print(why)
    return code


def _folder_parser(name: str, description: str) -> Parser:
    parser = Parser(prog=f"-m slurm {name}", usage=f"python -m slurm {name} [options]", description=description)
    parser.add_argument("--folder", type=Path, default=cluster.default_folder(), help="the cluster's own folder; "
                        "clusters in different ones can be up at once (default: %(default)s)")
    return parser


COMMANDS = {"render": render_command, "submit": submit_command, "verdict": _verdict, "up": _up, "down": _down,
            "status": _status}


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\nEach command has --help.")
        return 0
    if not argv or argv[0] not in COMMANDS:
        raise UserError(f"name a command: {', '.join(COMMANDS)} (each has --help)")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RuntimeError, TimeoutError) as error:
        sys.stderr.write(f"slurm: {error}\n")
        sys.exit(2)
