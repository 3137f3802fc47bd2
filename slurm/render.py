"""The sbatch text of a job: a pure function of what is trained (`Job`) and what the site sets (`Site`).

Owns every line of the text. Must not read files, look at this machine, or speak to Slurm.
"""
from __future__ import annotations

import shlex
from dataclasses import dataclass

from migration.options import REQUEUE_CODE
from slurm.site import Site

LAUNCHERS = ("srun", "mpirun")
_WIDTH = 110

# What may be set here and not by the program itself, which sets what its bits depend on.
_ENVIRONMENT = (
    ("OMP_NUM_THREADS", "${SLURM_CPUS_PER_TASK:-1}"),
    ("PYTHONUNBUFFERED", "1"),
    ("TORCH_CPP_LOG_LEVEL", "ERROR"),
    ("NCCL_DEBUG", "WARN"),
    ("NCCL_DEBUG_FILE", "$RUN/log/nccl.%h.%p"),
)

_LAUNCHER_NOTES = {
    "srun": """\
# One process a slot and a spare, by Slurm's own launcher. The step goes on when a node or a process is gone (--no-kill,
# --kill-on-bad-exit=0), however long ago the first process left (--wait=0). --mpi=pmi2 is what MPICH speaks.""",
    "mpirun": """\
# mpiexec finds the allocation and starts its proxies by srun. The job goes on when processes leave. What this can't
# survive and srun can: a whole node that dies ends the job, and a killed process may take others of its node along.
# Its exit code says nothing: the verdict below does.""",
}

_SIGNAL = """\
# Ahead of the time limit Slurm sends USR1 to this shell only: the job is to write a checkpoint and ask for a requeue.
ask_for_requeue() {{
    echo "$(date +%T) signal USR1: the job is asked to write a checkpoint and to be requeued"
    {beside}python harness.py stop --run "$RUN" --requeue &
}}
trap ask_for_requeue USR1"""

_NO_CHECKPOINTS = """\
# Without a folder of checkpoints there is nothing that a requeued job could go on from.
trap 'echo "$(date +%T) signal USR1: the end is near, and there are no checkpoints (site TOML)"' USR1"""

_LOAD = """\
# --load is for the first start: once the job has a checkpoint of its own, it goes on from that when it is requeued.
LOAD=(--load {folder})
for own in "$CHECKPOINTS"/iteration*[0-9]; do [ ! -d "$own" ] || LOAD=(); done
"""

_WAIT = """\
job=$!
# A signal interrupts wait, so it is called until the job is gone.
while kill -0 "$job" 2> /dev/null; do wait "$job"; done
"""

_REQUEUE = """\
verdict=$?
[ "$verdict" = {code} ] || exit "$verdict"
if [ "${{ENVIRONMENT:-}}" != BATCH ]; then
    echo "not a batch job, so Slurm can't requeue it: start it again with -- --load $CHECKPOINTS"
elif [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_requeues} ]; then
    echo "requeued {max_requeues} times already, so not again (max_requeues): go on from $CHECKPOINTS by hand"
    exit 1
else
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$verdict\""""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to run. Counts of nodes include the spare ones; `arguments` are those of harness.py, but for --run.

    load: what --load names, which is no longer loaded once the job has a checkpoint of its own.
    """

    name: str
    profile: str
    job_size: int
    tasks_per_node: int
    num_nodes: int
    num_spare_nodes: int
    arguments: tuple[str, ...]
    load: str = ""
    launcher: str = "srun"


def render(job: Job, site: Site, made_by: str = "") -> str:
    """The text to give to sbatch, or to bash inside salloc. made_by: the command that made it, for the reader."""
    beside = "in_container " if site.container else ""
    verdict = beside + 'python -m slurm verdict --run "$RUN"'
    if site.checkpoints:
        on_signal = _SIGNAL.format(beside=beside)
        end = [verdict + ' --checkpoints "$CHECKPOINTS"',
               _REQUEUE.format(code=REQUEUE_CODE, max_requeues=site.max_requeues)]
    else:
        on_signal, end = _NO_CHECKPOINTS, [verdict]
    parts = ["#!/bin/bash", _heading(job, made_by), *_options(job, site), "", _folders(site), *_program(site),
             *_beside(site), "", *_environment(site), "", on_signal, "", *_load(job, site),
             _LAUNCHER_NOTES[job.launcher], _launch(job, site), _WAIT, *end]
    return "\n".join(parts) + "\n"


def batch_options(text: str) -> list[str]:
    """The options in a rendered text that hold for an allocation without a batch job too."""
    only_batch = ("--requeue", "--signal", "--open-mode", "--output")
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [option for option in options if not option.startswith(only_batch)]


def _heading(job: Job, made_by: str) -> str:
    training = job.num_nodes - job.num_spare_nodes
    origin = f"\n# Made by: {made_by}" if made_by else ""
    return f"""\
# {job.name}: profile {job.profile} on {job.num_nodes} nodes of {job.tasks_per_node} processes: {job.job_size} \
slots on {training} of them, spares on {job.num_spare_nodes}.{origin}
# Submit it from the repository's folder. Every node can be emptied of ranks and given back while the job trains, but
# for the first: it carries this shell, so it can be emptied and not given back."""


def _options(job: Job, site: Site) -> list[str]:
    options = [f"--job-name={job.name}", f"--nodes={job.num_nodes}", f"--ntasks-per-node={job.tasks_per_node}",
               "--exclusive"]
    for name in ("cpus_per_task", "gpus_per_node", "partition", "account", "qos", "time"):
        if getattr(site, name):
            options.append(f"--{name.replace('_', '-')}={getattr(site, name)}")
    options += ["--no-kill", "--requeue", f"--signal=B:USR1@{site.warning_s}", "--open-mode=append",
                "--output=%x-%j.out", *site.sbatch]
    return [f"#SBATCH {option}" for option in options]


def _folders(site: Site) -> str:
    lines = ["[ -f harness.py ] || { echo 'there is no harness.py here: submit from the repository'; exit 2; }",
             f"RUN=$(realpath -m {shlex.quote(site.runs)})/$SLURM_JOB_NAME-$SLURM_JOB_ID-r${{SLURM_RESTART_COUNT:-0}}"]
    if site.checkpoints:
        lines += ["# one folder for a job, whatever number of times it is requeued: it goes on from the newest in it",
                  f"CHECKPOINTS=$(realpath -m {shlex.quote(site.checkpoints)})/$SLURM_JOB_NAME-$SLURM_JOB_ID"]
    return "\n".join(lines)


def _program(site: Site) -> list[str]:
    return [*(f"module load {shlex.quote(module)}" for module in site.modules),
            *(f"{line} || exit 2" for line in site.setup)]


def _environment(site: Site) -> list[str]:
    values = {name: f'"{value}"' for name, value in _ENVIRONMENT}
    values |= {name: shlex.quote(value) for name, value in site.environment}
    return [f"export {name}={value}" for name, value in values.items()]


def _load(job: Job, site: Site) -> list[str]:
    """The harness refuses an older checkpoint than the newest in --checkpoints."""
    return [_LOAD.format(folder=_quote(job.load))] if job.load and site.checkpoints else []


def _launch(job: Job, site: Site) -> str:
    if job.launcher == "srun":
        words = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=pmi2"]
        if site.cpus_per_task:
            words.append(f"--cpus-per-task={site.cpus_per_task}")  # a step no longer takes it from the job
        words += [*site.srun, *_pyxis(site)]
    else:
        words = ["mpiexec", "-disable-auto-cleanup", "-n", str(job.num_nodes * job.tasks_per_node),
                 "-ppn", str(job.tasks_per_node)]
    words += [*_apptainer(site), "python", "harness.py", *job.arguments]
    quoted = [_quote(word) for word in words]
    if job.load:
        quoted += ['"${LOAD[@]}"'] if site.checkpoints else ["--load", _quote(job.load)]
    quoted += ["--run", '"$RUN"']
    if site.checkpoints:
        quoted += ["--checkpoints", '"$CHECKPOINTS"']
    return _wrap(quoted) + " &"


def _beside(site: Site) -> list[str]:
    """A function for commands that run once, beside the job, where there is a container: they need it too."""
    if not site.container:
        return []
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", *_pyxis(site)] if site.container == "pyxis" else \
        _apptainer(site)
    return ["in_container() {", "    " + _wrap([*map(_quote, words), '"$@"']).replace("\n", "\n    "), "}"]


def _pyxis(site: Site) -> list[str]:
    if site.container != "pyxis":
        return []
    mounts = ",".join(["$PWD:$PWD", *(m if ":" in m else f"{m}:{m}" for m in site.container_mounts)])
    return [f"--container-image={site.container_image}", f"--container-mounts={mounts}", "--container-workdir=$PWD"]


def _apptainer(site: Site) -> list[str]:
    if site.container != "apptainer":
        return []
    binds = [word for mount in ("$PWD", *site.container_mounts) for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, "--pwd", "$PWD", site.container_image]


def _quote(word: str) -> str:
    """For bash; the one variable in what is put together here stays one."""
    return f'"{word}"' if "$PWD" in word else shlex.quote(word)


def _wrap(words: list[str]) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines[-1] += " \\"
            lines.append("    " + word)
        else:
            lines[-1] += " " + word
    return "\n".join(lines)
