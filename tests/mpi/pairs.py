"""A leaver and its joiner: ranks 0 and 1 are one pair, ranks 2 and 3 another. They move different slots at one time."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from four_ranks import WAIT_S, new_store, world
from tiny_jobs import open_job, shared_groups

from migration import wire
from migration.communicators.base import Communicator
from migration.config import Config
from migration.job import IterationResult, Job
from migration.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What this rank has of its pair: a communicator for bytes, a wire for words."""

    pair: Communicator
    wire: Wire


def is_leaver() -> bool:
    return world().rank % 2 == 0


@contextmanager
def connected_pair(operation_timeout_s: float = 2 * WAIT_S) -> Iterator[Ends]:
    """This rank's ends. Collective over the world."""
    server, store = new_store()
    number, side = divmod(world().rank, 2)
    name, groups = f"pair{number}", shared_groups()
    listener = None if is_leaver() else wire.Listener(store, name, "127.0.0.1")
    pair = groups.make_pair(name, side)
    groups.prepare_pair(pair, store, WAIT_S, operation_timeout_s)
    own = listener.accept(WAIT_S) if listener else wire.connect(store, name, WAIT_S)
    yield Ends(pair=pair, wire=own)
    own.close()
    groups.release_pair(pair)
    world().barrier()
    del server


def open_own_job(config: Config) -> object:
    """The job of the slot that this rank's pair moves."""
    return open_job(config, world().rank // 2 % config.job_size)


def figures(result: IterationResult) -> tuple[str, ...]:
    """Of an iteration in the sandbox, such that they compare bit for bit."""
    return result.loss.hex(), result.grad_norm.hex(), str(result.skipped)


def run(job: Job) -> tuple[str, ...]:
    return figures(job.run_iteration())


def exchange(own: object) -> object:
    """What the other one of the pair has. Collective over the pair."""
    return world().sendrecv(own, dest=world().rank ^ 1, source=world().rank ^ 1)
