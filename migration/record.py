"""What the controller keeps of a run for people: the progress line, one record per move, and the verdict in
RUN/result.json, written last. Decides nothing.
"""
from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from migration.config import Config
from migration.move import MoveTally, Report
from migration.protocol import Phase
from migration.roster import MovePlan
from migration.timeline import Timeline

RESULT_VERSION = 1


@dataclass(slots=True, kw_only=True)
class MoveRecord:
    """Times (unix seconds) and counts of the move under way, as its members report them."""

    request: str
    request_id: int
    arm: str
    plan: MovePlan
    term: int
    requested_s: float
    ready_s: float = math.nan
    committed_s: float = math.nan
    arrived_s: list[float] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    num_rebuilt: int = 0
    num_kept: int = 0
    num_restored: int = 0  # groups closed to make room, and rebuilt since the move aborted (policy lazy)
    num_other_bits: int = 0  # those of them whose sums have other bits now

    def take(self, report: Report, record: dict[str, Any], now_s: float) -> None:
        if report is Report.PREPARED:
            self.ready_s = now_s  # the last one counts, if all come
        if report is Report.ACKNOWLEDGED and "arrived_s" in record:
            if record["from"] not in self.plan.joiners:  # to it, the boundary is when its leaver's state begins to come
                self.arrived_s.append(record["arrived_s"])
            self.resumed_s.append(record["resumed_s"])
            self.num_bytes += record["bytes"]
            self.num_rebuilt += record["groups"][0]
            self.num_kept += record["groups"][1]
        if report is Report.ACKNOWLEDGED and "rebuilt" in record:
            self.num_restored += record["rebuilt"][0]
            self.num_other_bits += record["rebuilt"][1]

    def drop(self) -> None:
        """Nobody goes on with it, even if some members have acknowledged its commit."""
        self.arrived_s, self.resumed_s, self.committed_s = [], [], math.nan
        self.num_bytes = self.num_rebuilt = self.num_kept = 0

    def to_json(self) -> dict[str, Any]:
        """For another controller, without what members report after the verdict: they tell it again."""
        return {"request": self.request, "request_id": self.request_id, "arm": self.arm, "plan": self.plan.to_json(),
                "requested_s": self.requested_s, "ready_s": self.ready_s, "committed_s": self.committed_s}

    @classmethod
    def from_json(cls, value: dict[str, Any], term: int) -> MoveRecord:
        return cls(**{**value, "plan": MovePlan.from_json(value["plan"])}, term=term)

    @property
    def restored(self) -> str:
        """Said of an aborted move that couldn't leave the old communicators as they were; empty for all others."""
        if not self.num_restored:
            return ""
        bits = f"{self.num_other_bits} of them sum in another order" if self.num_other_bits else "all sum as before"
        return f"{self.num_restored} old groups, closed to make room (policy lazy), were rebuilt; {bits}"

    def columns(self, tally: MoveTally) -> dict[str, Any]:
        """The row of the log's `moves`. Downtime: from the last arrival at the position to the last resumption."""
        committed = bool(self.arrived_s)
        said = ["" if committed else tally.reason, self.restored]
        if tally.bits_kept is False:
            said.append("sums on the new communicators have other bits than on the old ones")
        if committed and tally.bits_kept is None:
            said.append("whether sums keep their bits couldn't be told: it was prepared before the first iteration "
                        "had ended")
        return {"move": tally.number, "request": self.request, "arm": self.arm,
                "outcome": "COMMITTED" if committed else "ABORTED",
                "reason": "; ".join(filter(None, said)),
                "iteration": tally.position if committed else -1, "generation": tally.generation, "term": self.term,
                "requested_s": self.requested_s,
                "setup_s": math.nan if tally.position is None else self.ready_s - self.requested_s,
                "downtime_s": max(self.resumed_s) - max(self.arrived_s) if committed else math.nan,
                "total_s": self.committed_s - self.requested_s, "bytes": self.num_bytes,
                "num_groups_rebuilt": self.num_rebuilt, "num_groups_kept": self.num_kept,
                "assignments": [[a.slot, a.leaver, a.joiner] for a in self.plan.assignments]}


@dataclass(slots=True, kw_only=True)
class RecoveryRecord:
    """One recovery, for result.json: fields that are None are not known yet, or never came about."""

    lost: list[int]  # world ranks that held slots
    hosts: list[str]  # of those
    slots: list[int]  # that changed hands
    to: list[int]  # world ranks that took them
    why: str
    generation: int
    detect_s: float  # from the last word of the first that was lost
    from_iteration: int | None = None
    redone: int | None = None  # iterations that were done, or begun to be, and are done again
    checkpoint: str | None = None  # null: from the start of the run
    keeps_bits: bool | None = None  # whether sums have the bits that they had in the generation before
    recovery_s: float | None = None  # from the decision to the end of the first iteration on the last slot


class RunRecord:
    """The run as the controller saw it."""

    def __init__(self, *, config: Config, num_iterations: int, run: str, timeline: Timeline, progress_s: float) -> None:
        self.moves: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []  # saved by this run; not all of them are kept
        self.recoveries: list[dict[str, Any]] = []  # RecoveryRecord's fields
        self.run = run
        self._config, self._timeline, self._progress_s = config, timeline, progress_s
        self._num_iterations = num_iterations  # those of the config, or fewer with --save-at
        self._shown_s, self._shown_phase = 0.0, ""
        self._is_terminal = sys.stdout.isatty()

    @property
    def clock(self) -> Callable[[], float]:
        return self._timeline.clock

    # ---- the progress line

    def progress(self, record: dict[str, Any], generation: int, phase: str) -> None:
        """One line for the iteration just done; where the output isn't a terminal, not more often than `progress_s`."""
        now_s = time.monotonic()
        done = record["iteration"]
        last = done == self._num_iterations
        if not (self._is_terminal or last or phase != self._shown_phase or now_s - self._shown_s > self._progress_s):
            return
        self._shown_s, self._shown_phase = now_s, phase
        width = len(str(self._num_iterations))
        text = (f"iteration {done:{width}d}/{self._num_iterations}  loss {record['loss']:.4f}  "
                f"{record['time_s']:.3f} s/iteration  generation {generation}{phase}")
        if self._is_terminal:
            sys.stdout.write(f"\r\x1b[K{text}" + ("\n" if last else ""))
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """A line of its own."""
        sys.stdout.write(("\r\x1b[K" if self._is_terminal else "") + text + "\n")
        sys.stdout.flush()

    # ---- moves and faults

    def finish(self, move: MoveRecord, tally: MoveTally) -> None:
        """A move is committed or aborted."""
        columns = move.columns(tally)
        self._add(columns, move.request_id)
        if columns["outcome"] == "COMMITTED":
            self.say(f"move {move.request} committed before iteration {columns['iteration']}: generation "
                     f"{tally.generation}, setup {columns['setup_s']:.2f} s, "
                     f"downtime {columns['downtime_s'] * 1e3:.0f} ms, {columns['bytes'] / 1e6:.2f} MB"
                     + (f"; {columns['reason']}" if columns["reason"] else ""))
        elif move.restored:
            self.say(f"move {move.request}: {move.restored}")

    def refuse(self, request: str, request_id: int, reason: str, generation: int, term: int) -> None:
        """A request that never became a move."""
        self._add({"move": -1, "request": request, "arm": "", "outcome": "REFUSED", "reason": reason, "iteration": -1,
                   "generation": generation, "term": term, "requested_s": self.clock(), "setup_s": math.nan,
                   "downtime_s": math.nan, "total_s": math.nan, "bytes": 0, "num_groups_rebuilt": 0,
                   "num_groups_kept": 0, "assignments": []}, request_id)

    def _add(self, columns: dict[str, Any], request_id: int) -> None:
        self.moves.append({"request_id": request_id} | {
            k: None if isinstance(v, float) and math.isnan(v) else v for k, v in columns.items()})
        self._timeline.add_move(**columns)

    def checkpoint(self, record: dict[str, Any]) -> None:
        """A checkpoint is complete."""
        row = {key: record[key] for key in ("iteration", "folder", "bytes", "time_s")}
        self.checkpoints.append(row)
        self.say(f"checkpoint saved before iteration {row['iteration']}: {row['folder']}, {row['bytes'] / 1e6:.2f} MB, "
                 f"{row['time_s']:.2f} s")

    def fault(self, record: dict[str, Any]) -> None:
        """An injected fault has fired."""
        self.say(f"fault {record['text']} fired at world rank {record['from']}")
        key = {"text": record["text"], "kind": record["fault"], "slot": record["slot"], "phase": record["phase"]}
        known = next((f for f in self.faults if f["text"] == record["text"]), None)
        if known is None:
            self.faults.append({**key, "fired": 1})
        else:
            known["fired"] += 1

    # ---- the verdict

    def end(self, status: str, error: str | None, tally: MoveTally, term: int, *, code: int, requeue: bool) -> None:
        """Write RUN/result.json: nothing is written after it."""
        result = {"schema_version": RESULT_VERSION, "status": status, "error": error, "exit_code": code,
                  "requeue": requeue, "checkpoints": self.checkpoints, "profile": self._config.profile,
                  "iterations": self._config.iterations, "generation": tally.generation, "term": term,
                  "phase": tally.phase.value, "moves": self.moves, "faults": self.faults,
                  "recoveries": self.recoveries, "finished_s": self.clock()}
        if tally.phase is Phase.RECOVERING:
            result["error"] = f"{error} (phase {tally.phase.value})"
        elif tally.phase is not Phase.TRAINING:
            result["error"] = f"{error} (phase {tally.phase.value} of move {tally.number})"
        path = Path(self.run) / "result.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(result, indent=1))
        os.replace(unfinished, path)

    # ---- for another controller

    def to_json(self, first_move: int = 0) -> dict[str, Any]:
        """Of the moves those from `first_move` on, for they only become more."""
        return {"moves": self.moves[first_move:], "faults": self.faults, "checkpoints": self.checkpoints,
                "recoveries": self.recoveries}

    def load_json(self, value: dict[str, Any]) -> None:
        self.moves, self.faults, self.checkpoints = value["moves"], value["faults"], value["checkpoints"]
        self.recoveries = value["recoveries"]
