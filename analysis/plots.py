"""Draws a run: the time of each iteration, and who did what when in a move.

Owns how the pictures look. Draws into files only, never on a screen.
"""
from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.log import Run, text
from analysis.measures import STARTUP, job_iterations
from analysis.moves import MoveFigures, compute_moves

DPI = 130
MAX_ROWS = 32  # of a Gantt chart; the processes of the move come first
OUTLIER = 2.0  # an iteration this many times the median is cut off at the top, and its time written there
ITERATION_COLOURS = ("#dcdfe3", "#c3c8ce")  # alternating, so that neighbours can be told apart
SPAN_COLOURS = {
    "mpi": "#deebf7", "import": "#9ecae1", "groups": "#4292c6", "open_groups": "#4292c6", "build": "#08519c",
    "connect": "#9e9ac8", "broadcast": "#c994c7", "warm_up": "#fdae6b", "poison": "#843c39",
    "accept": "#a6761d", "measure_pair": "#e6ab02",
    "prepare_groups": "#6a51a3", "prepare_pair": "#bcbddc", "wait_boundary": "#fee391", "drain": "#8c6d31",
    "transfer": "#d62728", "apply": "#ff9896", "digest": "#e377c2", "verdict": "#17becf", "activate": "#2ca02c",
    "close_old": "#7f7f7f",
}
OTHER_COLOURS = ("#bcbd22", "#1f77b4", "#a1d99b", "#c49c94", "#393b79")
# From arrival at the boundary to resumption: it holds the others, so it is left out of the rows
WHOLE = "switchover"
MOVE_COLOUR, PAUSE_COLOUR, RECOVERY_COLOUR = "#b30000", "#d62728", "#54278f"
PREPARING_COLOUR, READY_COLOUR = "#fddf9c", "#fff7e3"


def draw_run(run: Run, folder: Path) -> list[Path]:
    """Draws all pictures of the run into `folder`, and returns their paths. Raises OSError if it can't write there."""
    folder.mkdir(parents=True, exist_ok=True)
    moves = compute_moves(run)
    pictures = []
    if len(run.iterations):
        pictures.append(draw_iteration_times(run, moves, folder / "iteration_times.png"))
    drawn = [move for move in moves if move.spans]
    for move in drawn:
        name = "gantt.png" if len(drawn) == 1 else f"gantt_move{move.move}.png"
        pictures.append(draw_move(run, move, folder / name))
    if not drawn and len(run.spans):
        pictures.append(draw_startup(run, folder / "gantt.png"))
    return pictures


def draw_iteration_times(run: Run, moves: list[MoveFigures], path: Path) -> Path:
    """Time of each iteration: a line a slot, the job-wide maximum, the pause, and where moves were."""
    figure = Figure(figsize=(10, 4.6), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    times = job_iterations(run)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.9, len(run.slots)))
    for slot, colour in zip(run.slots, colours, strict=True):
        series = run.series(slot)
        label = f"slots {run.slots[0]} to {run.slots[-1]}" if slot == run.slots[len(run.slots) // 2] else None
        axes.plot(series["iteration"], series["time_s"], color=colour, linewidth=0.9, alpha=0.8, label=label)
    axes.plot(times["iteration"], times["time_s"], color="black", linewidth=1.5, marker="o", markersize=3,
              label="longest of the slots")
    paused = times["pause_s"] > 0.001 * np.median(times["longest_s"])
    axes.vlines(times["iteration"][paused], times["time_s"][paused], (times["time_s"] + times["pause_s"])[paused],
                color=PAUSE_COLOUR, linewidth=3, label="pause at the boundary before it")
    _mark_moves(run, axes, moves)
    for generation, iteration in run.recoveries.items():
        axes.axvline(iteration - 0.5, color=RECOVERY_COLOUR, linestyle="--", linewidth=1.2)
        axes.annotate(f" recovery: generation {generation}", (iteration - 0.5, 0.06), color=RECOVERY_COLOUR,
                      xycoords=("data", "axes fraction"), fontsize=8.5)
    _limit_times(axes, times)
    axes.set(xlabel="iteration", ylabel="time (s)", xlim=(times["iteration"][0] - 0.5, times["iteration"][-1] + 0.5))
    axes.set_title(f"{run.config.get('profile', '?')}: time per iteration", loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path)
    return path


def _mark_moves(run: Run, axes: Axes, moves: list[MoveFigures]) -> None:
    numbers, first = np.unique(run.iterations["iteration"], return_index=True)
    starts_s = run.iterations["start_s"][first]

    def place(time_s: float) -> float:
        return float(np.interp(time_s, starts_s, numbers)) - 0.5  # an iteration begins half a step before its point

    for number, move in enumerate(move for move in moves if move.preparing is not None):
        end = place(move.end_s) if move.iteration is None else move.iteration - 0.5
        ready = end if move.setup_s is None else min(end, place(move.requested_s + move.setup_s))
        axes.axvspan(place(move.requested_s), ready, color=PREPARING_COLOUR, linewidth=0, zorder=0,
                     label=None if number else "preparing a move")
        axes.axvspan(ready, end, color=READY_COLOUR, linewidth=0, zorder=0,
                     label=None if number else "ready, waits for its iteration")
        committed = move.outcome == "COMMITTED"
        note = f"{move.downtime_s * 1e3:.3g} ms pause" if move.downtime_s is not None else move.outcome.lower()
        axes.axvline(end, color=MOVE_COLOUR, linestyle="-" if committed else ":", linewidth=1.2)
        height = 1.0 - 0.11 * (number % 3)  # neighbours stay readable
        axes.annotate(f" {move.request}\n {note}", (end, height), xycoords=("data", "axes fraction"), va="top",
                      fontsize=8.5, color=MOVE_COLOUR)


def _limit_times(axes: Axes, times: np.ndarray) -> None:
    """Cuts off outliers (the first iteration warms up), and writes their times at the top."""
    median_s = float(np.median(times["longest_s"]))
    usual = times["longest_s"] <= OUTLIER * median_s
    top_s = 1.45 * float(times["longest_s"][usual].max())  # room for the notes of moves
    axes.set_ylim(0, top_s)
    for row in times[times["longest_s"] > top_s]:
        axes.annotate(f"\N{UPWARDS ARROW} {row['longest_s']:.3g} s", (row["iteration"], 0.01 * top_s), fontsize=8,
                      ha="left", annotation_clip=False)


def draw_move(run: Run, move: MoveFigures, path: Path) -> Path:
    """A Gantt chart of one move: a row a process, in seconds since the request, and the switchover in milliseconds."""
    spans = run.spans[(run.spans["move"] == move.move) & (run.spans["name"] != WHOLE.encode())]
    ranks = _choose_rows(run, move)
    switching = spans[spans["phase"] == b"SWITCHING"]
    figure = Figure(figsize=(12, (2 if len(switching) else 1) * (1.2 + 0.32 * len(ranks)) + 1), dpi=DPI,
                    layout="constrained")
    panels = figure.subplots(2 if len(switching) else 1, squeeze=False)[:, 0]
    length_s = move.end_s - move.requested_s
    colours = _choose_colours(spans)
    _draw_rows(panels[0], run, spans, ranks, colours, move.requested_s, 1.0,
               (-0.05 * length_s, 1.05 * length_s))
    panels[0].axvline(0, color=MOVE_COLOUR, linewidth=1)
    panels[0].set_xlabel("time since the request (s)")
    panels[0].set_title(f"move {move.move}: {move.request}, {move.outcome.lower()}"
                        + (f" at iteration {move.iteration}" if move.iteration is not None else ""), loc="left")
    if len(switching):
        # joiners are there long before the others, and wait
        early = np.isin(switching["world_rank"], [joiner for _, _, joiner in move.assignments])
        start_s = float(switching["start_s"][~early if not early.all() else early].min())
        end_s = float(switching["end_s"].max())
        width_ms = 1e3 * (end_s - start_s)
        _draw_rows(panels[1], run, spans, ranks, colours, start_s, 1e3, (-0.25 * width_ms, 1.25 * width_ms))
        panels[1].set_xlabel("time since the first process was at the boundary (ms)")
        downtime = "" if move.downtime_s is None else f", downtime {move.downtime_s * 1e3:.3g} ms"
        panels[1].set_title(f"the switchover{downtime}", loc="left")
        panels[0].axvspan(start_s - move.requested_s, end_s - move.requested_s, color=PAUSE_COLOUR, alpha=0.25)
    _add_legend(figure, colours)
    figure.savefig(path)
    return path


def draw_startup(run: Run, path: Path) -> Path:
    """The Gantt chart of a run without a move: its start-up, in seconds since the first process."""
    spans = run.spans[run.spans["phase"] == STARTUP.encode()]
    spans = spans if len(spans) else run.spans
    ranks = sorted(run.processes)[:MAX_ROWS]
    origin_s = min(process.started_s for process in run.processes.values())
    figure = Figure(figsize=(12, 2.2 + 0.32 * len(ranks)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    colours = _choose_colours(spans)
    length_s = float(spans["end_s"].max()) - origin_s
    _draw_rows(axes, run, spans, ranks, colours, origin_s, 1.0, (0, 1.3 * length_s))
    axes.set_xlabel("time since the first process started (s)")
    axes.set_title("start-up", loc="left")
    _add_legend(figure, colours)
    figure.savefig(path)
    return path


def _choose_rows(run: Run, move: MoveFigures) -> list[int]:
    movers = {rank for _, leaver, joiner in move.assignments for rank in (leaver, joiner)}
    others = [rank for rank in sorted(run.processes) if rank not in movers]
    return sorted([*sorted(movers & run.processes.keys()), *others][:MAX_ROWS])


def _choose_colours(spans: np.ndarray) -> dict[str, str]:
    names = list(dict.fromkeys(text(name) for name in spans["name"]))
    other = [name for name in names if name not in SPAN_COLOURS]
    extra = {name: OTHER_COLOURS[number % len(OTHER_COLOURS)] for number, name in enumerate(other)}
    return {name: SPAN_COLOURS.get(name) or extra[name] for name in names}


def _draw_rows(axes: Axes, run: Run, spans: np.ndarray, ranks: list[int], colours: dict[str, str], origin_s: float,
               scale: float, limits: tuple[float, float]) -> None:
    """A row a process: iterations in grey below, spans over them; those that overlap are drawn one below the other.

    `limits` are in scaled time from `origin_s`.
    """
    for row, rank in enumerate(ranks):
        iterations = run.iterations[run.iterations["world_rank"] == rank]
        for parity, colour in enumerate(ITERATION_COLOURS):
            some = iterations[iterations["iteration"] % 2 == parity]
            bars = np.column_stack([(some["start_s"] - origin_s) * scale, some["time_s"] * scale])
            axes.broken_barh(bars.tolist(), (row - 0.42, 0.84), color=colour, linewidth=0)
        own = spans[spans["world_rank"] == rank]
        bars = np.column_stack([(own["start_s"] - origin_s) * scale, (own["end_s"] - own["start_s"]) * scale])
        for bar, name, (lane, num_lanes) in zip(bars.tolist(), own["name"], _choose_lanes(own), strict=True):
            height = 0.64 / num_lanes
            axes.broken_barh([bar], (row - 0.32 + lane * height, height), color=colours[text(name)], linewidth=0)
    axes.set_yticks(range(len(ranks)), [run.label(rank) for rank in ranks], fontsize=9)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(*limits)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_axisbelow(True)


def _choose_lanes(spans: np.ndarray) -> list[tuple[int, int]]:
    """(lane, number of lanes) of each of one process's spans, sorted by start: those that overlap get one each."""
    places: list[tuple[int, int]] = []
    ends_s: list[float] = []  # of the last span in each lane of the cluster of overlapping spans
    cluster = 0  # its first span
    for number, span in enumerate(spans):
        if ends_s and span["start_s"] >= max(ends_s):
            ends_s, cluster = [], number
        lane = next((lane for lane, end_s in enumerate(ends_s) if end_s <= span["start_s"]), len(ends_s))
        ends_s[lane:lane + 1] = [float(span["end_s"])]
        places[cluster:] = [(place[0], len(ends_s)) for place in places[cluster:]] + [(lane, len(ends_s))]
    return places


def _add_legend(figure: Figure, colours: dict[str, str]) -> None:
    patches = [Patch(color=ITERATION_COLOURS[1], label="training iteration"),
               *(Patch(color=colour, label=name) for name, colour in colours.items())]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(8, len(patches)), frameon=False, fontsize=9)
