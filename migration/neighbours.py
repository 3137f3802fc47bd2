"""Which of a machine's processes have died, as those beside them see it: within a heartbeat, where silence takes long.

Each process looks at the next few of its machine, in a ring, by pid and start time. One that can't be seen from here to
begin with (a container with pids of its own) is left to the heartbeats; so is a machine that is gone as a whole.
"""
from __future__ import annotations

from collections.abc import Sequence

from migration.footprint import Footprint, is_alive, read_footprint

_NUM_WATCHED = 4


class Neighbours:
    """Of one process; made when all processes of the world have left their footprints."""

    def __init__(self, run: str, world_rank: int, machines: Sequence[str]) -> None:
        """`machines`: of each world rank."""
        here = [rank for rank, machine in enumerate(machines) if machine == machines[world_rank]]
        at = here.index(world_rank)
        self._watched: dict[int, Footprint] = {}
        for rank in [*here[at + 1:], *here[:at]][:_NUM_WATCHED]:
            footprint = read_footprint(run, rank)
            if footprint is not None and is_alive(footprint):
                self._watched[rank] = footprint

    def gone(self) -> list[int]:
        """World ranks of those that have ended, for whatever reason."""
        return [rank for rank, footprint in self._watched.items() if not is_alive(footprint)]
