"""Arms: how much of a move is done beside training. Pure. The ablation compares them; `full` is what users run.

A *stop* is a place where membership may change: 2k is the boundary before iteration k, 2k - 1 the cut inside iteration
k - 1, after its gradients are reduced and before the optimizer's step. A move with position k takes effect at one of
the two, by its arm; either way iteration k is the first that runs in the new generation as a whole.
"""
from __future__ import annotations

from dataclasses import dataclass

from migration.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`stops_first`: training stands still from the request on. `warms_up`: a joiner runs an iteration in a sandbox.
    `cuts`: the state streams while training goes on, and the switchover is at the cut."""

    name: str
    stops_first: bool = False
    warms_up: bool = False
    cuts: bool = False

    def stop(self, position: int) -> int:
        """The stop of a move with this position."""
        return 2 * position - self.cuts

    def last_position(self, stop: int) -> int:
        """The last position whose stop is not after `stop`."""
        return (stop + self.cuts) // 2


ARMS = {arm.name: arm for arm in (
    Arm(name="naive", stops_first=True),
    Arm(name="two_stage"),
    Arm(name="two_stage+warmup", warms_up=True),
    Arm(name="full", warms_up=True, cuts=True))}


def get_arms(text: str) -> tuple[str, ...]:
    """Names of arms from `A[,B...]`: moves take them in turn. Raises UserError for an unknown one."""
    names = tuple(text.split(","))
    for name in names:
        if name not in ARMS:
            raise UserError(f"--arm {text}: there is no arm {name!r}; take {', '.join(ARMS)}")
    return names


def boundary(iteration: int) -> int:
    """The stop before `iteration`."""
    return 2 * iteration


def cut(iteration: int) -> int:
    """The stop inside `iteration`, before its optimizer step."""
    return 2 * iteration + 1
