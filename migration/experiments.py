"""What each experiment is: the arguments of the jobs that it runs. Pure; `analysis/experiments.py` runs and reads them.

A job is described by the harness's own arguments, so that it can be repeated by hand; folders and the number of
processes are added by whoever starts it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from migration.arms import ARMS
from migration.config import Config
from migration.errors import UserError
from migration.plan import initial_roster, spread_hosts
from migration.profiles import ranks_per_host

EXPERIMENTS = {
    "m24_live_migration": "24 slots (TP4 PP2 DP3) on three hosts of 8 and a spare one; b1 is vacated while it trains",
    "ablation": "moves to and fro in one job, by all arms in turn, beside a save and restart of the same job",
    "rebalance": "a move every so many iterations: what is left of the job's speed",
    "straggler": "a process that gets slow is found, named with evidence, and moved away with --auto-evict",
    "scale_out_of_host": "one, two, ... all processes of a host are moved away and back",
}
_AFTER = 4  # iterations after the last move
_STRAGGLER_ITERATIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an experiment runs: `hosts` names the host of each process; `arguments` are passed on to every job."""

    config: Config
    hosts: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.hosts))

    @property
    def vacated(self) -> str:
        """The host whose processes move: the second one, so that the first slot stays; of a single one, that."""
        roster = initial_roster(self.hosts, self.config)
        training = [name for name in self.host_names if roster.slots_on(name)]
        return training[min(1, len(training) - 1)]

    @property
    def spare(self) -> str:
        """The host to which they move. Raises UserError if no host can take all of them."""
        roster = initial_roster(self.hosts, self.config)
        spares = [roster.hosts[rank] for rank in roster.spares()]
        wanted = len(roster.slots_on(self.vacated))
        for name in self.host_names:
            if spares.count(name) >= wanted and not roster.slots_on(name):
                return name
        raise UserError(f"no host has {wanted} spare processes and no slot: {self.vacated} can't be moved to and fro; "
                        "give one host more (--np, --hosts)")

    @property
    def num_movable(self) -> int:
        """Slots of the vacated host."""
        return len(initial_roster(self.hosts, self.config).slots_on(self.vacated))


def build_site(config: Config, num_processes: int | None, host_names: Sequence[str], arguments: Sequence[str]) -> Site:
    """Without processes or hosts: those the profile is for, and a spare host. Raises UserError where they don't fit."""
    per_host = ranks_per_host(config)
    num_hosts = len(host_names) or (num_processes or 0) // per_host or -(-config.job_size // per_host) + 1
    names = host_names or [f"b{index}" for index in range(num_hosts)]
    site = Site(config=config, hosts=spread_hosts(names, num_processes or num_hosts * per_host),
                arguments=tuple(arguments))
    assert site.spare  # or a UserError says what is missing
    return site


def ablation_job(site: Site, rounds: int, spacing: int) -> tuple[list[str], list[str]]:
    """(arguments, the arm of each move). Moves go to and fro; each round begins with another arm, so that each arm goes
    both ways."""
    names = list(ARMS)
    arms = [names[(index + turn) % len(names)] for turn in range(rounds) for index in range(len(names))]
    return [*to_and_fro(site, len(arms), spacing), "--arm", ",".join(arms)], arms


def to_and_fro(site: Site, num_moves: int, spacing: int) -> list[str]:
    """A move every `spacing` iterations."""
    there_and_back = (f"{site.vacated}->{site.spare}", f"{site.spare}->{site.vacated}")
    return _moves([there_and_back[index % 2] for index in range(num_moves)], spacing)


def scale_job(site: Site, rounds: int, spacing: int) -> tuple[list[str], list[int]]:
    """(arguments, how many processes each move takes): 1 to all of the host, each number there and back."""
    numbers = [number for _ in range(rounds) for number in range(1, site.num_movable + 1) for _ in range(2)]
    requests = []
    for index, number in enumerate(numbers):
        source, target = (site.vacated, site.spare) if index % 2 == 0 else (site.spare, site.vacated)
        requests.append(",".join(f"{source}:{i}" for i in range(number)) + f"->{target}")
    return _moves(requests, spacing), numbers


def straggler_job(site: Site, slow: str, *, evict: bool) -> list[str]:
    """`slow`: SLOT:FACTOR@ITERATION, or empty: the first slot of the host that is then moved, from iteration 10 on."""
    slot = initial_roster(site.hosts, site.config).slots_on(site.vacated)[0]
    return ["--slow", slow or f"{slot}:3@10", "--auto-evict" if evict else "--find-stragglers",
            *_iterations(_STRAGGLER_ITERATIONS)]


def m24_job(site: Site, at: int) -> list[str]:
    """One move of a host, asked for at iteration `at`, in the shape of the research system's driver."""
    return _moves([f"{site.vacated}->{site.spare}"], at)


def _moves(requests: Sequence[str], spacing: int) -> list[str]:
    arguments = [part for index, request in enumerate(requests)
                 for part in ("--vacate", f"{request}@{spacing * (index + 1)}")]
    # short, since a state that waits for its iteration is kept up to date step by step; one that is late goes later
    return [*arguments, "--lead", "2", *_iterations(spacing * (len(requests) + 1) + _AFTER)]


def _iterations(number: int) -> list[str]:
    return ["--set", f"iterations={number}"]
