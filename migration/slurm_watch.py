"""Looks at Slurm every few seconds, and gives nodes back: runs scontrol and sinfo on a thread of its own.

In the controller's process. The control thread only takes what has come (`take`) and leaves notes (`give_back`); it
never waits for Slurm, whose controller may be slow or away. Polite: two short calls a look (three every so often),
fewer when a call fails or is slow. What the answers mean says slurm_nodes.py; what follows decides departures.py.
"""
from __future__ import annotations

import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass

from migration.errors import UserError
from migration.slurm_nodes import NODE_FORMAT, Sighting, parse_job, parse_maintenance, parse_nodes

_CALL_TIMEOUT_S = 20.0  # a resize that Slurm isn't ready for is refused after 5 s
_MAX_PAUSE_S = 60.0  # unless the user asks for longer ones
_SLOW_FACTOR = 3  # the pause is at least so many times what a look took
_LOOKS_PER_RESERVATION = 12  # reservations are made ahead, and listed for the whole cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveBack:
    """What became of `give_back`. error: '' if Slurm has the nodes; a comment that it doesn't take matters less."""

    nodes: tuple[str, ...]
    error: str
    comment_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """Slurm couldn't be asked, for the first time since it last answered."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _GiveBack:
    """A note for the thread."""

    nodes: tuple[str, ...]
    comment: str


def check_commands() -> None:
    """Raises UserError if Slurm's commands aren't there."""
    missing = [name for name in ("scontrol", "sinfo") if shutil.which(name) is None]
    if missing:
        raise UserError(f"no {' and no '.join(missing)} in PATH, so drained nodes aren't seen; a container needs "
                        "Slurm's client commands, its configuration and munge's socket")


class SlurmWatch:
    """Sightings of the job `job_id` come in at every `poll_s` seconds."""

    def __init__(self, job_id: str, poll_s: float) -> None:
        self._job_id, self._poll_s = job_id, poll_s
        self._notes: queue.SimpleQueue[_GiveBack | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Sighting | GaveBack | NoAnswer] = queue.SimpleQueue()
        self._maintenance: dict[str, float] = {}
        self._num_looks, self._num_failed = 0, 0
        self._thread = threading.Thread(target=self._run, name="slurm", daemon=True)
        self._thread.start()

    # ---- the control thread

    def take(self) -> Sighting | GaveBack | NoAnswer | None:
        """The next thing that has come; returns at once."""
        try:
            return self._found.get_nowait()
        except queue.Empty:
            return None

    def give_back(self, nodes: tuple[str, ...], comment: str) -> None:
        """Have the allocation shrink by `nodes`, and the job commented; a GaveBack comes. Returns at once."""
        self._notes.put(_GiveBack(nodes=nodes, comment=comment))

    def close(self) -> None:
        """No further looks; doesn't wait for a call under way."""
        self._notes.put(None)

    # ---- its thread

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            try:
                note = self._notes.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                due_s = time.monotonic() + self._look_once()
                continue
            if note is None:
                return
            self._found.put(self._give_back(note))
            due_s = time.monotonic()

    def _look_once(self) -> float:
        """One look; returns the pause until the next."""
        started_s = time.monotonic()
        try:
            self._found.put(self._look())
            self._num_failed = 0
        except (OSError, subprocess.SubprocessError, UserError) as error:
            if self._num_failed == 0:
                self._found.put(NoAnswer(error=_in_words(error)))
            self._num_failed += 1
        return choose_pause(self._poll_s, self._num_failed, time.monotonic() - started_s)

    def _look(self) -> Sighting:
        job = parse_job(self._call("scontrol", "-o", "show", "job", self._job_id))
        nodes = parse_nodes(self._call("sinfo", "-a", "-h", "-N", "-n", ",".join(job.nodes), "-o", NODE_FORMAT))
        if self._num_looks % _LOOKS_PER_RESERVATION == 0:
            self._maintenance = parse_maintenance(self._call("scontrol", "-o", "show", "reservation"))
        self._num_looks += 1
        return Sighting(job=job, nodes=nodes, maintenance=self._maintenance, time_s=time.time())

    def _give_back(self, note: _GiveBack) -> GaveBack:
        """The comment comes first: some clusters take no update after a resize."""
        comment_error = self._update(f"Comment={note.comment}")
        try:
            nodes = parse_job(self._call("scontrol", "-o", "show", "job", self._job_id)).nodes
        except (OSError, subprocess.SubprocessError, UserError) as error:
            return GaveBack(nodes=note.nodes, error=_in_words(error), comment_error=comment_error)
        kept = [name for name in nodes if name not in note.nodes]
        error = self._update(f"NodeList={','.join(kept)}") if len(kept) < len(nodes) else ""
        return GaveBack(nodes=note.nodes, error=error, comment_error=comment_error)

    def _update(self, change: str) -> str:
        """Change the job; returns what went wrong, or ''."""
        try:
            self._call("scontrol", "update", f"JobId={self._job_id}", change)
        except (OSError, subprocess.SubprocessError, UserError) as error:
            return _in_words(error)
        return ""

    def _call(self, *command: str) -> str:
        # times in one format; and scontrol leaves scripts where it stands when it shrinks a job
        with tempfile.TemporaryDirectory(prefix="lm-slurm-") as folder:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder,
                                  timeout=_CALL_TIMEOUT_S, env=os.environ | {"SLURM_TIME_FORMAT": "standard"})
        if done.returncode:
            raise UserError(f"{' '.join(command[:3])}: {' '.join((done.stderr or done.stdout).split())[:300]}")
        return done.stdout


def choose_pause(poll_s: float, num_failed: int, took_s: float) -> float:
    """From a look that took `took_s` to the next, after `num_failed` in a row that failed; never below `poll_s`."""
    pause_s = max(poll_s, min(_MAX_PAUSE_S, max(poll_s * 2 ** min(num_failed, 6), _SLOW_FACTOR * took_s)))
    return min(threading.TIMEOUT_MAX, pause_s)  # more can't be waited for, and who asks for it wants no looks


def _in_words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{' '.join(error.cmd[:3])} didn't answer in {error.timeout:g} s"
    return str(error)
