"""The arm `save_and_restart`: the same job stopped, saved, launched anew on other hosts and gone on with, in its parts.

A fair peer of a move: Megatron's distributed checkpoint, every process relaunched with the new host list, nothing done
that a restart doesn't need (no report, no digests), the files still in the page cache. Every process does its own
imports, as in a user's own relaunch. Every time is the moment at which the last process had passed a point, taken from
the logs, so that the parts add up to the total.
"""
from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.log import Run, read_run
from migration.errors import UserError
from migration.forkserver import ADDRESS_VARIABLE
from migration.launch import run_child


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTimes:
    """Seconds from the stop of the last iteration to the end of the first one after it. The parts, in their order."""

    save_s: float  # to the complete checkpoint
    end_s: float  # to the end of the last old process
    launch_s: float  # to our first line in the last new process
    mpi_s: float  # MPI is up, and everybody has compared notes
    import_s: float  # torch and Megatron
    build_s: float  # model and optimizer
    connect_s: float  # communicators, and the weights' first broadcast
    load_s: float
    first_iteration_s: float
    num_bytes: int  # of the checkpoint

    @property
    def total_s(self) -> float:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self) if field.name.endswith("_s"))


def measure_restart(arguments: Sequence[str], iteration: int, hosts_before: str, hosts_after: str, folder: Path, *,
                    num_processes: int, timeout_s: float = 1800.0) -> RestartTimes:
    """Stop the job `arguments` before `iteration`, and go on on `hosts_after`. Run folders: `folder`/before, /after.

    `arguments`: the harness's, without hosts, run and iterations. Raises UserError if a run fails.
    """
    common = ["--np", str(num_processes), *arguments, "--set", f"iterations={iteration + 2}", "--no-report",
              "--no-shared-imports"]
    checkpoints = folder / "before" / "checkpoints"
    _launch([*common, "--hosts", hosts_before, "--run", str(folder / "before"), "--save-at", str(iteration)], timeout_s)
    ended_s = time.time()
    _launch([*common, "--hosts", hosts_after, "--run", str(folder / "after"), "--load", str(checkpoints)], timeout_s)
    return compute_times(read_run(folder / "before"), read_run(folder / "after"), iteration, ended_s)


def compute_times(before: Run, after: Run, iteration: int, ended_s: float) -> RestartTimes:
    """From the logs of both runs and the time (unix) at which the last old process had ended."""
    old, new = before.iterations, after.iterations
    first = new[new["iteration"] == iteration]
    points = [float(max(old["start_s"] + old["time_s"])), _last(before, "save", "end_s"), ended_s,
              _last(after, "mpi", "start_s"), *(_last(after, name, "end_s") for name in
                                                ("mpi", "import", "build", "broadcast", "load")),
              float(max(first["start_s"] + first["time_s"]))]
    names = [field.name for field in dataclasses.fields(RestartTimes) if field.name.endswith("_s")]
    saved = before.spans[before.spans["name"] == b"save"]
    return RestartTimes(**dict(zip(names, np.diff(points).tolist(), strict=True)), num_bytes=int(saved["bytes"].max()))


def _last(run: Run, name: str, column: str) -> float:
    """Over the processes that train: nobody waits for a spare's imports."""
    training = np.isin(run.spans["world_rank"], run.iterations["world_rank"])
    return float(max(run.spans[training & (run.spans["name"] == name.encode())][column]))


def _launch(arguments: list[str], timeout_s: float) -> None:
    command = ["harness.py", *arguments]
    # a fork server that is up already would make the launch look cheaper than it is
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
    done = run_child(command, environment=environment, is_quiet=True, timeout_s=timeout_s)
    if done.returncode:
        raise UserError(f"python {shlex.join(command)} ended with {done.returncode}: "
                        f"{(done.stderr or done.stdout).strip().splitlines()[-1:]}")
