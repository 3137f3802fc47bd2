"""World rank 0's part in the preflight: who measures what when, what came of it, and the end.

Owns the order of the steps, their deadlines and the collected figures. Runs on the control thread and never waits.
Must not know how anything is measured (check.py) or what counts as wrong (check_report.py).
"""
from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from migration.check_report import (GroupRow, Measured, ProcessRow, find_problems, report_text, slow_groups,
                                    slow_processes)
from migration.config import Config
from migration.topology import GROUP_KINDS, grid_of
from migration.world import Record, World

_NUM_PINGS = 10
_MAX_REPEATS = 2  # a slow figure is measured again, so that a hiccup isn't called a fault
_GRACE_S = 2.0  # from the first failure to the end: others may have more to say
_BEAT_S = 2.0
_MIB = 1 << 20
LINK_WITHIN, LINK_BETWEEN = "pair in a host", "pair between hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is measured at one time. `groups`: world ranks that work together."""

    do: str  # device, matmul or all_reduce
    kind: str  # as the report calls it
    groups: tuple[tuple[int, ...], ...]


def plan_steps(hosts: Sequence[str], machines: Sequence[str], config: Config) -> list[Step]:
    """Every step, in order; the job's groups only if there are enough processes for it."""
    everyone = range(len(hosts))
    steps = [Step(do="device", kind="imports and device", groups=tuple((r,) for r in everyone))]
    # the processes of a machine take turns, so that a figure says how fast the machine is and not how crowded
    turns = [machines[:r].count(machines[r]) for r in everyone]
    steps += [Step(do="matmul", kind="matrix multiply", groups=tuple((r,) for r in everyone if turns[r] == turn))
              for turn in range(max(turns) + 1)]
    for phase in _pairs(len(hosts)):
        for kind in (LINK_WITHIN, LINK_BETWEEN):
            pairs = tuple(p for p in phase if (hosts[p[0]] == hosts[p[1]]) is (kind == LINK_WITHIN))
            steps += [Step(do="all_reduce", kind=kind, groups=pairs)] if pairs else []
    return steps + (_job_steps(config) if len(hosts) >= config.job_size else [])


def _pairs(num: int) -> list[list[tuple[int, int]]]:
    """Everybody with both neighbours on a ring, in rounds in which nobody is in two pairs."""
    ring = [(min(r, (r + 1) % num), max(r, (r + 1) % num)) for r in range(num if num > 2 else num - 1)]
    return [ring[:-1:2], ring[1:-1:2], ring[-1:]] if num % 2 else [ring[::2], ring[1::2]]


def _job_steps(config: Config) -> list[Step]:
    """One for each different set of groups: where there is one stage, tp_pp has the groups of tp."""
    kinds: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for kind in GROUP_KINDS:
        groups = tuple(g.slots for g in grid_of(config).groups() if g.kind == kind and len(g.slots) > 1)
        if groups:
            kinds.setdefault(groups, []).append(kind)
    return [Step(do="all_reduce", kind=", ".join(names), groups=groups) for groups, names in kinds.items()]


def default_bytes(rows: Sequence[ProcessRow]) -> int:
    """Of an all-reduce: enough to fill a link; less where processes share a GPU, since they take turns on it."""
    if rows[0].gpu is None:
        return 4 * _MIB
    return 64 * _MIB if len({(p.machine, p.gpu) for p in rows}) == len(rows) else 8 * _MIB


class Conductor:
    """Goes through the steps and ends everybody. `size_bytes` of an all-reduce: 0 means one for the kind of device."""

    def __init__(self, world: World, config: Config, *, size_bytes: int, timeout_s: float, run: str) -> None:
        self._world, self._config, self._size_bytes, self._timeout_s, self._run = (world, config, size_bytes, timeout_s,
                                                                                   run)
        self._started_s = time.monotonic()
        names = ("host", "machine", "versions", "data", "data_problem")
        self._rows = [ProcessRow(world_rank=r, **{name: hello[name] for name in names})
                      for r, hello in enumerate(world.hellos)]
        self._groups: dict[tuple[str, tuple[int, ...]], GroupRow] = {}
        self._steps = plan_steps([p.host for p in self._rows], [p.machine for p in self._rows], config)
        self._todo, self._num_repeats = list(self._steps), 0
        self._failures: list[str] = []
        self._store: list[Any] = []
        self._trips_s: list[float] = []
        self._beat_s = self._sent_s = 0.0
        self._ended = False
        if world.size == 1:
            self._next_step()
        else:
            self._wait_for("round trips", range(1, world.size))
            self._ping(1)

    # ---- round trips, one process after the other

    def _ping(self, world_rank: int) -> None:
        self._sent_s = time.perf_counter()
        self._world.send(world_rank, {"kind": "PING"})

    def _on_pong(self, record: Record) -> None:
        self._trips_s.append(time.perf_counter() - self._sent_s)
        rank = record["rank"]
        if len(self._trips_s) == _NUM_PINGS:
            self._rows[rank] = dataclasses.replace(self._rows[rank], latency_s=statistics.median(self._trips_s))
            self._trips_s.clear()
            self._waiting.discard(rank)
            rank += 1
        if self._waiting:
            self._ping(rank)
        else:
            self._next_step()

    # ---- steps

    def _wait_for(self, what: str, world_ranks: Sequence[int]) -> None:
        self._what, self._waiting, self._ends_s = what, set(world_ranks), time.monotonic() + self._timeout_s

    def _next_step(self) -> None:
        if not self._todo and self._num_repeats < _MAX_REPEATS:
            self._num_repeats += 1
            self._todo = [step for step in self._steps if self._is_suspect(step)]
        if not self._todo:
            self._end()
            return
        self._step = self._todo.pop(0)
        self._times: dict[int, list[float]] = {}
        self._wait_for(self._step.kind, [r for group in self._step.groups for r in group])
        for group in self._step.groups:
            for rank in group:
                self._world.send(rank, {"kind": "STEP", "do": self._step.do, "members": group, "store": self._store,
                                        "name": f"{self._step.kind}/{self._num_repeats}/{'-'.join(map(str, group))}",
                                        "size_bytes": self._all_reduce_bytes()})

    def _is_suspect(self, step: Step) -> bool:
        if step.do == "matmul":
            return any((p.world_rank,) in step.groups for p in slow_processes(self._rows))
        slow = {(g.kind, g.world_ranks) for g in slow_groups(tuple(self._groups.values()))}
        return any((step.kind, group) in slow for group in step.groups)

    def _all_reduce_bytes(self) -> int:
        return self._size_bytes or default_bytes(self._rows)

    def on_record(self, record: Record) -> None:
        """A PONG, or that a process has DONE its part in a step, or FAILED in it."""
        if self._ended:
            return
        if record["kind"] == "PONG":
            self._on_pong(record)
            return
        rank = record["rank"]
        self._waiting.discard(rank)
        if record["kind"] == "FAILED":
            host = self._rows[rank].host
            self._failures.append(f"host {host} (world rank {rank}), {self._what}: {record['message']}")
            self._ends_s = min(self._ends_s, time.monotonic() + _GRACE_S)
        else:
            self._keep(rank, record)
        if not self._waiting:
            self._finish_step()

    def _keep(self, rank: int, record: Record) -> None:
        self._store = record.get("store") or self._store
        found = record["found"]
        if self._step.do == "all_reduce":
            self._times[rank] = found["times_s"]
            return
        if self._rows[rank].flops is not None:
            found["flops"] = max(found["flops"], self._rows[rank].flops)
        versions = {**self._rows[rank].versions, **found.pop("versions", {})}
        self._rows[rank] = dataclasses.replace(self._rows[rank], versions=versions, **found)

    def _finish_step(self) -> None:
        if self._step.do == "all_reduce" and not self._failures:
            for group in self._step.groups:
                # an all-reduce has taken as long as it took the last member
                time_s = min(max(times) for times in zip(*(self._times[r] for r in group)))
                key = self._step.kind, group
                if key in self._groups:
                    time_s = min(time_s, self._groups[key].time_s)
                self._groups[key] = GroupRow(kind=self._step.kind, world_ranks=group, time_s=time_s,
                                             num_bytes=self._all_reduce_bytes())
        without = [p for p in self._rows if p.gpu is None]
        if self._step.do == "device" and 0 < len(without) < len(self._rows):
            self._failures.append("some processes have a GPU, but not those of host "
                                  + ", ".join(dict.fromkeys(p.host for p in without)) + ": they can't share a group")
        if self._failures:
            self._end()
        else:
            self._next_step()

    def on_tick(self, now_s: float) -> None:
        if self._ended:
            return
        if now_s > self._beat_s + _BEAT_S:
            self._beat_s = now_s
            self._tell_all({"kind": "ALIVE"})
        if now_s > self._ends_s:
            if not self._failures:
                silent = ", ".join(f"{r} (host {self._rows[r].host})" for r in sorted(self._waiting))
                self._failures.append(f"{self._what}: not done after {self._timeout_s:g} s: world rank {silent}")
            self._end()

    def _tell_all(self, record: Record) -> None:
        for rank in range(self._world.size):
            self._world.send(rank, record)

    def _end(self) -> None:
        """Print the report, leave it in the run's folder, and end everybody, in order if all are well."""
        self._ended = True
        measured = Measured(config=self._config, processes=tuple(self._rows), groups=tuple(self._groups.values()),
                            failures=tuple(self._failures), seconds=time.monotonic() - self._started_s)
        sys.stdout.write(report_text(measured) + "\n")
        sys.stdout.flush()
        problems = find_problems(measured)
        code = 1 if problems else 0
        if self._run:
            write_result(self._run, code, problems=problems, **asdict(measured))
        self._tell_all({"kind": "END", "code": code, "finalize": not self._failures})


def write_result(run: str, code: int, **more: Any) -> None:
    """RUN/result.json: the launcher waits for it."""
    path = Path(run) / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps({"status": "failed" if code else "completed", "exit_code": code, **more}, indent=1))
    written.replace(path)
