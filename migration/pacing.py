"""How long threads beside training rest between two groups, so that training hardly feels them. Pure.

Preparing a group takes something from training: on GPUs NCCL synchronises the device, by which an iteration or two get
longer. One group after the other would keep every iteration from full speed. With a rest after each, most iterations
meet none; what is lost in all stays the same, and the move is ready later.
"""
from __future__ import annotations

from migration.errors import UserError

AUTO = "auto"
SHARES = {"cuda": 0.05, "cpu": 1.0}  # measured: LOG.md
MOST_CLOSE_PAUSE_S = 2.0  # a peer waits for it in the next close, and a host that is given back until all are closed


def parse_share(text: str) -> float | None:
    """Of the time, what preparing may take; None: by the device. Raises UserError if it is no share."""
    if text == AUTO:
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--prepare-share {text}: must be {AUTO}, or above 0 and at most 1 (1: no rest)")
    return share


def choose_share(wanted: float | None, device: str) -> float:
    """`device` is torch's type of device."""
    return SHARES[device] if wanted is None else wanted


def all_rests_s(deadline_s: float, training_left_s: float) -> float:
    """How long from the start of a preparation its members may rest, whatever they wait for in between.

    One end for all, however their groups depend on each other: the half before it is for being polite, the other half
    is enough for a move that isn't. So neither the deadline nor the end of training makes a move fail that rested.
    """
    return min(deadline_s, training_left_s) / 2


def rest_s(work_s: float, share: float, left_s: float, num_left: int) -> float:
    """After a group that took `work_s` of work, with `num_left` to come; rests must be over in `left_s`.

    Nothing after the last one: nothing comes that it would keep away from training.
    """
    if num_left == 0:
        return 0.0
    return max(0.0, min(_full_rest_s(work_s, share), left_s / num_left))


def close_pause_s(last_s: float, share: float, least_s: float) -> float:
    """Before a communicator is closed, after one that took `last_s`."""
    return max(least_s, min(_full_rest_s(last_s, share), MOST_CLOSE_PAUSE_S))


def _full_rest_s(work_s: float, share: float) -> float:
    return work_s * (1 / share - 1)
