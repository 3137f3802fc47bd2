"""From a command line to a job in the queue: what is trained, on how many nodes, its text, and sbatch or salloc.

Owns the arguments of render and submit. The text itself is render.py's.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from migration.arguments import Parser, parse_run
from migration.errors import UserError
from migration.profiles import DEFAULT_PROFILE, ranks_per_host
from migration.versions import CODE_ROOT
from slurm.render import LAUNCHERS, Job, batch_options, render
from slurm.site import Site, load_site

_NO_GROWTH = ("--grow: a running job can't take in processes: MPI_Comm_accept of MPICH can't be given up when nobody "
              "comes, and would stop the job with it; take as many --spares as it may need")
_SUBMIT_TIMEOUT_S = 120.0
_JOB_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # it becomes part of folders' names


def render_command(argv: list[str]) -> int:
    """python -m slurm render: print the text."""
    print(_text(_parser("render", "Print the batch script of a job."), argv)[0], end="")
    return 0


def submit_command(argv: list[str]) -> int:
    """python -m slurm submit: give the text to sbatch, or run it inside salloc."""
    parser = _parser("submit", "Submit a job; it runs in this repository.")
    parser.add_argument("--salloc", action="store_true", help="run it from here inside an allocation, instead of as a "
                        "batch job: then no node carries the batch shell, and each can be given back; it ends with "
                        "this command")
    text, in_salloc = _text(parser, argv)
    if in_salloc:
        return _allocate(text)
    print(f"job {submit(text)} submitted")
    return 0


def submit(text: str) -> int:
    """sbatch with `text`, in the repository; returns the job's id. Raises UserError with what sbatch says."""
    command = [_need("sbatch"), "--parsable", f"--chdir={CODE_ROOT}"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch didn't answer in {_SUBMIT_TIMEOUT_S:.0f} s; is Slurm's controller up?") from None
    if done.returncode:
        raise UserError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return int(done.stdout.split(";")[0])


def salloc_command(text: str) -> list[str]:
    """The command that runs a rendered text from a login node, inside an allocation with the text's options."""
    return [_need("salloc"), *batch_options(text), "bash", "-c", text]


def _allocate(text: str) -> int:
    os.chdir(CODE_ROOT)
    command = salloc_command(text)
    os.execv(command[0], command)


def _text(parser: Parser, argv: list[str]) -> tuple[str, bool]:
    own, harness = _split(argv)
    args = parser.parse_args(own)
    if args.grow:
        sys.stderr.write(_NO_GROWTH + "\n")
    site = load_site(args.site) if args.site else Site()
    arguments = ["--profile", args.profile, *(a for s in args.settings for a in ("--set", s)), *harness]
    job = build_job(arguments, site, name=args.name or args.profile, num_spare_nodes=args.spares,
                    num_nodes=args.nodes, launcher=args.launcher)
    made_by = shlex.join(["python", "-m", "slurm", "render", *(a for a in argv if a not in ("--salloc", "--grow"))])
    return render(job, site, made_by), getattr(args, "salloc", False)


def build_job(arguments: list[str], site: Site, *, name: str, num_spare_nodes: int, num_nodes: int | None = None,
              launcher: str = "srun") -> Job:
    """The job of `arguments`, which are harness.py's. Raises UserError for what can't run."""
    config, _ = parse_run(arguments)
    tasks_per_node = site.tasks_per_node or site.gpus_per_node or ranks_per_host(config)
    training = -(-config.job_size // tasks_per_node)
    if num_spare_nodes < 0:
        raise UserError(f"--spares {num_spare_nodes}: must be at least 0 nodes")
    if num_nodes is not None and num_nodes < training + num_spare_nodes:
        raise UserError(f"--nodes {num_nodes}: {config.profile} needs {training} of {tasks_per_node} processes, and "
                        f"--spares {num_spare_nodes} more")
    if not _JOB_NAME.fullmatch(name):
        raise UserError(f"--name {name}: may hold letters, digits and _ . - only, since folders are named after it")
    if launcher == "mpirun" and site.container == "pyxis":
        raise UserError("--launcher mpirun: pyxis is a part of srun; take --launcher srun or apptainer")
    nodes = num_nodes if num_nodes is not None else training + num_spare_nodes
    load, others = _take_load(arguments)
    return Job(name=name, profile=config.profile, job_size=config.job_size, tasks_per_node=tasks_per_node,
               num_nodes=nodes, num_spare_nodes=nodes - training, arguments=tuple(others), load=load,
               launcher=launcher)


def _parser(name: str, description: str) -> Parser:
    parser = Parser(prog=f"-m slurm {name}", usage=f"python -m slurm {name} [options] [-- options of harness.py]",
                    description=description,
                    epilog="Arguments after -- go to harness.py, such as -- --data corpus --checkpoint-every 100")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="as in harness.py (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
                        help="as in harness.py")
    parser.add_argument("--name", default="", help="of the job and of its folders (default: the profile)")
    parser.add_argument("--spares", type=int, default=1, metavar="N", help="nodes to hold spares, beside those that "
                        "the profile's slots fill (default: %(default)s)")
    parser.add_argument("--grow", action="store_true", help="ask for further nodes when spares run low; not possible "
                        "with the MPI in use, which is said, and the job has the nodes that it starts with")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes in all; those that are left over hold spares too")
    parser.add_argument("--site", type=Path, metavar="FILE.toml", help="what this site sets (example: slurm/site.toml)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="srun", help="mpirun: MPICH's mpiexec inside the job; "
                        "it can't survive the death of a whole node (default: %(default)s)")
    return parser


def _take_load(arguments: list[str]) -> tuple[str, list[str]]:
    """(what --load names, the other arguments), as harness.py reads them: `--load=X` and `--lo X` too."""
    parser = Parser(add_help=False)
    parser.add_argument("--load", default="")
    args, others = parser.parse_known_args(arguments)
    return args.load, others


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """(before, after) the first --."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1:]


def _need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise UserError(f"there is no {program} here: Slurm's client commands must be in PATH (python -m slurm up "
                        "brings up a Slurm on this machine)")
    return path
