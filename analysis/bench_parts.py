"""What the GPU benchmarks share: a time box, parts that don't lose each other, results written after each.

Owns what every part needs to know (`Bench`) and the order of events; a part is a function that yields sections. Knows
nothing of what is measured.
"""
from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.gpu_moves import Arm, Beside, RunFailed, run_arm
from analysis.machine import Machine, ask_machine
from analysis.results import Figure, Section, build_markdown, read_sections, replace_section, write_sections
from migration.errors import UserError
from migration.placement import DEFAULTS
from migration.versions import CODE_ROOT

EQUAL = "Losses, gradient norms and final digests equal those of the same job left alone, bit for bit."
_FAILED = "Part %s, which failed"
_LEAST_S = 5.0  # nothing is begun with less


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every part needs to know."""

    args: argparse.Namespace
    machine: Machine
    runs: Path     # where run folders go
    out: Path      # where results go
    ends_s: float  # of the time box, monotonic

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.gpus)

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    @property
    def can_park(self) -> bool:
        return self.machine.can_park

    @property
    def environment(self) -> dict[str, str]:
        """Of ranks: what a run's processes set for themselves must stand before CUDA starts."""
        set_here = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
        return set_here if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}

    def left_s(self, at_most_s: float) -> float:
        """Raises RunFailed when the time box is used up."""
        left_s = min(self.ends_s - time.monotonic(), at_most_s)
        if left_s < _LEAST_S:
            raise RunFailed(f"no time left in the box of {self.args.time_box:g} s")
        return left_s

    def train(self, name: str, arguments: Iterable[str], *, environment: Mapping[str, str] | None = None,
              at_most_s: float = 580.0, beside: Beside | None = None) -> Arm:
        """A run of the harness in the folder `name`; `beside`: see run_arm. Raises RunFailed."""
        settings = [part for setting in self.args.settings for part in ("--set", setting)]
        return run_arm(self.runs / name, [*arguments, *settings], on_gpu=self.on_gpu, beside=beside,
                       environment={**self.environment, **(environment or {})}, timeout_s=self.left_s(at_most_s))

    def section(self, title: str, figures: Iterable[Figure], *commands: str, problem: str = "",
                notes: Iterable[str] = ()) -> Section:
        title += f" (NCCL {self.machine.nccl})" if self.on_gpu else ""
        return Section(title=title, machine=self.machine.describe(), figures=tuple(figures), commands=commands,
                       notes=tuple(filter(None, notes)), problem=problem)


Part = Callable[[Bench], Iterable[Section]]


def open_bench(args: argparse.Namespace) -> Bench:
    """The time box starts now. `args` has device, time_box, out, runs and settings."""
    ends_s = time.monotonic() + args.time_box
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = ask_machine()
    return Bench(args=args, machine=machine, ends_s=ends_s,
                 out=args.out or CODE_ROOT / ("analysis/results" if machine.gpus else "build/results"),
                 runs=Path(args.runs or tempfile.mkdtemp(prefix="bench-gpu-")))


def run_parts(stem: str, bench: Bench, parts: Mapping[str, Part],
              box: Callable[[Bench, str], Bench] = lambda bench, name: bench) -> int:
    """All parts, one after the other, each in what `box` makes of the bench for it; returns the exit code.

    Results go to stem.json and stem.md in bench.out, after each section, in place of those with the same titles.
    """
    sections = read_sections(bench.out / f"{stem}.json")
    new: list[Section] = []
    for name, part in parts.items():
        sections = [section for section in sections if not section.title.startswith(_FAILED % name)]  # of older calls
        print(f"{stem}: part {name}; {bench.ends_s - time.monotonic():.0f} s of {bench.args.time_box:g} s are left",
              flush=True)
        for section in _run_part(box(bench, name), name, part):
            new = replace_section(new, section)
            sections = replace_section(sections, section)
            write_sections(bench.out, stem, sections)
            print(f"{stem}: {section.title}: {(section.problem or 'done').splitlines()[0]}", flush=True)
    print(build_markdown(new))
    print(f"written to {bench.out / f'{stem}.json'} and {bench.out / f'{stem}.md'}; runs are in {bench.runs}")
    return 1 if any(section.problem for section in new) else 0


def _run_part(bench: Bench, name: str, part: Part) -> Iterator[Section]:
    """The sections of a part; where it fails, the last one says why, and the other parts go on."""
    try:
        yield from part(bench)
    except (RunFailed, UserError, AssertionError) as error:  # what a run, its log or a rank that failed raises
        yield bench.section(_FAILED % name, [], problem=str(error))
    except Exception as error:  # a mistake of ours: told in full, and no reason to lose the other parts
        traceback.print_exc()
        yield bench.section(_FAILED % name, [], problem=f"{type(error).__name__}: {error}")


def add_arguments(parser: argparse.ArgumentParser, parts: Iterable[str], stem: str, *, time_box_s: float,
                  default: str) -> None:
    """What every such benchmark takes. `default`: which parts are run where none are named."""
    parser.add_argument("--parts", type=names_of(parts), help=f"comma-separated (default: {default})")
    parser.add_argument("--out", type=Path, help=f"folder of {stem}.json and .md (default: analysis/results, or "
                        "build/results without a GPU)")
    parser.add_argument("--runs", help="folder for the run folders (default: a temporary one)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--time-box", type=positive, default=time_box_s, metavar="S", help="for all (default: "
                        "%(default)g)")


def positive(value: str) -> float:
    """A type for argparse."""
    number = float(value)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} must be above 0")
    return number


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of `known`, comma-separated, in the order of `known`."""
    known = list(known)

    def read(value: str) -> list[str]:
        names = value.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; take some of {', '.join(known)}")
        return [name for name in known if name in names]

    return read
