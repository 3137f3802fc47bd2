"""The first seconds of a process: MPI comes up, everybody compares notes, and what doesn't fit ends in one line.

Imports nothing heavy, so that a wrong argument is answered before torch is loaded.
"""
from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from migration.checkpoint_files import Start, find_start
from migration.communicators.nccl_policy import describe_pins
from migration.config import Config
from migration.data import Samples, open_source
from migration.errors import UserError
from migration.options import Options
from migration.plan import check_moves, initial_roster
from migration.roster import Roster
from migration.versions import CODE_ROOT, collect_versions, describe_other_code
from migration.whereabouts import addresses, own_host
from migration.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is known once the world is up. `address` is where world rank 0 can be reached."""

    options: Options
    samples: Samples
    roster: Roster
    address: str
    start: Start
    slurm_job: str  # whose nodes are watched; "" for none


def bring_up(world: World, config: Config, options: Options) -> Started:
    """Start MPI and compare what everybody brings. Collective over the world.

    Raises UserError, on every rank, for a world that doesn't fit the profile, hosts that don't divide it, data that
    can't be read, a checkpoint that can't be gone on from, a run folder in use, or a host with other code, other
    versions or other data.
    """
    found: list[Samples] = []
    claimed: list[Path] = []

    def hello(rank: int, size: int) -> dict[str, Any]:
        found.append(Samples(open_source(config.data, config.vocab_size), config.seq_length, config.seed))
        start = Start()
        if rank == 0:
            start = find_start(options.load, options.checkpoints, config, data=found[0].source.digest,
                               ends_at=options.last_iteration(config.iterations), versions=collect_versions())
            _claim_run_folder(config, options)
            claimed.append(Path(options.run))
        return {"start": asdict(start), "checkpoints": options.checkpoints,
                "host": own_host(rank, size, list(options.hosts)), "machine": socket.gethostname(),
                "node": os.environ.get("SLURMD_NODENAME", ""),
                "run": options.run, "data": found[0].source.digest,
                "versions": {**collect_versions(), "NCCL variables": describe_pins(os.environ)},
                "root": str(CODE_ROOT)}

    try:
        world.start(hello)
        roster = initial_roster(tuple(h["host"] for h in world.hellos), config)
        check_moves(roster, options.certain_moves())
        _compare(world)
    except UserError:
        for path in claimed:
            (path / "log").rmdir()  # nothing is in it: the folder may be named again
        raise
    first = world.hellos[0]
    return Started(options=dataclasses.replace(options, run=first["run"], checkpoints=first["checkpoints"]),
                   samples=found[0], roster=roster, start=Start(**first["start"]),
                   address=addresses(world.hellos)[0],
                   slurm_job=_watched_job(world, options))


def _watched_job(world: World, options: Options) -> str:
    """The Slurm job of this world, if hosts are its nodes; with virtual hosts, a drained node has no meaning."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return job if options.watch_slurm == "auto" and all(h["host"] == h["node"] for h in world.hellos) else ""


def _claim_run_folder(config: Config, options: Options) -> None:
    """World rank 0 makes the folder. Raises UserError if another run's log is in it or it can't be made."""
    path = Path(options.run)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "log").mkdir()
        (path / "config.json").write_text(json.dumps({"config": asdict(config), "options": asdict(options)}, indent=1))
    except FileExistsError:
        raise UserError(f"--run {path}: another run's log is there; name a new folder") from None
    except OSError as error:
        raise UserError(f"--run {path}: can't be made: {error.strerror}") from None


def _compare(world: World) -> None:
    other_code = describe_other_code(world.hellos)
    if other_code is not None:
        raise UserError(other_code)
    first = world.hellos[0]
    for rank, other in enumerate(world.hellos):
        for name in first["versions"]:
            if other["versions"].get(name) != first["versions"][name]:
                raise UserError(f"host {other['host']} (world rank {rank}) has {name} {other['versions'].get(name)}, "
                                f"{first['host']} has {first['versions'][name]}: install the same everywhere")
        if other["data"] != first["data"]:
            raise UserError(f"host {other['host']} (world rank {rank}) reads other data than {first['host']}: give "
                            "--data a path that is the same file everywhere")
