"""Who moves where: a request and the roster in, the assignments of leavers to joiners out.

Owns the roster, the grammar of a request, the choice of joiners and which groups a move touches. Every function is a
function of its arguments alone, so every process that has the same roster and request makes the same plan.
Pure: standard library only. Must not know of torch, MPI, time or the protocol's phases. For people, a plan is put into
words by plan_report.py.
"""
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from migration.config import Config
from migration.errors import UserError
from migration.topology import Group

_GRAMMAR = "write HOST[:INDEX][,HOST...][->HOST[,HOST...]][@ITERATION], such as b1@12, b0,b1->b3,b4@5 or b1:0@7"


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
        """The roster once the joiners of `plan` hold the slots of processes that are lost."""
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


def spread_hosts(names: Sequence[str], num_processes: int) -> tuple[str, ...]:
    """Host of each world_rank when `names` get equal runs of `num_processes`. Raises UserError where they can't."""
    shown = f"--hosts {','.join(names)}"
    if not names or not all(re.fullmatch(r"[\w.-]+", name) for name in names) or len(set(names)) != len(names):
        raise UserError(f"{shown}: give every host once, separated by commas, such as b0,b1,b2,b3; a name is of "
                        "letters, digits, '_', '.' and '-'")
    if num_processes < 1 or num_processes % len(names):
        raise UserError(f"{shown}: {num_processes} processes can't be shared evenly by {len(names)} hosts; start a "
                        f"multiple of {len(names)}")
    return tuple(name for name in names for _ in range(num_processes // len(names)))


def initial_roster(hosts: tuple[str, ...], config: Config) -> Roster:
    """The first world ranks take the slots in order. Raises UserError if there are too few of them."""
    if len(hosts) < config.job_size:
        raise UserError(f"profile {config.profile} needs {config.job_size} processes (TP{config.tp} x PP{config.pp} x "
                        f"DP{config.dp}), {len(hosts)} were started; start at least {config.job_size}, and as many "
                        "more as spares")
    return Roster(hosts=hosts, holders=tuple(range(config.job_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VacateRequest:
    """What to vacate, as the user named it. `parse_vacate` makes it; whether it can be done says `plan_move`."""

    text: str
    sources: tuple[str, ...]  # HOST, or HOST:INDEX for a single process, in the order named
    targets: tuple[str, ...]  # empty: any spare
    iteration: int | None  # None: as soon as it is ready


def parse_vacate(text: str, need_iteration: bool) -> VacateRequest:
    """Raises UserError for text outside the grammar, or without an iteration where one is needed."""
    places, at, iteration = text.strip().partition("@")
    left, arrow, right = places.partition("->")
    sources, targets = tuple(left.split(",")), tuple(right.split(",")) if arrow else ()
    if not all(re.fullmatch(r"[\w.-]+(:[0-9]+)?", source) for source in sources):
        raise UserError(f"vacate {text}: {left!r} is no list of hosts; {_GRAMMAR}")
    if not all(re.fullmatch(r"[\w.-]+", target) for target in targets):
        raise UserError(f"vacate {text}: {right!r} is no list of hosts to move to; {_GRAMMAR}")
    if at and not re.fullmatch(r"[0-9]+", iteration):
        raise UserError(f"vacate {text}: {iteration!r} is no iteration, counted from 0; {_GRAMMAR}")
    if need_iteration and not at:
        raise UserError(f"vacate {text}: say before which iteration, such as {places}@12")
    return VacateRequest(text=text, sources=sources, targets=targets, iteration=int(iteration) if at else None)


def touched_groups(groups: Iterable[Group], slots: Iterable[int]) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """(rebuilt, kept): the groups with a member among `slots`, and the others, each in the order given."""
    moved, given = frozenset(slots), tuple(groups)
    return (tuple(g for g in given if not moved.isdisjoint(g.slots)),
            tuple(g for g in given if moved.isdisjoint(g.slots)))


def plan_move(roster: Roster, request: VacateRequest) -> MovePlan:
    """Joiners for every slot that `request` vacates.

    The ranks of one host go to one host together where any has room, since tensor-parallel neighbours should stay
    neighbours: to the one with the fewest spares that suffice, and among equals to the first (in the order of the
    targets named, else of the hosts). Where no target is named, a host that no move has left yet comes before all
    that one has, and of those the one that was left longest ago: whoever vacated a host had a reason. What fits nowhere
    in one piece is spread over the hosts in order. A joiner is a living spare and never on a host that the request
    leaves, or that is to be left for another reason; only a named target can move a single process within its own host.
    Raises UserError for what can't be done; nothing has changed then.
    """
    leavers_by_host = _leavers_by_host(roster, request)
    free = _free_spares(roster, request, frozenset(leavers_by_host))
    num_needed, num_free = sum(map(len, leavers_by_host.values())), sum(map(len, free.values()))
    if num_needed > num_free:
        where = ", ".join(f"{host}: {len(spares)}" for host, spares in free.items())
        asked = f"on {','.join(request.targets)}" if request.targets else "outside the hosts to vacate"
        raise UserError(f"vacate {request.text}: {num_needed} spare processes are needed {asked}, {num_free} free"
                        f"{f' ({where})' if where else ''}; vacate less, name other hosts, or start more processes")
    pairs: dict[int, int] = {}  # leaver -> joiner
    scattered: list[int] = []
    # Large parts first, so that a small one doesn't take the room in which only a large one fits; sorted() is stable.
    for leavers in sorted(leavers_by_host.values(), key=len, reverse=True):
        roomy = [host for host in free if len(free[host]) >= len(leavers)]
        if not roomy:
            scattered += leavers
            continue
        best = min(roomy, key=lambda host: (_left_at(roster, request, host), len(free[host])))
        pairs.update(zip(leavers, free[best]))
        free[best] = free[best][len(leavers):]
    pairs.update(zip(scattered, (spare for spares in free.values() for spare in spares)))
    by_slot = sorted((roster.holders.index(leaver), leaver) for leaver in pairs)
    return MovePlan(assignments=tuple(Assignment(slot=slot, leaver=leaver, joiner=pairs[leaver])
                                      for slot, leaver in by_slot))


def plan_recovery(roster: Roster) -> MovePlan | None:
    """Living spares for the slots of lost processes, chosen as for a move; None where there are too few.

    Those of hosts that no process was lost on come first.
    """
    lost = [rank for rank in roster.holders if rank in roster.lost]
    if not lost:
        return MovePlan(assignments=())
    places = tuple(f"{roster.hosts[r]}:{roster.world_ranks_of(roster.hosts[r]).index(r)}" for r in lost)
    here = {roster.hosts[r] for r in roster.spares()} - roster.leaving
    elsewhere = here - {roster.hosts[r] for r in lost}
    by_host = sorted(here, key=lambda host: (host not in elsewhere, roster.host_names().index(host)))
    for targets in ((), tuple(by_host)):
        try:
            return plan_move(roster, VacateRequest(text="", sources=places, targets=targets, iteration=None))
        except UserError:  # too few; those of a named target may be on the same host
            continue
    return None


def check_moves(roster: Roster, texts: Iterable[str]) -> None:
    """Walk the moves of a command line, in the order of their iterations. Raises UserError for the first that can't be.

    Each is planned on the roster that the moves before it leave behind.
    """
    requests = [parse_vacate(text, need_iteration=True) for text in texts]
    for request in sorted(requests, key=lambda r: r.iteration or 0):
        roster = roster.after(plan_move(roster, request))


def _leavers_by_host(roster: Roster, request: VacateRequest) -> dict[str, list[int]]:
    """Leavers of each host in world-rank order, hosts in the order named."""
    leavers: dict[str, list[int]] = {}
    for source in request.sources:
        host, colon, index = source.partition(":")
        _check_host(roster, request, host)
        ranks = roster.world_ranks_of(host)
        if colon and int(index) >= len(ranks):
            raise UserError(f"vacate {request.text}: {host} has {len(ranks)} processes, {host}:0 to "
                            f"{host}:{len(ranks) - 1}; there is no {source}")
        named = [r for r in (ranks[int(index):int(index) + 1] if colon else ranks) if r in roster.holders]
        if not named:
            busy = ", ".join(name for name in roster.host_names() if roster.slots_on(name))
            raise UserError(f"vacate {request.text}: {source} holds no slot, so nothing is there to move; hosts with "
                            f"slots: {busy}")
        if set(named) & set(leavers.get(host, ())):
            raise UserError(f"vacate {request.text}: {source} is named twice; name each host or process once")
        leavers[host] = sorted(leavers.get(host, []) + named)
    return leavers


def _free_spares(roster: Roster, request: VacateRequest, left: frozenset[str]) -> dict[str, list[int]]:
    """Spares that may join, by host, hosts in order of preference."""
    for target in request.targets:
        _check_host(roster, request, target)
        if target in request.sources:
            raise UserError(f"vacate {request.text}: {target} is both vacated and moved to; name another target")
        if target in roster.leaving:
            raise UserError(f"vacate {request.text}: {target} is to be left itself (it is being drained or fails); "
                            "name another target, or none")
        if request.targets.count(target) > 1:
            raise UserError(f"vacate {request.text}: target {target} is named twice; name each host once")
    avoided = left | roster.leaving
    hosts = request.targets or tuple(sorted((host for host in roster.host_names() if host not in avoided),
                                            key=lambda host: _left_at(roster, request, host)))  # stable
    spares = {host: [r for r in roster.spares() if roster.hosts[r] == host] for host in hosts}
    return {host: ranks for host, ranks in spares.items() if ranks}


def _left_at(roster: Roster, request: VacateRequest, host: str) -> int:
    """The larger, the later a move has left `host`; -1: none has, or the user named the targets."""
    return roster.vacated.index(host) if host in roster.vacated and not request.targets else -1


def _check_host(roster: Roster, request: VacateRequest, host: str) -> None:
    if host not in roster.hosts:
        raise UserError(f"vacate {request.text}: there is no host {host!r}; hosts are {', '.join(roster.host_names())}")
