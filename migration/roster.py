"""Who holds which slot, and what a move changes in it.

A roster is the same on every process that knows the same moves. Changing one gives a new one; nothing here chooses who
goes where (plan.py). Pure: standard library only.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One slot's change of hands."""

    slot: int
    leaver: int  # world_rank
    joiner: int  # world_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """What one move changes, in slot order."""

    assignments: tuple[Assignment, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(a.slot for a in self.assignments)

    @property
    def leavers(self) -> tuple[int, ...]:
        """World ranks, in slot order."""
        return tuple(a.leaver for a in self.assignments)

    @property
    def joiners(self) -> tuple[int, ...]:
        """World ranks, in slot order."""
        return tuple(a.joiner for a in self.assignments)

    def to_json(self) -> str:
        """A list of [slot, leaver, joiner], without spaces: it goes into records and log rows of bounded size."""
        return json.dumps([[a.slot, a.leaver, a.joiner] for a in self.assignments], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> MovePlan:
        return cls(assignments=tuple(Assignment(slot=s, leaver=l, joiner=j) for s, l, j in json.loads(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Where every process is and what it holds, at one generation."""

    hosts: tuple[str, ...]  # host of each world_rank
    holders: tuple[int, ...]  # world_rank that holds each slot
    lost: frozenset[int] = frozenset()  # world ranks that no longer live, for whatever reason
    vacated: tuple[str, ...] = ()  # hosts that a move has left, the last one last
    leaving: frozenset[str] = frozenset()  # hosts that are to be left: their spares live, but never join
    released: frozenset[str] = frozenset()  # hosts whose processes have been ended because the host was given back

    def host_names(self) -> tuple[str, ...]:
        """In the order in which the hosts come first in the world."""
        return tuple(dict.fromkeys(self.hosts))

    def world_ranks_of(self, host: str) -> tuple[int, ...]:
        """Every process of `host`, lost ones included: an index into this is a request's local index."""
        return tuple(world_rank for world_rank, name in enumerate(self.hosts) if name == host)

    def slot_of(self, world_rank: int) -> int | None:
        return self.holders.index(world_rank) if world_rank in self.holders else None

    def slots_on(self, host: str) -> tuple[int, ...]:
        return tuple(slot for slot, holder in enumerate(self.holders) if self.hosts[holder] == host)

    def host_of_slot(self, slot: int) -> str:
        return self.hosts[self.holders[slot]]

    def spares(self) -> tuple[int, ...]:
        """World ranks that live and hold no slot."""
        return tuple(r for r in range(len(self.hosts)) if r not in self.lost and r not in self.holders)

    def after(self, plan: MovePlan) -> Roster:
        """The roster once `plan` is committed: leavers are spares. A plan that wasn't made for this roster is a bug."""
        holders, spares = list(self.holders), self.spares()
        for a in plan.assignments:
            assert holders[a.slot] == a.leaver, f"slot {a.slot}: held by {holders[a.slot]}, the plan says {a.leaver}"
            assert a.joiner in spares, f"slot {a.slot}: joiner {a.joiner} is not one of the spares {spares}"
            holders[a.slot] = a.joiner
        assert len(set(holders)) == len(holders), f"a process holds two slots after {plan.to_json()}: {holders}"
        left = tuple(dict.fromkeys(self.hosts[a.leaver] for a in plan.assignments))
        return dataclasses.replace(self, holders=tuple(holders),
                                   vacated=(*(host for host in self.vacated if host not in left), *left))

    def replaced(self, plan: MovePlan) -> Roster:
        """The roster once the joiners of `plan` hold the slots of processes that are lost, and of others with them."""
        after = self.after(plan)
        assert after.lost.isdisjoint(after.holders), f"a lost process still holds a slot: {after.holders}"
        return after

    def without(self, world_rank: int) -> Roster:
        """The roster once `world_rank` is lost: never a spare again. A slot that it holds stays its until a move."""
        return dataclasses.replace(self, lost=self.lost | {world_rank})

    def avoiding(self, hosts: Iterable[str]) -> Roster:
        """The roster when just `hosts` are to be left."""
        return dataclasses.replace(self, leaving=frozenset(hosts))

    def release(self, host: str) -> Roster:
        """The roster once the processes of `host`, which holds no slot, have been told to end."""
        assert not self.slots_on(host), f"{host} still holds slots {self.slots_on(host)}"
        return dataclasses.replace(self, lost=self.lost | set(self.world_ranks_of(host)),
                                   leaving=self.leaving - {host}, released=self.released | {host})

    def to_json(self) -> str:
        """Compact: hosts are run lengths, [["b0", 2], ...]."""
        runs = [[host, len(list(run))] for host, run in groupby(self.hosts)]
        return json.dumps({"hosts": runs, "holders": self.holders, "lost": sorted(self.lost),
                           "vacated": self.vacated, "leaving": sorted(self.leaving),
                           "released": sorted(self.released)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Roster:
        fields = json.loads(text)
        return cls(hosts=tuple(host for host, count in fields["hosts"] for _ in range(count)),
                   holders=tuple(fields["holders"]), lost=frozenset(fields["lost"]),
                   vacated=tuple(fields["vacated"]), leaving=frozenset(fields["leaving"]),
                   released=frozenset(fields["released"]))


def choose_successor(roster: Roster) -> int:
    """World rank of the next controller: the first that holds a slot on a host that stays, else the first."""
    staying = [r for r in roster.holders if roster.hosts[r] not in roster.leaving]
    return min(staying or roster.holders)
