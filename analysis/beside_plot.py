"""Draws the iterations beside preparations (preparer.py): what each was beside, how long it took, and when."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

DPI = 130
COLOURS = {"undisturbed": "#7f7f7f", "resting": "#fdae6b", "preparing": "#d62728", "closing": "#4292c6",
           "after_join": "#c7c7c7"}
LABELS = {"undisturbed": "undisturbed", "resting": "preparing, in a rest",
          "preparing": "preparing, beside a group's work", "closing": "closing what was prepared",
          "after_join": "first ones, and first after a round"}
OUTLIER_PERCENT = 99.5  # what is longer is drawn at the top edge
WINDOW = 41             # iterations of the running median


def draw_beside(series: Sequence[tuple[str, float, float]], title: str, path: Path) -> Path:
    """`series`: each iteration's (kind, seconds, start in seconds), as of gpu_figures.job_series.

    Returns the path. Raises OSError if it can't write there.
    """
    kinds = np.array([kind for kind, *_ in series])
    milliseconds, starts_s = (np.array([row[column] for row in series]) * scale for column, scale in ((1, 1e3), (2, 1)))
    counted = milliseconds[kinds != "after_join"]
    top = 1.05 * float(np.percentile(counted if len(counted) else milliseconds, OUTLIER_PERCENT))
    figure = Figure(figsize=(10, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for kind, label in LABELS.items():
        some = kinds == kind
        axes.scatter(starts_s[some], np.minimum(milliseconds[some], top), s=5, color=COLOURS[kind],
                     label=f"{label} ({some.sum()})")
    axes.plot(starts_s, _running_median(milliseconds), color="black", linewidth=1.1,
              label=f"running median of {WINDOW}")
    axes.set(xlabel="time (s)", ylabel="iteration (ms)", ylim=(0, top * 1.02))
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _running_median(values: np.ndarray) -> np.ndarray:
    """As long as `values`; its ends repeat the first and the last."""
    half = min(WINDOW, len(values)) // 2
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
