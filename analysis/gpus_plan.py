"""What bench_gpus.py asks of how many GPUs, and how long it should take: layouts, runs, seconds. Pure.

Owns the arguments of the runs and the estimates; the standard library and the pure files of migration only. The seconds
that go into estimates are of two H200s (microbenchmark.md); a part that takes less leaves its rest to those after it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_HOSTS = 4  # three train, one is a spare
HOSTS, HOSTS_SWAPPED = "b0,b1,b2,b3", "b0,b3,b2,b1"  # swapped: where b1's processes were, the spare ones are
# Each host goes to where the one before it was, so that the first three vacate b0, b1 and b2; the spare host is the
# same again after four moves.
_FREE = ("b3", "b0", "b1", "b2")
CYCLE = 4
FEWEST_SETTLED = 2 * CYCLE  # moves: each process has had a slot, and all of a cycle follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A grid of slots, six or three of them, on three hosts."""

    tp: int
    pp: int
    dp: int = 3

    @property
    def name(self) -> str:
        return f"TP{self.tp} PP{self.pp} DP{self.dp}"

    @property
    def settings(self) -> tuple[str, ...]:
        return as_settings(tp=self.tp, pp=self.pp, dp=self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What things take, in seconds and per second of one process. `settings`: the small job of all parts but the
    ablation; `spacing`: its iterations between moves, `settle`: those in which all is closed that a move leaves behind.
    """

    kind: str
    settings: tuple[str, ...]
    imports_s: float      # once for all runs; of a process that shares them with nobody, the same
    start_s: float        # launch to the first iteration, with shared imports
    iteration_s: float    # of the small job
    move_s: float         # of it: request to commit, with --hold
    parked_s: float       # what parking adds
    flops: float          # of bf16 training
    host_bytes_s: float   # between two virtual hosts
    write_bytes_s: float  # of a checkpoint, into the page cache
    read_bytes_s: float   # out of it
    spacing: int = 4
    settle: int = 30


# An H200 for each process: 4.6 s for 1e15 operations, sockets between virtual hosts at 3.6 GB/s (one pair alone), the
# groups that training uses connected in 0.1 to 0.3 s each. Four processes on an H200: 32 s for 96 iterations from the
# launch on, 2.5 s more for each move that is held for, 6 to 8 s for one beside which training goes on.
OWN = Rates(kind="a GPU for every process", settings=(
    "num_layers=2", "hidden_size=2048", "num_attention_heads=16", "seq_length=1024", "num_microbatches=2", "lr=1e-4"),
    imports_s=15.0, start_s=10.0, iteration_s=0.1, move_s=4.5, parked_s=2.0, flops=2.0e14, host_bytes_s=3.0e9,
    write_bytes_s=0.7e9, read_bytes_s=1.5e9)
SHARED = Rates(kind="several processes a GPU", settings=(), imports_s=20.0, start_s=12.0, iteration_s=0.22, move_s=5.0,
               parked_s=2.0, flops=0.5e14, host_bytes_s=0.8e9, write_bytes_s=0.5e9, read_bytes_s=1e9)
CPU = Rates(kind="no GPU", settings=("num_microbatches=1",), imports_s=15.0, start_s=5.0, iteration_s=0.2, move_s=1.5,
            parked_s=0.0, flops=1e10, host_bytes_s=1e8, write_bytes_s=1e8, read_bytes_s=1e8, settle=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Four virtual hosts on this machine. `gpu_bytes`: memory of one GPU that is free; 0 on a CPU. `share`: of the
    time, what preparing and closing may take (--prepare-share)."""

    num_gpus: int
    gpu_bytes: int
    per_host: int  # processes
    shapes: tuple[Shape, ...]
    rates: Rates
    share: str

    @property
    def num_processes(self) -> int:
        return NUM_HOSTS * self.per_host

    @property
    def processes_a_gpu(self) -> int:
        """Of the fullest one; 0 on a CPU."""
        return -(-self.num_processes // self.num_gpus) if self.num_gpus else 0

    def launch(self, hosts: str = HOSTS) -> tuple[str, ...]:
        """Arguments of every run."""
        return ("--np", str(self.num_processes), "--hosts", hosts, "--prepare-share", self.share, "--no-report")

    def describe(self) -> str:
        gpus = f"{self.num_gpus} GPUs with {self.gpu_bytes / 2**30:.0f} GiB free" if self.num_gpus else "no GPU"
        return (f"{gpus}: {NUM_HOSTS} virtual hosts of {self.per_host}, {self.rates.kind}; "
                + " and ".join(shape.name for shape in self.shapes))


def build_layout(num_gpus: int, gpu_bytes: int, share: str = "1") -> Layout:
    """From eight GPUs on, two for each virtual host; from four on, one; fewer are shared by eight processes."""
    own = num_gpus >= NUM_HOSTS
    per_host = 1 if own and num_gpus < 2 * NUM_HOSTS else 2
    shapes = (Shape(tp=1, pp=1),) if per_host == 1 else (Shape(tp=2, pp=1), Shape(tp=1, pp=2))
    return Layout(num_gpus=min(num_gpus, NUM_HOSTS * per_host), gpu_bytes=gpu_bytes, per_host=per_host, shapes=shapes,
                  share=share, rates=OWN if own else SHARED if num_gpus else CPU)


def as_settings(**fields: object) -> tuple[str, ...]:
    """Arguments that set fields of the config."""
    return tuple(part for name, value in fields.items() for part in ("--set", f"{name}={value}"))


# ---- moves in a row

@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Moves in a row, each held for. `settled`: indices of the two moves after which there is time for all to be
    closed, or none."""

    requests: tuple[str, ...]
    iterations: int
    settled: tuple[int, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        asked = (part for request in self.requests for part in ("--vacate", request))
        return (*asked, "--hold", "--lead", "1")


def build_row(num_moves: int, *, spacing: int, settle: int) -> Row:
    """Moves every `spacing` iterations, and `settle` more after the last one, and after the one a cycle before it:
    then the same host is the spare one. Of too few moves nothing is compared."""
    settled = (num_moves - 1 - CYCLE, num_moves - 1) if num_moves >= FEWEST_SETTLED else ()
    requests, iteration = [], 0
    for index in range(num_moves):
        iteration += spacing + (settle if index - 1 in settled else 0)
        requests.append(f"{_FREE[(index + 1) % CYCLE]}->{_FREE[index % CYCLE]}@{iteration}")
    return Row(requests=tuple(requests), iterations=iteration + spacing + settle * bool(settled), settled=settled)


# ---- parts and seconds

@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of a part. `answers`: what it shows, in words; `seconds`: how long it should take."""

    name: str
    answers: str
    seconds: float


def build_estimates(layout: Layout, *, num_moves: int, ablation: str, ablation_s: float,
                    can_park: bool) -> list[Estimate]:
    """All parts, the most important first. `ablation`: its model in words, `ablation_s`: its seconds."""
    rates = layout.rates
    row = build_row(num_moves, spacing=rates.spacing, settle=rates.settle)
    short = build_row(3, spacing=rates.spacing, settle=rates.settle)
    alone_s = rates.start_s + row.iterations * rates.iteration_s
    other_s = 2 * (rates.start_s + short.iterations * rates.iteration_s) + 3 * rates.move_s
    names = " and ".join(shape.name for shape in layout.shapes)
    switches = "connected, parked, lazy" if can_park else "connected, lazy (parking isn't possible)"
    num_runs = 3 if can_park else 2
    return [
        Estimate(name="moves", seconds=2 * alone_s + num_moves * rates.move_s + other_s * (len(layout.shapes) - 1),
                 answers=f"moves of b0, b1, b2 against the same job left alone, bit for bit, {names}; {num_moves} "
                         f"moves in a row ({layout.shapes[0].name}): memory, descriptors, threads, groups"),
        Estimate(name="ablation", seconds=ablation_s,
                 answers=f"all arms in one job, and a save and restart of it: {ablation}"),
        Estimate(name="switches", seconds=num_runs * (alone_s + rates.move_s) + rates.parked_s * can_park,
                 answers=f"b1 to b3, old communicators {switches}: downtime, memory by phase, slowdown meanwhile"),
        Estimate(name="kill", seconds=alone_s + 2 * rates.move_s + 10.0,
                 answers="SIGKILL to a slot's process: detection and recovery"),
    ]


def share_s(name: str, estimates: Sequence[Estimate], left_s: float) -> float:
    """Of the time that is left, what `name` may take: as much of it as its part of what it and those after it need."""
    rest = estimates[[each.name for each in estimates].index(name):]
    return left_s * rest[0].seconds / sum(each.seconds for each in rest)


def format_plan(layout: Layout, estimates: Sequence[Estimate], box_s: float) -> str:
    """A line for each part."""
    lines = [layout.describe(), f"  {'(start)':10s} {layout.rates.imports_s:5.0f} s  imports, once for all runs"]
    lines += [f"  {each.name:10s} {each.seconds:5.0f} s  {each.answers}" for each in estimates]
    total_s = layout.rates.imports_s + sum(each.seconds for each in estimates)
    fits = "" if total_s <= box_s else ": too long, so each part gets its share of the box, and may not end in it"
    return "\n".join([*lines, f"  {'sum':10s} {total_s:5.0f} s  of {box_s:.0f} s{fits}"])
