"""The parts of bench_gpus.py: whole runs on four virtual hosts, and the sections that they give.

A part gets a `Site` and yields sections; that an undisturbed run serves several parts is looked after here. The runs of
ablation and kill are in gpus_ablation.py and gpus_kill.py.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from analysis import gpus_ablation, gpus_kill
from analysis.ablation import MOST_ITERATIONS, MOST_PARKED, MOST_WHILE_STREAMING, compute_parked
from analysis.bench_parts import EQUAL, Bench
from analysis.flatness import flatness_figures, look_after
from analysis.gpu_moves import Arm, RunFailed, figures_of, inequality
from analysis.gpus_model import Model, choose_model
from analysis.gpus_plan import Layout, Row, Shape, as_settings, build_row
from analysis.log import Run, read_run
from analysis.moves import MoveFigures
from analysis.results import Figure, Section
from nccl_bindings.library import first_version

FEWEST_MOVES = 3  # of b0, b1 and b2
_OF_MOVES = ("setup, request to ready", "downtime", "groups rebuilt", "groups kept", "state, ahead",
             "state, in the pause", "first iteration after the switch, over undisturbed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where all of it runs."""

    bench: Bench
    layout: Layout
    row: Row  # of the first shape; its number of iterations is that of all its runs

    def train(self, name: str, arguments: Iterable[str]) -> Arm:
        """Raises RunFailed."""
        return self.bench.train(name, (*self.layout.launch(), *arguments))

    def small(self, shape: Shape, iterations: int) -> tuple[str, ...]:
        """Arguments of the job of all parts but the ablation."""
        settings = (part for setting in self.layout.rates.settings for part in ("--set", setting))
        return (*shape.settings, *settings, *as_settings(iterations=iterations))

    def alone(self, shape: Shape, iterations: int) -> Run:
        """The small job left alone; run once for all parts."""
        name = f"alone-{shape.name.replace(' ', '')}-{iterations}"
        if (self.bench.runs / name / "result.json").exists():
            return read_run(self.bench.runs / name)
        return self.train(name, self.small(shape, iterations)).run


# ---- the parts


def moves(site: Site) -> Iterable[Section]:
    rates = site.layout.rates
    for shape in site.layout.shapes:
        row = site.row if shape == site.layout.shapes[0] else build_row(
            FEWEST_MOVES, spacing=rates.spacing, settle=rates.settle)
        try:
            yield from _moves_of(site, shape, row)
        except RunFailed as error:  # the other grid is still worth having
            yield site.bench.section(_title(shape), [], problem=str(error))


def _title(shape: Shape) -> str:
    return f"Moves of b0, b1 and b2, {shape.name}"


def _moves_of(site: Site, shape: Shape, row: Row) -> Iterable[Section]:
    alone = site.alone(shape, row.iterations)
    arm = site.train(f"moved-{shape.name.replace(' ', '')}", (*site.small(shape, row.iterations), *row.arguments))
    made = arm.moves(len(row.requests))
    problem = inequality(arm, alone)
    figures = [figure for move in made[:FEWEST_MOVES]
               for figure in figures_of(arm, move, move.request.partition("@")[0]) if figure.name in _OF_MOVES]
    held = "Training waits for each move at its iteration (--hold), so new groups are connected in the pause."
    yield site.bench.section(_title(shape), figures, arm.command, problem=problem,
                             notes=("" if problem else EQUAL, held))
    if row.settled:
        yield _flatness(site, shape, arm, row, made)


def _flatness(site: Site, shape: Shape, arm: Arm, row: Row, made: list[MoveFigures]) -> Section:
    before, after = (look_after(arm.run, arm.samples, made, index) for index in row.settled)
    downtimes_ms = [move.downtime_s * 1e3 for move in made if move.downtime_s is not None]
    figures, grown = flatness_figures(before, after, on_gpu=site.bench.on_gpu,
                                      processes_a_gpu=site.layout.processes_a_gpu)
    downtimes = [Figure(name="downtime, median", value=statistics.median(downtimes_ms), unit="ms"),
                 Figure(name="downtime, longest", value=max(downtimes_ms), unit="ms")]
    return site.bench.section(f"{len(made)} moves in a row, {shape.name}", [*downtimes, *figures], arm.command,
                              problem=grown and f"not flat: {grown}")


def switches(site: Site) -> Iterable[Section]:
    """b1 to b3 once, for each way to make room; the section is there again, with a column more, after each."""
    shape, iterations = site.layout.shapes[0], site.row.iterations
    alone = site.alone(shape, iterations)
    at = 2 * iterations // 3  # a third is left for what is late
    vacate = ("--vacate", f"b1->b3@{at}", "--lead", str(2 * at // 3))
    ways: dict[str, tuple[str, ...]] = {"connected": ("--nccl-switch", "connected")}
    if site.bench.can_park:
        ways["parked"] = ("--nccl-switch", "parked")
    ways["lazy"] = ("--nccl-switch", "lazy", "--allow-lazy")
    figures: list[Figure] = []
    commands, problems = [], []
    for name, options in ways.items():
        try:
            arm = site.train(f"switch-{name}", (*site.small(shape, iterations), *vacate, *options))
            figures += _switch_figures(site, arm, name)
            commands.append(arm.command)
            problems.append(inequality(arm, alone))
        except RunFailed as error:  # the other ways are still worth having
            problems.append(f"{name}: {error}")
        yield site.bench.section(
            f"Making room for new communicators, {shape.name}", figures, *commands,
            problem="; ".join(filter(None, problems)),
            notes=("" if any(problems) else EQUAL, "" if site.bench.can_park else
                   f"Not parked: that takes GPUs and NCCL {first_version('park')}."))


def _switch_figures(site: Site, arm: Arm, name: str) -> list[Figure]:
    """Of the only move, in the column `name`; targets are for processes that have a GPU each."""
    targets = {} if site.layout.processes_a_gpu != 1 else {
        "median of iterations while preparing, over undisturbed": MOST_WHILE_STREAMING,
        **({"downtime over an iteration": MOST_ITERATIONS} if name == "connected" else {})}
    figures = [dataclasses.replace(figure, at_most=targets.get(figure.name))
               for figure in figures_of(arm, arm.only_move(), name)]
    parked = compute_parked([arm.only_move()])
    return figures if parked is None else [*figures, Figure(
        name="downtime over connecting one group and the pause's bytes", value=parked, unit="x", column=name,
        at_most=MOST_PARKED if site.layout.processes_a_gpu == 1 else None)]


def ablation(site: Site) -> Iterable[Section]:
    layout, shape = site.layout, site.layout.shapes[0]
    if layout.num_gpus:
        model = pick_model(layout, site.bench.left_s(580.0), site.bench.args.state_gb)
        return gpus_ablation.ablation(site.bench, layout, model.arguments, model)
    return gpus_ablation.ablation(site.bench, layout, lambda iterations: site.small(shape, iterations), None)


def kill(site: Site) -> Iterable[Section]:
    shape, iterations = site.layout.shapes[0], site.row.iterations
    return gpus_kill.kill(site.bench, site.layout, site.small(shape, iterations), max(4, iterations // 10),
                          lambda: site.alone(shape, iterations))


PARTS: dict[str, Callable[[Site], Iterable[Section]]] = {
    "moves": moves, "ablation": ablation, "switches": switches, "kill": kill}


def pick_model(layout: Layout, seconds: float, state_gb: float) -> Model:
    return choose_model(layout.shapes[0], layout.rates, process_bytes=layout.gpu_bytes // layout.processes_a_gpu,
                        seconds=seconds, least_bytes=int(state_gb * 1e9))
