"""Whether a joiner is fit for its slot: its figures against its leaver's, before anything depends on it.

Owns what is compared, and what is too little. Pure: standard library only. Versions are compared at the start of a run
(bringup.py); how figures are measured is in check_measure.py. Every joiner is judged by itself: what several on one
machine take together is not added up.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from migration.errors import UserError
from migration.roster import MovePlan

NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a process has measured of itself. 0: not measured."""

    device: str  # a key of DEFAULTS
    flops: float  # of a matrix multiply, per second
    free_bytes: int  # of the device: what the process could still take when it measured, before it built a job
    used_bytes: int  # of the device: what it has taken
    bytes_per_s: float = 0.0  # over all slots at the start of the run; of a joiner, from its leaver

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The least that is accepted, each as a share of the leaver's figure; of memory, of what the leaver uses."""

    matmul: float
    memory: float
    bandwidth: float


# A rate that is measured beside other processes on the same cores says little; in turns on the same GPU, nothing: of 32
# processes on an H200 one that came late was 140 times as slow as those that had measured together.
DEFAULTS: Mapping[str, Limits] = {
    "GPU": Limits(matmul=0.5, memory=1.0, bandwidth=0.1),
    "shared GPU": Limits(matmul=0.0, memory=1.0, bandwidth=0.0),
    "CPU": Limits(matmul=0.1, memory=1.0, bandwidth=0.01),
}


def parse_limits(text: str, device: str) -> Limits | None:
    """`--accept`: 'none', or NAME=SHARE,... in the place of those of `device`. Raises UserError."""
    if text == NONE:
        return None
    names = [field.name for field in dataclasses.fields(Limits)]
    changed = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            changed[name] = float(value)
        except ValueError:
            changed[name] = -1.0
        if name not in names or not 0 <= changed[name] < float("inf"):
            raise UserError(f"--accept {text}: write it as {'=SHARE,'.join(names)}=SHARE, or some of these, each share "
                            f"at least 0, or as {NONE}")
    return dataclasses.replace(DEFAULTS[device], **changed)


def judge(joiner: Figures, leaver: Figures, limits: Limits) -> str:
    """What is wrong with `joiner`, with figure and limit; empty if it is accepted."""
    wrong = []
    if joiner.device.rpartition(" ")[2] != leaver.device.rpartition(" ")[2]:
        return f"it has a {joiner.device}, its leaver a {leaver.device}"
    if joiner.flops < limits.matmul * leaver.flops:
        wrong.append(f"a matrix multiply runs at {joiner.flops / 1e9:.3g} GFLOP/s, less than {limits.matmul:g} of its "
                     f"leaver's {leaver.flops / 1e9:.3g} (matmul)")
    if joiner.free_bytes < limits.memory * leaver.used_bytes:
        wrong.append(f"{joiner.free_bytes / 1e9:.3g} GB of memory are free, less than {limits.memory:g} of the "
                     f"{leaver.used_bytes / 1e9:.3g} that its leaver uses (memory)")
    if joiner.bytes_per_s < limits.bandwidth * leaver.bytes_per_s:
        wrong.append(f"it gets {joiner.bytes_per_s / 1e9:.3g} GB/s from its leaver, less than {limits.bandwidth:g} of "
                     f"the {leaver.bytes_per_s / 1e9:.3g} that its leaver had among the slots (bandwidth)")
    return "; ".join(wrong)


class Acceptance:
    """Figures of one move, as they come in. `hosts`: of each world rank; `accept`: as `--accept` has it."""

    def __init__(self, plan: MovePlan, hosts: Sequence[str], accept: str) -> None:
        self._plan, self._hosts, self._accept = plan, hosts, accept
        self._figures: dict[int, Figures] = {}

    def take(self, member: int, figures: Figures) -> tuple[str, str]:
        """Of a leaver or a joiner. Returns a line for the log once both of a slot are there, and why the move must not
        go on; both empty otherwise."""
        self._figures[member] = figures
        for a in self._plan.assignments:
            if member in (a.leaver, a.joiner) and {a.leaver, a.joiner} <= self._figures.keys():
                joiner, leaver = self._figures[a.joiner], self._figures[a.leaver]
                limits = parse_limits(self._accept, leaver.device)
                wrong = judge(joiner, leaver, limits) if limits is not None else ""
                who = f"world rank {a.joiner} on {self._hosts[a.joiner]}"
                told = f"{who} for slot {a.slot}: {_text(joiner)}; world rank {a.leaver}, its leaver: {_text(leaver)}"
                return told, wrong and (f"{who} isn't fit for slot {a.slot} of world rank {a.leaver} on "
                                        f"{self._hosts[a.leaver]}: {wrong}; choose another host (HOST->HOST) or lower "
                                        "--accept")
        return "", ""


def _text(figures: Figures) -> str:
    return (f"{figures.flops / 1e9:.3g} GFLOP/s, {figures.free_bytes / 1e9:.3g} GB free, "
            f"{figures.used_bytes / 1e9:.3g} GB used, {figures.bytes_per_s / 1e9:.3g} GB/s")
