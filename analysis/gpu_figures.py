"""Figures of what ranks measured by themselves (gpu_bodies.py, prepare_beside.py), and their targets. NumPy only."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.results import Figure

# What an iteration is beside preparer.py's thread, the worst last: it is what it was on the worst rank. "resting" is
# one that lay in a rest between two groups, "preparing" any other beside a preparation.
KINDS = ("undisturbed", "closing", "resting", "preparing", "after_join")
LEAST_WINDOW = 20  # undisturbed iterations in a row that are looked at by themselves
MIB = 1 << 20
MEDIAN_AT_MOST, P95_AT_MOST = 1.03, 1.15  # iterations while preparing, over undisturbed ones
ROUND_FIGURES = {  # of the rows of rounds
    "prepare_s": "preparation of a round's groups", "rests_s": "rests in it", "work_s": "work of a group in it",
    "close_s": "closing a round's groups", "close_group_close_s": "closing a group",
    "close_group_resume_s": "resuming it to be closed"}
PARKED_MIB_AT_MOST = 4.0                  # a group
STATE_AT_LEAST, HOST_AT_MOST = 0.8, 1.1
# What may come and go without anything having been left behind.
DEVICE_SLACK_MIB, THREAD_SLACK, FD_SLACK = 16, 1, 2


def host_cost_figures(costs: Sequence[dict[str, Any]], *, bound: bool) -> list[Figure]:
    """Of wrapper_cost's rows. `bound`: whether the target is judged; on the CPU a call waits for its peer too."""
    figures = []
    for cost in costs:
        name = cost["collective"]
        figures += [Figure(name=f"{name}, stock", value=cost["bare_us"], unit="us"),
                    Figure(name=f"{name}, ours", value=cost["handle_us"], unit="us"),
                    Figure(name=f"{name}, ours over stock", value=cost["handle_us"] / cost["bare_us"], unit="x",
                           at_most=HOST_AT_MOST if bound and name != "barrier" else None)]
    return figures


def state_figures(rows: Sequence[dict[str, Any]], *, bound: bool) -> list[Figure]:
    """Of what the leaver and the joiner returned; the joiner knows when everything is there."""
    joiner = rows[1]
    state, bare = (joiner["bytes"] / joiner[f"{which}_s"] / 1e9 for which in ("state", "bare"))
    return [Figure(name="state of a slot", value=joiner["bytes"] / 1e9, unit="GB"),
            Figure(name="tensors", value=joiner["num_tensors"]),
            Figure(name="state, with its words", value=state, unit="GB/s"),
            Figure(name="bare send and receive of as many bytes", value=bare, unit="GB/s"),
            Figure(name="state over bare", value=state / bare, unit="x",
                   at_least=STATE_AT_LEAST if bound else None)]


def beside_figures(rows: Sequence[dict[str, Any]], *, bound: bool, parked: bool) -> tuple[list[Figure], str]:
    """Of what the ranks returned: (figures, what is wrong; empty if nothing).

    `bound`: whether slowdown and memory are judged, which they are where every rank has a GPU of its own.
    """
    times = job_times(rows)
    working, times["preparing"] = times["preparing"], np.concatenate([times["preparing"], times["resting"]])
    figures, ratios = _iteration_figures(times) + _part_figures(rows, working, times), {}
    for kind in ("preparing", "closing"):
        for name, percent in (("median", 50), ("p95", 95)):
            both = times[kind], times["undisturbed"]
            ratios[kind, name] = (float(np.percentile(both[0], percent) / np.percentile(both[1], percent))
                                  if all(map(len, both)) else None)
    limits = {"median": MEDIAN_AT_MOST, "p95": P95_AT_MOST}
    figures += [Figure(name=f"{name} of iterations while {kind}, over undisturbed", value=ratio, unit="x",
                       at_most=limits[name] if bound and kind == "preparing" else None)
                for (kind, name), ratio in ratios.items()]
    rounds = [row for rank in rows for row in rank["rounds"]]
    num_groups = rows[0]["num_groups"]
    for name, what in ROUND_FIGURES.items():
        seconds = [row[name] for row in rounds if name in row]
        if not seconds:
            continue  # Gloo closes in one go
        figures += [Figure(name=f"{what}, median", value=float(np.median(seconds)), unit="s"),
                    Figure(name=f"{what}, longest", value=max(seconds), unit="s")]
    figures += _memory_figures(rows, num_groups, PARKED_MIB_AT_MOST if bound and parked else None)
    grown = _growth(rows)
    figures += [Figure(name=f"{name.replace('_', ' ')} grown from a quarter of the rounds to the end", value=value)
                for name, value in grown.items()]
    return figures, "; ".join(filter(None, (_inequality(rows), _leak(grown, len(rows)))))


def _memory_figures(rows: Sequence[dict[str, Any]], num_groups: int, at_most: float | None) -> list[Figure]:
    """Of a process's first preparation, in which CUDA also takes memory for more streams at once than there ever were,
    about 1 MiB a group, and keeps it; and of those after it, which are what communicators take."""
    per_group = [[row["device_bytes"] / num_groups / MIB for row in rank["rounds"]] for rank in rows]
    if not all(per_group):
        return []
    later = [value for values in per_group for value in values[1:]]
    figures = [Figure(name="stage 1, device memory a group, first preparation",
                      value=max(values[0] for values in per_group), unit="MiB", at_most=None if later else at_most)]
    if later:
        figures.append(Figure(name="stage 1, device memory a group, later ones, median",
                              value=float(np.median(later)), unit="MiB", at_most=at_most))
    return figures


def job_times(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Seconds of each kind of iteration, job-wide."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, seconds, _ in job_series(rows):
        found[kind].append(seconds)
    return {kind: np.array(seconds) for kind, seconds in found.items()}


def job_series(rows: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Each iteration's (kind, seconds, start): the worst kind of any rank's, the longest, and rank 0's."""
    return [(max((kind for kind, *_ in same), key=KINDS.index), max(seconds for _, seconds, _ in same), same[0][2])
            for same in zip(*(row["iterations"] for row in rows), strict=True)]


def _part_figures(rows: Sequence[dict[str, Any]], working: np.ndarray, times: dict[str, np.ndarray]) -> list[Figure]:
    """What tells a disturbance from a machine that isn't even: rests beside work, undisturbed windows by themselves.

    `working`: seconds of iterations beside a group's work.
    """
    figures = [Figure(name=f"preparing, beside {what}, median of {len(some)}", value=float(np.median(some)) * 1e3,
                      unit="ms")
               for what, some in (("a group's work", working), ("rests", times["resting"])) if len(some)]
    in_a_row = [[seconds for _, seconds, _ in window] for kind, window
                in itertools.groupby(job_series(rows), key=lambda iteration: iteration[0]) if kind == "undisturbed"]
    medians = [float(np.median(seconds)) * 1e3 for seconds in in_a_row if len(seconds) >= LEAST_WINDOW]
    if len(medians) > 1:
        figures += [Figure(name=f"undisturbed, median of a window, {name} of {len(medians)}", value=value, unit="ms")
                    for name, value in (("shortest", min(medians)), ("longest", max(medians)))]
    return figures


def _iteration_figures(times: dict[str, np.ndarray]) -> list[Figure]:
    figures = []
    for kind in ("undisturbed", "preparing", "closing"):
        some = times[kind] * 1e3
        figures += [Figure(name=f"{kind} iterations", value=len(some)),
                    Figure(name=f"{kind}, median", value=float(np.median(some)) if len(some) else None, unit="ms"),
                    Figure(name=f"{kind}, p95", value=float(np.percentile(some, 95)) if len(some) else None,
                           unit="ms")]
    return figures


def _growth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each resource, the most of a rank."""
    early = len(rows[0]["resources"]) // 4
    return {name: max(row["resources"][-1][name] - row["resources"][early][name] for row in rows)
            for name in rows[0]["resources"][0]}


def _leak(grown: dict[str, float], num_ranks: int) -> str:
    slack = {"device_mib": DEVICE_SLACK_MIB * num_ranks, "threads": THREAD_SLACK, "fds": FD_SLACK}
    return "; ".join(f"{name} grew by {grown[name]:g}" for name, most in slack.items() if grown[name] > most)


def _inequality(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"rank {rank} differs from the job left alone: {row['differs']}"
                     for rank, row in enumerate(rows) if row["differs"])
