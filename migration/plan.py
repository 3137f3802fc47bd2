"""Who moves where: a request and the roster in, the assignments of leavers to joiners out.

Owns the grammar of a request, the choice of joiners and which groups a move touches; the roster itself is roster.py's.
Every function is a function of its arguments alone, so every process that has the same roster and request makes the
same plan.
Pure: standard library only. Must not know of torch, MPI, time or the protocol's phases. For people, a plan is put into
words by plan_report.py.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from migration.config import Config
from migration.errors import UserError
from migration.roster import Assignment, MovePlan, Roster
from migration.topology import Group

_GRAMMAR = "write HOST[:INDEX][,HOST...][->HOST[,HOST...]][@ITERATION], such as b1@12, b0,b1->b3,b4@5 or b1:0@7"


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
    that one has, and of those the one that was left longest ago: whoever vacated a host had a reason. One on which a
    process was lost comes last: that may have been the host's fault. What fits nowhere in one piece is spread over the
    hosts in order. A joiner is a living spare and never on a host that the request leaves, or that is to be left for
    another reason; only a named target can move a single process within its own host.
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


def plan_recovery(roster: Roster, *, whole_hosts: bool = True) -> MovePlan | None:
    """Living spares for the slots of lost processes, chosen as for a move; None where there are too few.

    With `whole_hosts` the other slots of a host that lost one go along, where another host has room for all of them: so
    neighbours stay neighbours, groups keep their shape over hosts (in which a library may add), and the host, which may
    have been the cause, is left. Neither such a host nor one that has lost a spare is moved to, and nobody who leaves a
    slot takes one. Hosts of many slots come first; one for which there is no room, or which would take the spares that
    another one's lost slots need, keeps the slots that live.
    """
    taken: list[Assignment] = []
    rest = roster
    for host in _struck_hosts(roster) if whole_hosts else ():
        plan = _plan_host(rest, host)
        if plan is None:
            continue
        after = rest.after(plan)
        for leaver in plan.leavers:
            after = after.without(leaver)
        if _plan_slots(after) is not None:
            rest = after
            taken += plan.assignments
    last = _plan_slots(rest)
    return None if last is None else MovePlan(assignments=tuple(sorted((*taken, *last.assignments),
                                                                       key=lambda a: a.slot)))


def check_moves(roster: Roster, texts: Iterable[str]) -> None:
    """Walk the moves of a command line, in the order of their iterations. Raises UserError for the first that can't be.

    Each is planned on the roster that the moves before it leave behind.
    """
    requests = [parse_vacate(text, need_iteration=True) for text in texts]
    for request in sorted(requests, key=lambda r: r.iteration or 0):
        roster = roster.after(plan_move(roster, request))


def _struck_hosts(roster: Roster) -> list[str]:
    """Hosts on which a process with a slot is lost, those of many slots first, then in the order of the slots."""
    hosts = dict.fromkeys(roster.hosts[rank] for rank in roster.holders if rank in roster.lost)
    return sorted(hosts, key=lambda host: -len(roster.slots_on(host)))  # stable


def _plan_host(roster: Roster, host: str) -> MovePlan | None:
    """All slots of `host` to one other host on which nothing was lost; None where none has room."""
    sound = roster.avoiding(roster.leaving | {roster.hosts[rank] for rank in roster.lost})
    try:
        plan = plan_move(sound, VacateRequest(text="", sources=(host,), targets=(), iteration=None))
    except UserError:  # too few
        return None
    return plan if len({roster.hosts[joiner] for joiner in plan.joiners}) == 1 else None


def _plan_slots(roster: Roster) -> MovePlan | None:
    """Spares for just the slots of lost processes; those of hosts that no such process was on come first."""
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
    """The larger, the later a move has left `host`; -1: none has, or the user named the targets.

    Hosts on which a process was lost come after all others.
    """
    if request.targets:
        return -1
    left_at = roster.vacated.index(host) if host in roster.vacated else -1
    return left_at + (len(roster.vacated) + 1) * any(rank in roster.lost for rank in roster.world_ranks_of(host))


def _check_host(roster: Roster, request: VacateRequest, host: str) -> None:
    if host not in roster.hosts:
        raise UserError(f"vacate {request.text}: there is no host {host!r}; hosts are {', '.join(roster.host_names())}")
