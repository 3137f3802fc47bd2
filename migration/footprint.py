"""How the processes of a run are found again on a machine: a file for each, its environment, its arguments.

Owns RUN/processes/w0003.json, which each process writes when MPI is up, and the search through /proc. A process belongs
to a run if such a file names its pid and start time (a pid alone may be another process's by now), if it was started
with LM_RUN=RUN (--np: mpiexec, proxies, the fork server), or if it is `harness.py ... --run RUN`. What started those
belongs to it too, as far up as it is a launcher. The commands beside a run, such as `harness.py status`, don't.

Linux only. Imports nothing heavy; must not know what is done to the processes (kill.py).
"""
from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from migration.versions import CODE_ROOT
from migration.zygote import RUN_VARIABLE

FOLDER = "processes"
# Commands of harness.py that are no run, though --run is among their arguments.
BESIDE = ("request", "status", "cancel", "stop", "kill", "plan", "demo", "sync")
_LAUNCHERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "mpiexec.hydra", "srun", "orterun", "prterun", "orted", "prted")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process writes of itself. `machine` is its name, `node` and `job` are Slurm's (empty without Slurm)."""

    world_rank: int
    host: str  # perhaps a virtual one
    machine: str
    boot_id: str  # of the machine since it was last started
    pid: int
    start_ticks: int  # after the machine's start, as in /proc/PID/stat
    node: str
    job: str
    python: str
    program: str

    @property
    def is_here(self) -> bool:
        return self.machine == socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A living process of a run on this machine; two are equal if they are the same process.

    `footprint` is None for launchers and the like. `command` is empty once a process is about to end.
    """

    pid: int
    start_ticks: int
    command: str = field(compare=False)
    footprint: Footprint | None = field(compare=False)


def write_footprint(run: str, world_rank: int, host: str) -> None:
    """This process says that it is there. Raises OSError if the run folder can't be written here."""
    path = _path(run, world_rank)
    path.parent.mkdir(exist_ok=True)
    found = Footprint(world_rank=world_rank, host=host, machine=socket.gethostname(), boot_id=_boot_id(),
                      pid=os.getpid(), start_ticks=_start_ticks(os.getpid()),
                      node=os.environ.get("SLURMD_NODENAME", ""), job=os.environ.get("SLURM_JOB_ID", ""),
                      python=sys.executable, program=str(CODE_ROOT / "harness.py"))
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(found)))
    os.replace(unfinished, path)


def read_footprint(run: str, world_rank: int) -> Footprint | None:
    """None where that process hasn't come so far."""
    path = _path(run, world_rank)
    return Footprint(**json.loads(path.read_text())) if path.exists() else None


def _path(run: str, world_rank: int) -> Path:
    return Path(run) / FOLDER / f"w{world_rank:04d}.json"


def read_footprints(run: str) -> list[Footprint]:
    """In the order of their world ranks, without those that can't be read; empty if no process has come so far."""
    return read_all(run)[0]


def read_all(run: str) -> tuple[list[Footprint], list[str]]:
    """(those that can be read, in the order of their world ranks; in words, the files that can't be): a machine that
    crashes may leave an empty one."""
    found, unreadable = [], []
    for path in sorted((Path(run) / FOLDER).glob("w*.json")):
        try:
            found.append(Footprint(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError) as error:
            unreadable.append(f"{path} can't be read ({getattr(error, 'strerror', None) or error})")
    return found, unreadable


def find_processes(run: str) -> dict[int, Found]:
    """Every living process of the run on this machine, by pid, without the one that asks and those above it."""
    stats = {pid: stat for pid in _pids() if (stat := read_stat(pid)) is not None and stat.state != "Z"}
    not_ours = set(_with_ancestors(os.getpid(), stats))
    boot_id = _boot_id()
    written = {f.pid: f for f in read_footprints(run) if f.is_here and f.boot_id == boot_id}
    written = {pid: f for pid, f in written.items() if pid in stats and stats[pid].start_ticks == f.start_ticks}
    pids = set(written) | {pid for pid in stats if pid not in not_ours and _names_run(pid, os.path.realpath(run))}
    for pid in list(pids):
        for above in list(_with_ancestors(pid, stats))[1:]:
            if above in not_ours or not _is_launcher(above):
                break
            pids.add(above)
    return {pid: Found(pid=pid, start_ticks=stats[pid].start_ticks, footprint=written.get(pid),
                       command=" ".join(_arguments(pid))[:100]) for pid in sorted(pids - not_ours)}


def is_alive(process: Found | Footprint) -> bool:
    """Whether this very process still lives; another one with its pid isn't it."""
    stat = read_stat(process.pid)
    return stat is not None and stat.state != "Z" and stat.start_ticks == process.start_ticks


# ---- /proc

@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """Of /proc/PID/stat. A process is known by its pid and its start, since a pid may become another's."""

    state: str
    parent: int
    start_ticks: int


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def read_stat(pid: int) -> Stat | None:
    """None if the process has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Stat(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def _start_ticks(pid: int) -> int:
    stat = read_stat(pid)
    assert stat is not None, f"process {pid} asks for its own start time"
    return stat.start_ticks


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _with_ancestors(pid: int, stats: Mapping[int, Stat]) -> Iterator[int]:
    while pid in stats:
        yield pid
        pid = stats[pid].parent


def _read(pid: int, name: str) -> bytes:
    """Empty where the process has ended, or is another user's."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _arguments(pid: int) -> list[str]:
    return [os.fsdecode(argument) for argument in _read(pid, "cmdline").rstrip(b"\0").split(b"\0")]


def _names_run(pid: int, run: str) -> bool:
    """run: a real path."""
    for entry in _read(pid, "environ").split(b"\0"):
        if entry.startswith(f"{RUN_VARIABLE}=".encode()):
            if os.path.realpath(os.fsdecode(entry.partition(b"=")[2])) == run and not _is_beside(_arguments(pid)):
                return True
    arguments = _arguments(pid)
    named = [value for before, value in zip(arguments, arguments[1:]) if before == "--run"]
    named += [argument.partition("=")[2] for argument in arguments if argument.startswith("--run=")]
    if not named or _program_at(arguments) is None or _is_beside(arguments):
        return False
    try:
        folder = os.readlink(_PROC / str(pid) / "cwd")
    except OSError:  # it has ended, or is another user's
        return False
    return any(os.path.realpath(os.path.join(folder, name)) == run for name in named)


def _program_at(arguments: list[str]) -> int | None:
    return next((i for i, argument in enumerate(arguments) if os.path.basename(argument) == "harness.py"), None)


def _is_beside(arguments: list[str]) -> bool:
    at = _program_at(arguments)
    return at is not None and arguments[at + 1:at + 2] != [] and arguments[at + 1] in BESIDE


def _is_launcher(pid: int) -> bool:
    """Something that starts a run and ends with it: mpiexec and its like, or `harness.py --np`."""
    arguments = _arguments(pid)
    if os.path.basename(arguments[0]) in _LAUNCHERS:
        return True
    at = _program_at(arguments)
    return at is not None and os.path.basename(arguments[0]).startswith("python") and not _is_beside(arguments)
