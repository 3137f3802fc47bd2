"""The part `kill` of bench_gpus.py: SIGKILL to a process that holds a slot of a job that trains, and what then happens.

The job saves checkpoints; one is there, and some iterations beyond it are done, when the signal is sent. What the job
did about it stands in result.json (`recoveries`).
"""
from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from analysis.bench_parts import EQUAL, Bench
from analysis.gpu_moves import RunFailed, inequality
from analysis.gpus_plan import Layout
from analysis.log import Run, read_run
from analysis.results import Figure, Section
from migration.checkpoint_files import list_complete
from migration.errors import UserError
from migration.footprint import read_footprint

TITLE = "A killed rank"
_SAID = {True: ("yes", "Sums on the new communicators have the bits that they had on the old ones."),
         False: ("no", "Sums on the new communicators have other bits than on the old ones: losses may differ."),
         None: ("not known", "Whether sums have the bits that they had before is not known.")}
_LOOK_S = 0.1
_KILL_BY = 0.6  # of the part's time: the rest is for what the job does then


def kill(bench: Bench, layout: Layout, job: tuple[str, ...], every: int, undisturbed: Callable[[], Run]
         ) -> Iterable[Section]:
    """`job`: arguments of a run that saves every `every` iterations; `undisturbed`: the same run left alone."""
    victim = layout.per_host  # the first slot of b1
    checkpoints = bench.runs / "kill-checkpoints"
    killed_s: list[float] = []

    def end_one(run: Path, has_ended: Callable[[], bool]) -> None:
        killed_s.append(_kill_when_saved(run, has_ended, checkpoints, victim, every,
                                         time.monotonic() + bench.left_s(580.0) * _KILL_BY))

    try:
        arm = bench.train("kill", (*layout.launch(), *job, "--checkpoints", str(checkpoints), "--checkpoint-every",
                                   str(every)), beside=end_one)
    except RunFailed as error:
        result = bench.runs / "kill" / "result.json"
        said = json.loads(result.read_text()) if result.exists() else {}
        raise RunFailed(explain(said, str(error), was_killed=bool(killed_s))) from error
    figures, told = describe(arm.run, killed_s[0])
    problem = inequality(arm, undisturbed())
    yield bench.section(TITLE, figures, arm.command, problem=problem, notes=(told, "" if problem else EQUAL))


def describe(run: Run, killed_s: float) -> tuple[list[Figure], str]:
    """Figures of the run's only recovery, and who it was about. `killed_s`: when the signal was sent, unix seconds.

    Raises RunFailed if there isn't one recovery.
    """
    recoveries: list[dict[str, Any]] = (run.result or {}).get("recoveries", [])
    if len(recoveries) != 1:
        raise RunFailed(f"one recovery was expected after the SIGKILL, result.json has {recoveries}")
    recovery, = recoveries
    rows = run.iterations[run.iterations["start_s"] > killed_s]
    next_s = float((rows["start_s"] + rows["time_s"]).min()) - killed_s if len(rows) else None
    figures = [Figure(name="detection", value=recovery["detect_s"], unit="s"),
               Figure(name="recovery", value=recovery["recovery_s"], unit="s"),
               Figure(name="signal to the end of the next iteration, by the logs", value=next_s, unit="s"),
               Figure(name="iterations done again", value=recovery["redone"]),
               Figure(name="sums keep their bits", value=_SAID[recovery["keeps_bits"]][0])]
    return figures, (f"World ranks {recovery['lost']} lost, slots {recovery['slots']} went to {recovery['to']}; went "
                     f"on from iteration {recovery['from_iteration']} in generation {recovery['generation']}. "
                     f"{_SAID[recovery['keeps_bits']][1]}")


def explain(result: dict[str, Any], said: str, *, was_killed: bool) -> str:
    """Why the job failed, in one line if that is because it can't go on without a process. `said`: its last words."""
    if was_killed and not result.get("recoveries"):
        error = str(result.get("error") or "the job left no result").splitlines()[0]
        return f"the job didn't recover: {error}"
    return said


def _kill_when_saved(run: Path, has_ended: Callable[[], bool], checkpoints: Path, victim: int, every: int,
                     ends_s: float) -> float:
    """SIGKILL to world rank `victim`, half-way from a checkpoint to the next one; returns when (unix seconds).

    Raises RunFailed if the job ends, or time runs out, before that.
    """
    while not has_ended() and time.monotonic() < ends_s:
        complete = list_complete(checkpoints) if checkpoints.is_dir() else []
        if complete and _last_iteration(run) >= complete[-1][0] + every // 2:
            footprint = read_footprint(str(run), victim)
            assert footprint is not None, f"world rank {victim} trains and has left none"
            os.kill(footprint.pid, signal.SIGKILL)
            return time.time()
        time.sleep(_LOOK_S)
    why = "the job had ended" if has_ended() else "time ran out"
    raise RunFailed(f"{why} before there was a checkpoint and world rank {victim} could be killed")


def _last_iteration(run: Path) -> int:
    try:
        rows = read_run(run).iterations
    except UserError:  # a log is only being made
        return -1
    return int(rows["iteration"].max()) if len(rows) else -1
