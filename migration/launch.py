"""Starts a job on this machine: one mpiexec with the right flags, and the exit code of the run.

Owns the mpiexec process, the signals that come to the launcher, and the fork server of a run. Must not know what the
processes do; of a run it reads `result.json` only, because mpiexec's own exit code says nothing (141 or 255 after
successful runs with these flags), and whether its processes refused to start: then the run folder may be another run's,
so they say it in a file of the launcher's own.

Each process gets a hydra proxy of its own (`-hosts r0:1,r1:1,...`): with a proxy for several, the SIGKILL of one can
take its neighbours along. `-disable-auto-cleanup` lets processes leave while the others go on. That is not enough when
several leave within milliseconds: mpiexec then writes to a proxy that is just ending, dies of SIGPIPE and takes the job
along (1 in 30 with 4 of 8 leaving; ignoring SIGPIPE, tried, only turns it into an error of mpiexec's). With shared
imports mpiexec never sees anybody leave before the last one has ended (see forkserver.py).

Whoever starts launchers, one after the other, does it by `run_child`, which lets them end in order.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from migration.errors import UserError
from migration.forkserver import ADDRESS_VARIABLE, ForkServer
from migration.versions import CODE_ROOT
from migration.zygote import RUN_VARIABLE, die_with_parent

_REFUSED_VARIABLE = "LM_REFUSED"
_HARNESS = CODE_ROOT / "harness.py"
_PRELOAD, _ENTRY = "migration.preload:preload", "harness:run_process"
_POLL_S = 0.5
_TERM_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_RESULT_GRACE_S = 20.0  # from result.json to the end of the last process
_CHILD_GRACE_S = 30.0  # from Ctrl-C to the end of a launcher, whose own waits for its job and fork server are shorter


@contextmanager
def serve_imports(environment: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """A fork server for all runs of the context, so that imports are paid for once; gives the variables for them.

    Nothing where one is there already. environment: the server's own.
    """
    if ADDRESS_VARIABLE in os.environ:
        yield {}
        return
    with ForkServer(preload=_PRELOAD, entry=_ENTRY, environment=environment) as server:
        yield {ADDRESS_VARIABLE: server.address}


def launch(num_processes: int, argv: Sequence[str], *, run_dir: Path, share_imports: bool = True,
           program: Path = _HARNESS, preload: str = _PRELOAD, entry: str = _ENTRY) -> int:
    """Runs `program` with `argv` in `num_processes` processes; returns the exit code of the run.

    argv already contains `--run run_dir` and no `--np`. 0: the run says it completed, 1: it failed or left no result,
    another number: what the run's result says (2: a user's error, 75: to be started again),
    128+N: the launcher was ended by signal N. share_imports: processes are copies of one that ran `preload`, and call
    `entry` (see forkserver.py); a server named by LM_FORKSERVER is used, else one is made for this run.
    To be called in the main thread. Raises UserError if there is no usable mpiexec or run_dir holds a result already.
    """
    result = run_dir / "result.json"
    if result.exists():
        raise UserError(f"--run {run_dir}: there is a finished run in it ({result.name}); name another folder")
    command = [str(_find_mpiexec()), "-disable-auto-cleanup", "-launcher", "fork",
               "-hosts", ",".join(f"r{index}:1" for index in range(num_processes)), "-n", str(num_processes),
               sys.executable, str(program), *argv]
    with ExitStack() as stack:
        refused = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lm-"))) / "refused"
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {
            RUN_VARIABLE: str(run_dir), _REFUSED_VARIABLE: str(refused)}
        if not share_imports:
            environment.pop(ADDRESS_VARIABLE, None)
        elif ADDRESS_VARIABLE not in environment:
            server = stack.enter_context(ForkServer(preload=preload, entry=entry, environment=environment))
            environment[ADDRESS_VARIABLE] = server.address
        # Its own session: Ctrl-C comes to the launcher only, which ends the job in order. If the launcher is killed,
        # the kernel kills mpiexec, whose proxies then end their processes.
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
                               start_new_session=True, preexec_fn=die_with_parent)
        errors = threading.Thread(target=_pass_on, args=(job.stderr, run_dir / "mpiexec.log"), daemon=True)
        errors.start()
        signum = _wait(job, result)
        errors.join(_TERM_GRACE_S)
        if not signum and refused.exists():
            return 2
    return 128 + signum if signum else _verdict(result)


def run_child(arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, is_quiet: bool = False,
              timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """This Python with `arguments` in the code's folder, to its end, as by subprocess.run.

    Ctrl-C goes to the child as well, and a launcher ends its job in order then, for which subprocess.run doesn't wait.
    Here KeyboardInterrupt is raised once the child has ended. is_quiet: its words are in the result only.
    """
    output = subprocess.PIPE if is_quiet else None
    with subprocess.Popen([sys.executable, *arguments], cwd=CODE_ROOT, env=environment, stdin=subprocess.DEVNULL,
                          stdout=output, stderr=output, text=True) as child:
        try:
            said, errors = child.communicate(timeout=timeout_s)
        except KeyboardInterrupt:
            _let_end(child)
            raise
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, said, errors)


def _let_end(child: subprocess.Popen[str]) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C is for the child, which hurries then
    try:
        child.communicate(timeout=_CHILD_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
    finally:
        signal.signal(signal.SIGINT, previous)


def tell_refused() -> None:
    """In a process that refuses to start for a user's error: under --np the launcher learns that all has been said."""
    if _REFUSED_VARIABLE in os.environ:
        Path(os.environ[_REFUSED_VARIABLE]).touch()


def _pass_on(errors: IO[bytes], own: Path) -> None:
    """Standard error of the job, less what mpiexec says about itself: with these flags it complains after good runs."""
    for line in errors:
        try:
            if line.startswith((b"[mpiexec@", b"[proxy:")):
                with own.open("ab") as log:
                    log.write(line)
                continue
        except OSError:
            pass  # no folder: the run hasn't come so far, and perhaps this is why
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _find_mpiexec() -> Path:
    beside = Path(sys.executable).with_name("mpiexec")  # not resolved: in an environment, python is a link
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError("no mpiexec beside the Python in use nor in PATH; install MPICH: pip install mpich")
    version = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if "HYDRA" not in version.stdout:
        raise UserError(f"{found} is not MPICH's mpiexec, whose flags --np needs: pip install mpich, or start "
                        f"harness.py under your own mpirun, without --np")
    return Path(found)


def _wait(job: subprocess.Popen, result: Path) -> int:
    """Waits for mpiexec to end; returns the number of the signal that made it so, or 0."""
    received: list[int] = []

    def end_job(signum: int, frame: FrameType | None) -> None:
        if not received:
            job.terminate()
        else:
            job.kill()  # asked twice: at once
        received.append(signum)

    previous = {signum: signal.signal(signum, end_job) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        since: dict[str, float] = {}
        while True:
            try:
                job.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                _end_if_overdue(job, bool(received), result.exists(), since)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return received[0] if received else 0


def _end_if_overdue(job: subprocess.Popen, told_to_end: bool, has_result: bool, since: dict[str, float]) -> None:
    """since: when each reason to end was first seen (monotonic)."""
    now_s = time.monotonic()
    if told_to_end and now_s - since.setdefault("signal", now_s) > _TERM_GRACE_S:
        job.kill()
    if has_result and now_s - since.setdefault("result", now_s) > _RESULT_GRACE_S:
        print(f"launcher: the run has its result, but processes were still there {_RESULT_GRACE_S:.0f} s later; "
              "they are killed", file=sys.stderr, flush=True)
        job.kill()


def _verdict(result: Path) -> int:
    try:
        found = json.loads(result.read_text())
        status = found["status"]
    except (OSError, ValueError, KeyError) as error:
        print(f"launcher: the run ended without a result ({result}: {error}); what its processes said is above, "
              f"their logs are in {result.parent / 'log'}", file=sys.stderr, flush=True)
        return 1
    return found.get("exit_code", 0 if status == "completed" else 1)
