"""The preflight's answer: measured rows in; a table, and what is wrong in words, out.

Owns what counts as wrong. Pure: standard library only. Must not know how anything was measured, nor of processes that
run. Bus bandwidth is that of NVIDIA's nccl-tests: an all-reduce of S bytes over n members in t seconds has
2 (n - 1) / n * S / t, which doesn't depend on n where every member's link is the bottleneck.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from migration.config import Config
from migration.errors import UserError
from migration.plan import initial_roster
from migration.sizes import format_bytes, gradient_buffer_bytes, slot_state_bytes

SLOW_SHARE = 0.5  # of the median; below it a process or a group is named
_NUM_DIGEST_DIGITS = 12  # shown of one


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process. None where it wasn't measured."""

    world_rank: int
    host: str
    machine: str
    versions: Mapping[str, str]
    data: str  # digest; empty where the data can't be read
    data_problem: str = ""
    device: str = ""
    gpu: int | None = None  # index on its machine; None on the CPU
    free_bytes: int | None = None  # of the GPU, or of the machine
    latency_s: float | None = None  # median round trip of a record from world rank 0 and back
    flops: float | None = None  # of a matrix multiply, per second


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """An all-reduce of `num_bytes` over `world_ranks`, the best of several."""

    kind: str
    world_ranks: tuple[int, ...]
    num_bytes: int
    time_s: float

    @property
    def bus_bytes_per_s(self) -> float:
        num = len(self.world_ranks)
        return 2 * (num - 1) / num * self.num_bytes / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that the preflight found out. `failures`: what went wrong on the way, in words."""

    config: Config
    processes: tuple[ProcessRow, ...]  # by world rank
    groups: tuple[GroupRow, ...]
    failures: tuple[str, ...] = ()
    seconds: float = 0.0


# ---- what is wrong

def find_problems(measured: Measured) -> list[str]:
    """One line each; empty if nothing is wrong."""
    return [*measured.failures, *_differing(measured), *_slow_processes(measured), *_slow_groups(measured),
            *_short_of_memory(measured), *_short_of_processes(measured)]


def slow_processes(processes: Iterable[ProcessRow]) -> list[ProcessRow]:
    """Those whose matrix multiply is slower than half the median."""
    rated = [p for p in processes if p.flops is not None]
    limit = SLOW_SHARE * median([p.flops for p in rated]) if rated else 0.0
    return [p for p in rated if p.flops < limit]


def slow_groups(groups: Sequence[GroupRow]) -> list[GroupRow]:
    """Those with less than half the median bandwidth of their kind."""
    medians = {kind: median([g.bus_bytes_per_s for g in groups if g.kind == kind]) for kind in {g.kind for g in groups}}
    return [g for g in groups if g.bus_bytes_per_s < SLOW_SHARE * medians[g.kind]]


def _differing(measured: Measured) -> list[str]:
    """Software and data are compared with the most common ones; the first one's, where others are as common."""
    names = dict.fromkeys(name for p in measured.processes for name in p.versions)
    found = []
    for name in names:
        known = [p for p in measured.processes if name in p.versions]
        found += _others(known, lambda p: p.versions[name], name, "install the same everywhere")
    unread: dict[str, list[ProcessRow]] = {}
    for p in measured.processes:
        if p.data_problem:
            unread.setdefault(p.data_problem, []).append(p)
    found += [f"{_where(rows)} can't read the data: {problem}" for problem, rows in unread.items()]
    return found + _others([p for p in measured.processes if not p.data_problem], lambda p: p.data, "data",
                           "give --data a path that is the same file everywhere")


def _others(rows: Sequence[ProcessRow], value: Callable[[ProcessRow], str], name: str, advice: str) -> list[str]:
    if not rows:
        return []
    usual = Counter(map(value, rows)).most_common(1)[0][0]
    model = next(p for p in rows if value(p) == usual)
    others = {found: [p for p in rows if value(p) == found] for found in dict.fromkeys(map(value, rows))}
    return [f"{_where(which)} has {name} {_shorten(found)}, {_where([model])} has {_shorten(usual)}: {advice}"
            for found, which in others.items() if found != usual]


def _slow_processes(measured: Measured) -> list[str]:
    rates = [p.flops for p in measured.processes if p.flops is not None]
    return [f"{_where([p])}: a matrix multiply runs at {p.flops / 1e9:.1f} GFLOP/s, less than half of the median "
            f"{median(rates) / 1e9:.1f}: look for other work or a throttled device there"
            for p in slow_processes(measured.processes)]


def _slow_groups(measured: Measured) -> list[str]:
    found = []
    for g in slow_groups(measured.groups):
        rates = [other.bus_bytes_per_s for other in measured.groups if other.kind == g.kind]
        members = [measured.processes[r] for r in g.world_ranks]
        found.append(f"{_where(members)}: an all-reduce ({g.kind}) has {_rate(g.bus_bytes_per_s)} GB/s, less than half "
                     f"of the median {_rate(median(rates))} of {len(rates)} such groups: look at the network there")
    return found


def needed_bytes(config: Config, slot: int | None) -> int:
    """State and gradient buffer of a slot's process; a spare may have to take the largest slot."""
    slots = range(config.job_size) if slot is None else (slot,)
    return max(slot_state_bytes(config, s).total + gradient_buffer_bytes(config, s) for s in slots)


def _short_of_memory(measured: Measured) -> list[str]:
    sharing: dict[tuple[str, int | None], list[ProcessRow]] = {}
    for p in measured.processes:
        if p.free_bytes is not None:
            sharing.setdefault((p.machine, p.gpu), []).append(p)
    found = []
    for (machine, gpu), rows in sharing.items():
        needed = sum(needed_bytes(measured.config, _slot(measured, p)) for p in rows)
        free = min(p.free_bytes for p in rows)
        if needed > free:
            place = f"machine {machine}" if gpu is None else f"GPU {gpu} of machine {machine}"
            found.append(f"{place}: {format_bytes(free)} free, but state and gradients of {measured.config.profile} "
                         f"take {format_bytes(needed)} in {_where(rows)}, activations not counted: free some, spread "
                         "the processes, or take a smaller profile")
    return found


def _short_of_processes(measured: Measured) -> list[str]:
    try:
        roster = initial_roster(tuple(p.host for p in measured.processes), measured.config)
    except UserError as error:
        return [str(error)]
    short: dict[tuple[int, int], list[str]] = {}
    for host in roster.host_names():
        num_needed, num_free = len(roster.slots_on(host)), sum(roster.hosts[r] != host for r in roster.spares())
        if num_needed > num_free:
            short.setdefault((num_needed, num_free), []).append(host)
    return [f"host {', '.join(hosts)} can't be vacated: for its {num_needed} slots there are {num_free} spare "
            "processes on other hosts: start more processes" for (num_needed, num_free), hosts in short.items()]


def _slot(measured: Measured, process: ProcessRow) -> int | None:
    """The first world ranks take the slots in order."""
    return process.world_rank if process.world_rank < measured.config.job_size else None


def _where(rows: Sequence[ProcessRow]) -> str:
    hosts, ranks = ", ".join(dict.fromkeys(p.host for p in rows)), ", ".join(str(p.world_rank) for p in rows)
    return f"host {hosts} (world rank{'s' * (len(rows) > 1)} {ranks})"


def _shorten(value: str) -> str:
    is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
    return value[:_NUM_DIGEST_DIGITS] if is_digest else value or "(none)"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"


# ---- the table

def report_text(measured: Measured) -> str:
    """The whole report, several lines, without a newline at its end."""
    config, problems = measured.config, find_problems(measured)
    num_hosts = len({p.host for p in measured.processes})
    versions = measured.processes[0].versions
    shown = [f"{name} {_shorten(value)}" for name, value in versions.items()]
    lines = [f"preflight for {config.profile} (TP{config.tp} x PP{config.pp} x DP{config.dp}, {config.job_size} "
             f"slots); processes: {len(measured.processes)}, hosts: {num_hosts}; took {measured.seconds:.1f} s",
             "world rank 0 has: " + ", ".join(shown), ""]
    lines += _process_table(measured)
    if measured.groups:
        lines += ["", *_group_table(measured.groups)]
    lines += ["", f"{len(problems)} thing{'s' * (len(problems) != 1)} wrong:" if problems else "nothing is wrong"]
    return "\n".join(lines + [f"  - {problem}" for problem in problems])


def _process_table(measured: Measured) -> list[str]:
    rows = [("rank", "host", "machine", "slot", "device", "free", "needed", "round trip", "matmul")]
    for p in measured.processes:
        slot = _slot(measured, p)
        rows.append((str(p.world_rank), p.host, p.machine, "spare" if slot is None else str(slot), p.device or "-",
                     "-" if p.free_bytes is None else format_bytes(p.free_bytes),
                     format_bytes(needed_bytes(measured.config, slot)),
                     "-" if p.latency_s is None else f"{p.latency_s * 1e3:.2f} ms",
                     "-" if p.flops is None else f"{p.flops / 1e9:.1f} GFLOP/s"))
    return _align(rows, right=(0, 3, 5, 6, 7, 8))


def _group_table(groups: Sequence[GroupRow]) -> list[str]:
    rows = [("all-reduce over", "groups", "members", "size", "time", "GB/s", "bus GB/s", "slowest", "world ranks")]
    for kind in dict.fromkeys(g.kind for g in groups):
        same = [g for g in groups if g.kind == kind]
        worst = min(same, key=lambda g: g.bus_bytes_per_s)
        sizes = sorted({len(g.world_ranks) for g in same})
        rows.append((kind, str(len(same)), "-".join(map(str, sizes)), format_bytes(worst.num_bytes),
                     f"{median(g.time_s for g in same) * 1e3:.2f} ms",
                     _rate(median(g.num_bytes / g.time_s for g in same)),
                     _rate(median(g.bus_bytes_per_s for g in same)), _rate(worst.bus_bytes_per_s),
                     _ranks(worst.world_ranks)))
    return [*_align(rows, right=(1, 2, 3, 4, 5, 6, 7)),
            "medians over the groups of a kind; bus GB/s = 2 (n - 1) / n * size / time, n members"]


def _ranks(world_ranks: Sequence[int]) -> str:
    shown = " ".join(map(str, world_ranks[:8]))
    return shown if len(world_ranks) <= 8 else f"{shown} ... {world_ranks[-1]}"


def _align(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                      for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
