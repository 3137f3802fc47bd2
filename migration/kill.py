"""`harness.py kill --run RUN`: the end of every process of a run, on all its machines, looked after.

In this order: the controller is asked to end the run and given a moment; what is left gets SIGTERM, then SIGKILL; then
everything is looked for once more. It needs nobody of the run to answer: the controller may be dead, processes stopped.
Other machines are reached by `srun --overlap` into the run's job or by ssh, each running this command with --here; a
machine that can't be reached is named, with what to type there.

How processes are found is in footprint.py. A process is signalled through a descriptor of it that was opened before its
start time was compared, so that never another one with its pid is hit.
"""
from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from migration.arguments import Parser
from migration.errors import UserError
from migration.footprint import Footprint, Found, find_processes, is_alive, read_all
from migration.requests import send_request

_TERM_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_KILL_GRACE_S = 10.0  # from SIGKILL to giving up: a process may hang in the kernel
_REMOTE_S = 60.0  # for a whole machine
_JOB_ENDS_S = 30.0  # for Slurm to end the processes of a job that is over
_ASK_S = 3.0  # for the controller's answer
_POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was done on one machine."""

    ended: Counter[str] = field(default_factory=Counter)  # processes of the world, by host
    num_others: int = 0  # launchers and whatever else belongs to the run
    left: list[str] = field(default_factory=list)  # in words

    def add(self, other: Outcome) -> None:
        self.ended.update(other.ended)
        self.num_others += other.num_others
        self.left += other.left

    def to_json(self) -> str:
        return json.dumps({"ended": self.ended, "num_others": self.num_others, "left": self.left})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Raises ValueError or KeyError for anything else."""
        fields = json.loads(text)
        return cls(ended=Counter(fields["ended"]), num_others=fields["num_others"], left=fields["left"])


def kill(argv: list[str]) -> int:
    """The command. Exit code 0 only if no process of the run is left anywhere."""
    parser = Parser(prog="harness.py kill", description="End every process of a run, on all its machines, also of one "
                    "that hangs, and look whether any is left. Exit code 0: none is.")
    parser.add_argument("--run", required=True, help="folder of the run, as it was printed at its start")
    parser.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds that the run has to end by "
                        "itself once it was asked (default: %(default)g)")
    parser.add_argument("--here", action="store_true", help="on this machine only, and without asking the run")
    parser.add_argument("--json", action="store_true", help="with --here: say it for a program")
    args = parser.parse_args(argv)
    if not 0 <= args.grace < float("inf"):
        raise UserError(f"--grace {args.grace:g}: must be at least 0 s, and finite")
    run = os.path.abspath(args.run)
    footprints, unreadable = read_all(run)
    before = find_processes(run)
    if not (footprints or unreadable or before or (Path(run) / "config.json").exists()):  # a folder is made late
        what = "no run was started there" if Path(run).is_dir() else "there is no such folder"
        raise UserError(f"--run {args.run}: {what}, and no process on this machine names it")
    if args.here:
        outcome = _end_here(run, before)
        print(outcome.to_json() if args.json else _in_words(outcome))
        return 1 if outcome.left else 0
    elsewhere = [f for f in footprints if not f.is_here]
    was_running = bool(before or elsewhere) and _ask_to_end(run)
    if was_running:
        _wait_gone(before.values(), args.grace)
    outcome = Outcome()
    try:  # the other machines first: a launcher's end here may take the way to them along
        outcome.add(_end_elsewhere(run, elsewhere, was_running))
    finally:  # whatever becomes of them, and if they aren't waited for (Ctrl-C)
        outcome.add(_end_here(run, before))
    outcome.left += [f"perhaps a process on another machine: {words}; once it is known to be over, remove the file"
                     for words in unreadable]
    print(_in_words(outcome), flush=True)
    return 1 if outcome.left else 0


def _in_words(outcome: Outcome) -> str:
    num_processes, num_hosts = sum(outcome.ended.values()), len(outcome.ended)
    text = f"{num_processes} processes on {num_hosts} hosts ended"
    text += f", and {outcome.num_others} others of the run (launchers, or not up yet)" if outcome.num_others else ""
    return "\n".join([f"{text}, {'these are left:' if outcome.left else 'none left'}",
                      *(f"  {words}" for words in outcome.left)])


def _ask_to_end(run: str) -> bool:
    """Whether the controller has heard that the run is to end."""
    if (Path(run) / "result.json").exists():
        return False
    try:
        send_request(run, {"do": "end", "why": f"ended by harness.py kill on {socket.gethostname()}"},
                     limit_s=_ASK_S)
    except UserError as error:
        print(f"the controller doesn't end the run, so its processes are ended one by one: {error}", flush=True)
        return False
    print("the controller ends the run", flush=True)
    return True


# ---- this machine

def _end_here(run: str, before: dict[int, Found]) -> Outcome:
    """End what lives of the run here. `before`: what lived at the first look, which counts as ended once it is gone."""
    seen, denied = set(before.values()), set()
    # the second SIGKILL is for what a launcher had just started
    for signum, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S), (signal.SIGKILL, 1.0)):
        living = set(find_processes(run).values()) - denied
        seen |= living  # equal ones stay as they were seen first
        denied |= {found for found in living if not _signal(found, signum)}
        _wait_gone(living - denied, grace_s)
    left = find_processes(run).values()
    outcome = Outcome()
    for found in seen.difference(left):
        if found.footprint is None:
            outcome.num_others += 1
        else:
            outcome.ended[found.footprint.host] += 1
    outcome.left = [f"process {f.pid} on {socket.gethostname()}{' (of another user)' if f in denied else ''}: "
                    f"{f.command}" for f in left]
    return outcome


def _signal(found: Found, signum: signal.Signals) -> bool:
    """False if this user may not."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        descriptor = os.pidfd_open(found.pid)
        try:
            if is_alive(found):  # compared after opening: it is this process that the descriptor is of
                signal.pidfd_send_signal(descriptor, signum)
        except PermissionError:
            return False
        finally:
            os.close(descriptor)
    return True


def _wait_gone(processes: Iterable[Found], timeout_s: float) -> None:
    """Until all of them have ended, or the time is over."""
    ends_s = time.monotonic() + timeout_s
    processes = tuple(processes)
    while any(map(is_alive, processes)) and time.monotonic() < ends_s:
        time.sleep(_POLL_S)


# ---- other machines

def _end_elsewhere(run: str, footprints: Sequence[Footprint], was_running: bool) -> Outcome:
    """Likewise on every machine that a footprint names."""
    outcome = Outcome()
    machines: dict[tuple[str, str], list[Footprint]] = {}
    for footprint in footprints:
        machines.setdefault((footprint.machine, footprint.node), []).append(footprint)
    if not machines:
        return outcome
    with ThreadPoolExecutor(max_workers=32) as pool:
        for there, result in zip(machines.values(), pool.map(lambda f: _end_there(run, f[0]), machines.values())):
            if isinstance(result, str):
                outcome.left.append(result)
                continue
            if was_running and not result.left:  # those that had ended before we came ended because the run was asked
                result.ended = Counter(f.host for f in there)
            outcome.add(result)
    return outcome


def _end_there(run: str, footprint: Footprint) -> Outcome | str:
    """On one other machine; or, in words, why not, and what to type there."""
    here = [footprint.python, footprint.program, "kill", "--run", run, "--here"]
    reasons = []
    for command in _ways_to(footprint, [*here, "--json"]):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_REMOTE_S)
        except subprocess.TimeoutExpired:
            reasons.append(f"{command[0]}: no answer in {_REMOTE_S:.0f} s")
            continue
        except OSError as error:
            reasons.append(f"{command[0]}: {error.strerror}")
            continue
        try:
            return Outcome.from_json(done.stdout.strip().rpartition("\n")[2])
        except (ValueError, KeyError):
            reasons.append(f"{command[0]}: {(done.stderr.strip() or 'no answer').splitlines()[-1]}")
    if footprint.job and _is_over(footprint.job):
        return Outcome()
    why = "; ".join(reasons) or "neither srun nor ssh is installed here"
    return f"{footprint.machine} can't be reached ({why}); log in there and type: {shlex.join(here)}"


def _is_over(job: str) -> bool:
    """Whether Slurm knows that this job is over, on all its nodes: then it has ended the processes itself."""
    ends_s = time.monotonic() + _JOB_ENDS_S
    while shutil.which("squeue"):
        try:
            done = subprocess.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=_REMOTE_S)
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode:
            return "Invalid job id" in done.stderr  # forgotten, some minutes after its end
        if not done.stdout.strip():
            return True
        if done.stdout.strip() != "COMPLETING" or time.monotonic() > ends_s:
            return False
        time.sleep(_POLL_S)
    return False


def _ways_to(footprint: Footprint, command: list[str]) -> list[list[str]]:
    ways = []
    if footprint.job and shutil.which("srun"):
        ways.append(["srun", f"--jobid={footprint.job}", "--overlap", "--nodes=1", "--ntasks=1",
                     f"--nodelist={footprint.node}", "--quiet", *command])
    if shutil.which("ssh"):
        ways.append(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", footprint.machine, shlex.join(command)])
    return ways
