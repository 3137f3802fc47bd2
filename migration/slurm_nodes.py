"""What Slurm says of a job and its nodes, and which nodes are to be left. Pure: text in, facts out.

Reads what `scontrol show job`, `sinfo` and `scontrol show reservation` print; slurm_watch.py runs them. Knows nothing
of processes, slots or moves. A node is called by Slurm's name throughout, which is also the name of its host.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from migration.errors import UserError

NODE_FORMAT = "%N|%T|%E"  # of sinfo: name, state with its flag, reason

# What sinfo hangs onto a state: an idle or mixed node may be about to go all the same.
_FLAGS = {"*": "not answering", "$": "in maintenance", "@": "to be rebooted", "^": "being rebooted",
          "!": "to be powered down", "%": "being powered down"}
_LEAVING_STATES = {"draining", "drained", "failing", "fail", "down", "error", "maint", "reboot", "reboot_issued"}
_NUM_SIGHTINGS = 3  # a node that comes back from a drain is unheard for a moment, and so is a busy one


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as sinfo shows it."""

    state: str  # without its flag
    flag: str
    reason: str

    @property
    def trouble(self) -> str:
        """Why the job should leave it, in words; '' where it shouldn't. Not answering isn't among it."""
        what = self.state if self.state in _LEAVING_STATES else _FLAGS.get(self.flag, "") if self.flag != "*" else ""
        return what + (f" ({self.reason})" if what and self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The job as scontrol shows it."""

    nodes: tuple[str, ...]  # still in the allocation
    batch_host: str  # the node that carries the batch shell; '' for a job of salloc
    end_s: float | None  # when Slurm ends it (unix seconds); None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What one look at Slurm has shown. `maintenance`: node -> when its next maintenance begins (unix seconds)."""

    job: SlurmJob
    nodes: Mapping[str, Node]
    maintenance: Mapping[str, float] = field(default_factory=dict)
    time_s: float  # unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a node is to be left. `give_back`: whether Slurm waits for it, so that it leaves the allocation."""

    why: str
    give_back: bool


def expand_nodes(text: str) -> tuple[str, ...]:
    """Names in a list such as 'b[0-2,5],login1'. Raises UserError for what it can't read."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        names += _expand(part)
    return tuple(names)


def _expand(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, closed, tail = rest.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        if not closed or not (match := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece)):
            raise UserError(f"Slurm's list of nodes {part!r} can't be read")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [f"{head}{number}{name}" for number in numbers for name in _expand(tail)]


def parse_job(text: str) -> SlurmJob:
    """Of `scontrol -o show job ID`. Raises UserError where the job isn't running, or for text of another kind."""
    fields = _parse_fields(text)
    if fields.get("JobState") != "RUNNING" or "NodeList" not in fields:
        raise UserError(f"the job isn't running: {text.strip()[:200]!r}")
    return SlurmJob(nodes=expand_nodes(fields["NodeList"]), end_s=_parse_time(fields.get("EndTime", "")),
                    batch_host=fields.get("BatchHost", "") if fields.get("BatchFlag") != "0" else "")


def parse_nodes(text: str) -> dict[str, Node]:
    """Of sinfo with NODE_FORMAT, a line for each node (or more, of a node in several partitions)."""
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        if line.count("|") < 2:
            raise UserError(f"sinfo's line {line!r} can't be read")
        name, state, reason = line.split("|", 2)
        word = re.match(r"[A-Za-z_]+", state)
        base = word[0].lower() if word else ""
        nodes[name.strip()] = Node(state=base, flag=state.strip()[len(base):][:1],
                                   reason="" if reason.strip() == "none" else reason.strip())
    return nodes


def parse_maintenance(text: str) -> dict[str, float]:
    """Of `scontrol -o show reservation`: node -> start (unix seconds) of its next maintenance."""
    starts: dict[str, float] = {}
    for line in text.splitlines():
        fields = _parse_fields(line)
        start_s = _parse_time(fields.get("StartTime", ""))
        if "MAINT" not in fields.get("Flags", "").split(",") or start_s is None:
            continue
        for name in expand_nodes(fields.get("Nodes", "").replace("(null)", "")):
            starts[name] = min(start_s, starts.get(name, start_s))
    return starts


def _parse_fields(text: str) -> dict[str, str]:
    """NAME=VALUE pairs, the first of each name: later ones may be a user's comment."""
    fields: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            fields.setdefault(name, value)
    return fields


def _parse_time(text: str) -> float | None:
    """Slurm's local time; None for 'Unknown', 'N/A' and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


class Judge:
    """Which nodes are to be left, from one sighting after the other."""

    def __init__(self, maintenance_lead_s: float = 600.0) -> None:
        self._lead_s = maintenance_lead_s
        self._seen: dict[str, None] = {}  # nodes that were in the allocation, in order
        self._num_unheard: dict[str, int] = {}

    def judge(self, sighting: Sighting) -> dict[str, Trouble]:
        """Nodes that the job should leave now, those that are no longer in its allocation among them."""
        self._seen |= dict.fromkeys(sighting.job.nodes)
        troubles = {name: Trouble(why="no longer in the job's allocation", give_back=True)
                    for name in self._seen if name not in sighting.job.nodes}
        for name in sighting.job.nodes:
            node = sighting.nodes.get(name)
            unheard = node is not None and node.flag == "*"
            self._num_unheard[name] = self._num_unheard.get(name, 0) + 1 if unheard else 0
            if node is not None and node.trouble:
                troubles[name] = Trouble(why=node.trouble, give_back=True)
            elif sighting.maintenance.get(name, float("inf")) - sighting.time_s < self._lead_s:
                minutes = max(0.0, sighting.maintenance[name] - sighting.time_s) / 60
                troubles[name] = Trouble(why=f"in maintenance in {minutes:.0f} min", give_back=True)
            elif self._num_unheard[name] >= _NUM_SIGHTINGS:
                # it may come back: then its processes are spares again
                troubles[name] = Trouble(why=_FLAGS["*"], give_back=False)
        return troubles
