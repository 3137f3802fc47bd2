"""Hosts that are to be left: how far each of them is, and what is to be done next. Pure: no Slurm, no clock, no MPI.

    LEAVING -> ENDING -> EMPTY -> GIVEN_BACK      a host whose processes move away, end, and whose node Slurm gets
    LEAVING -> KEPT                               one that can't be given back: its processes stay, as avoided spares
    LEAVING, KEPT -> (forgotten)                  Slurm has changed its mind before anything ended

leaving.py carries out what `next_step` says.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from migration.roster import Roster
from migration.slurm_nodes import Trouble


class Stage(Enum):
    """Of one host's departure."""

    LEAVING = "LEAVING"  # to be vacated, perhaps already without slots
    KEPT = "KEPT"  # without slots; stays in the allocation, and its spares are avoided
    ENDING = "ENDING"  # its processes have been told to end
    EMPTY = "EMPTY"  # they have ended; Slurm is to take the node
    GIVEN_BACK = "GIVEN_BACK"  # it is no longer in the allocation


@dataclass(slots=True, kw_only=True)
class Departure:
    """One host on its way out."""

    host: str
    why: str
    give_back: bool
    stage: Stage = Stage.LEAVING


class Departures:
    """Every host that is to be left, by name."""

    def __init__(self) -> None:
        self._all: dict[str, Departure] = {}

    def see(self, troubles: Mapping[str, Trouble], nodes: Iterable[str]) -> tuple[list[Departure], list[str]]:
        """Take what Slurm says of all `nodes` of the allocation now.

        Returns (hosts to be left from now on, hosts no longer to be left).
        """
        returned = [d.host for d in self._of(Stage.LEAVING, Stage.KEPT) if d.host in set(nodes) - set(troubles)]
        for host in returned:
            del self._all[host]
        new = [Departure(host=host, why=trouble.why, give_back=trouble.give_back)
               for host, trouble in troubles.items() if host not in self._all]
        for departure in new:
            self._all[departure.host] = departure
        for host, trouble in troubles.items():  # drained after it had only been silent: now Slurm waits for it
            self._all[host].give_back = trouble.give_back
        return new, returned

    def forget_gone(self, nodes: Iterable[str]) -> list[Departure]:
        """Those EMPTY that are no longer among the allocation's `nodes` are given back; returns them."""
        gone = [d for d in self._of(Stage.EMPTY) if d.host not in set(nodes)]
        for departure in gone:
            departure.stage = Stage.GIVEN_BACK
        return gone

    @property
    def avoided(self) -> frozenset[str]:
        """Hosts whose spares must not join."""
        return frozenset(d.host for d in self._of(Stage.LEAVING, Stage.KEPT))

    def to_vacate(self, roster: Roster) -> list[Departure]:
        """Hosts that still hold slots."""
        return [d for d in self._of(Stage.LEAVING, Stage.KEPT) if roster.slots_on(d.host)]

    def to_keep(self, roster: Roster, batch_host: str) -> list[Departure]:
        """Hosts without slots that can't be given back, and haven't been said to be kept."""
        return [d for d in self._of(Stage.LEAVING)
                if not roster.slots_on(d.host) and (d.host == batch_host or not d.give_back)]

    def to_end(self, roster: Roster, batch_host: str) -> list[Departure]:
        """Hosts without slots whose processes are to end."""
        return [d for d in self._of(Stage.LEAVING, Stage.KEPT)
                if not roster.slots_on(d.host) and d.host != batch_host and d.give_back]

    def ending(self) -> list[Departure]:
        return self._of(Stage.ENDING)

    def to_give_back(self) -> list[Departure]:
        return self._of(Stage.EMPTY)

    def describe(self) -> dict[str, str]:
        """host -> why and how far, for people."""
        return {d.host: f"{d.why}, {d.stage.value.lower().replace('_', ' ')}" for d in self._all.values()}

    def _of(self, *stages: Stage) -> list[Departure]:
        return [d for d in self._all.values() if d.stage in stages]

    # ---- handing the role over

    def to_json(self) -> list[dict[str, Any]]:
        return [{**asdict(d), "stage": d.stage.value} for d in self._all.values()]

    def load_json(self, value: list[dict[str, Any]]) -> None:
        self._all = {d["host"]: Departure(**{**d, "stage": Stage(d["stage"])}) for d in value}
