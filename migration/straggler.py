"""Which process is slower than its peers, found from what each works by itself in an iteration (own_time.py).

Pure: standard library only. The controller keeps one detector and feeds it with what the slots report.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from migration.errors import UserError

FACTOR = 1.5
IN_A_ROW = 10
FEWEST = 3  # slots: of two, nobody can say which one is usual
_MOST_OPEN = 8  # iterations of which some slot has not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """For experiments: the process that holds `slot` when `iteration` begins works `factor` times as long from then."""

    slot: int
    factor: float
    iteration: int


def parse_slow(text: str, job_size: int) -> Slow:
    """Raises UserError if `text` isn't SLOT:FACTOR@ITERATION."""
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)@(\d+)", text)
    if not match or float(match[2]) <= 1 or int(match[3]) < 1:
        raise UserError(f"--slow {text}: write it as SLOT:FACTOR@ITERATION, such as 3:2.5@10, with a factor above 1 "
                        "and an iteration of at least 1")
    if int(match[1]) >= job_size:
        raise UserError(f"--slow {text}: the last slot is {job_size - 1}")
    return Slow(slot=int(match[1]), factor=float(match[2]), iteration=int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A process that was slower than its peers in each of the last undisturbed iterations. Medians over these."""

    slot: int
    world_rank: int
    own_s: float
    others_s: float  # the median of its peers
    iteration: int  # the last of them
    num_iterations: int

    def describe(self, host: str) -> str:
        return (f"slot {self.slot} (world rank {self.world_rank}) on {host} is slow: {self.own_s:.3f} s of own work an "
                f"iteration, the others' median is {self.others_s:.3f} s, {self.num_iterations} undisturbed iterations "
                f"in a row up to {self.iteration}")


class Detector:
    """Peers are the slots of the same pipeline stage, since stages differ in work; all others where these are too few.

    `stages`: the pipeline stage of each slot. Names a process once.
    """

    def __init__(self, stages: Sequence[int], *, factor: float = FACTOR, in_a_row: int = IN_A_ROW) -> None:
        self._factor, self._in_a_row = factor, in_a_row
        self._peers = [_peers(slot, stages) for slot in range(len(stages))]
        self._open: dict[int, dict[int, tuple[int, float | None]]] = {}  # iteration -> slot -> (world rank, own time)
        self._rows: dict[int, list[tuple[float, float]]] = {}  # world rank -> (own, others') while it is slower
        self._named: set[int] = set()

    def take(self, *, iteration: int, slot: int, world_rank: int, own_s: float | None) -> list[Straggler]:
        """A slot's report. `own_s` None: the iteration was disturbed, and counts for nobody. Returns who is
        given away by it."""
        if len(self._peers) < FEWEST:
            return []
        reports = self._open.setdefault(iteration, {})
        reports[slot] = (world_rank, own_s)
        if len(reports) < len(self._peers):
            if len(self._open) > _MOST_OPEN:  # a slot's report was lost with its process
                del self._open[min(self._open)]
            return []
        del self._open[iteration]
        times_s = {at: time_s for at, (_, time_s) in reports.items() if time_s is not None}
        if len(times_s) < len(reports):
            return []
        found = [self._judge(iteration, at, reports[at][0], times_s) for at in range(len(self._peers))]
        return [straggler for straggler in found if straggler is not None]

    def _judge(self, iteration: int, slot: int, world_rank: int, times_s: Mapping[int, float]) -> Straggler | None:
        others_s = median(times_s[peer] for peer in self._peers[slot])
        row = self._rows.setdefault(world_rank, [])
        if times_s[slot] <= self._factor * others_s:
            row.clear()
            return None
        row.append((times_s[slot], others_s))
        del row[:-self._in_a_row]
        if len(row) < self._in_a_row or world_rank in self._named:
            return None
        self._named.add(world_rank)
        return Straggler(slot=slot, world_rank=world_rank, own_s=median(own for own, _ in row),
                         others_s=median(others for _, others in row), iteration=iteration, num_iterations=len(row))


def _peers(slot: int, stages: Sequence[int]) -> list[int]:
    others = [other for other in range(len(stages)) if other != slot]
    same = [other for other in others if stages[other] == stages[slot]]
    return same if len(same) >= FEWEST - 1 else others
