"""A Megatron job trains on two ranks while a thread prepares the next generation of all its groups, and discards it.

What each rank does (run by analysis/ranks.py), and the figures made of what the ranks return. The rounds look for a
hang, for whatever is left behind, and for what preparing costs the iterations, which go on all the while, with windows
of undisturbed ones in between; a second job, left alone, must have the same losses and, if it is as long, the same
state at its end.
"""
from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from analysis.preparer import HANG_S, MOVING, TIMEOUT_S, Preparer, fresh_store, wait_for
from analysis.ranks import Rank
from migration.communicators.makers import build_maker
from migration.config import Config, apply_settings
from migration.data import Samples, open_source
from migration.groups import Groups
from migration.job import Job, close_job, open_groups
from migration.timeline import process_counts
from third_party.pytorch.process_group import MigratableGroup

WARM_UP = 5  # iterations that count for nothing, at the start


def config_of(sizes: Mapping[str, Any], settings: list[str]) -> Config:
    """A small model with `sizes`, changed by the user's FIELD=VALUE."""
    return apply_settings(Config(profile="bench_gpu", **sizes), settings)


class SomeGroups(Groups):
    """With `most`, only so many of them are ever touched: for rounds that are short."""

    most: int | None = None

    def touched(self, slots: Iterable[int]) -> list[MigratableGroup]:
        return super().touched(slots)[:self.most]


def build_groups(own: Rank, switch: str, share: float = 1.0, close_by: str = "abort") -> SomeGroups:
    """With `share` 1 there is no pause between two that are closed, so that rounds follow each other soon."""
    maker = build_maker(own.device, switch, connect_in_background=False, close_by=close_by)
    return SomeGroups(own.device, maker, close_pause_s=0.0, close_share=share)


def build_job(config: Config, slot: int, groups: Groups) -> Job:
    """In the sandbox."""
    open_groups(config, slot, groups)
    return Job(config, slot, groups, Samples(open_source("", config.vocab_size), config.seq_length, config.seed))


def beside(own: Rank) -> dict[str, Any]:
    """Arguments: settings, rounds, rounds_s (no round begins later), switch, close_by, share (pacing.py), num_groups
    (prepared in a round; None: all), stride (iterations after which ranks compare whether a round is over), alone
    (iterations before the first round and after each), twin (at most so many are compared with the job left alone).

    Returns iterations as [kind (gpu_figures.KINDS), seconds, its start in seconds since the job's], a row for each
    round, resources after each round, how many iterations were compared, and what differs from the job left
    alone, empty if nothing does.
    """
    from migration.preload import preload
    preload()
    gc.freeze()
    arguments = own.arguments
    config = config_of({}, arguments["settings"])
    groups = build_groups(own, arguments["switch"], arguments["share"], arguments["close_by"])
    found = _Course(own, config, groups, rounds=arguments["rounds"])
    found.run("disturbed")
    twin = _Course(own, config, groups, rounds=0, num_iterations=min(len(found.losses), arguments["twin"]))
    twin.run("left alone")
    differing = [i for i, (a, b) in enumerate(zip(found.losses, twin.losses)) if a != b]
    differs = f"the loss of iteration {differing[0]}" if differing else ""
    if len(twin.losses) == len(found.losses):
        differs = differs or ", ".join(k for k in found.digests if found.digests[k] != twin.digests[k])
    return {"iterations": found.iterations, "rounds": found.rounds, "resources": found.resources, "differs": differs,
            "num_losses": len(found.losses), "num_compared": len(twin.losses), "num_groups": found.num_groups}


class _Course:
    """One job from its start to its end, with preparations beside it or without."""

    def __init__(self, own: Rank, config: Config, groups: SomeGroups, *, rounds: int, num_iterations: int = 0) -> None:
        self._own, self._config, self._groups = own, config, groups
        self._num_rounds, self._num_iterations = rounds, num_iterations
        self.losses: list[str] = []
        self.iterations: list[tuple[str, float, float]] = []
        self.rounds: list[dict[str, float]] = []
        self.resources: list[dict[str, int]] = []
        self.digests: dict[str, str] = {}
        self.num_groups = 0
        self._began_s = time.perf_counter()

    def run(self, name: str) -> None:
        from migration import state
        own, groups, slots = self._own, self._groups, range(self._config.job_size)
        groups.most = None
        job = build_job(self._config, own.rank, groups)
        server, store = fresh_store(own, name)
        groups.prepare(0, store, slots, TIMEOUT_S)
        groups.activate()
        groups.adopt()
        own.barrier(f"{name} connected")
        del server
        job.broadcast_parameters()
        job.tie_embeddings()
        num_live = len(groups.touched(slots))
        groups.most = own.arguments["num_groups"]
        self.num_groups = len(groups.touched(MOVING))
        self._train(job, WARM_UP, None, "after_join")
        if self._num_rounds:
            self._train(job, own.arguments["alone"], None, "undisturbed")
        ends_s = time.monotonic() + own.arguments["rounds_s"]
        for i in range(self._num_rounds):
            if not self._goes_on(i, ends_s):
                break
            self._round(job, i)
        self._train(job, self._num_iterations - len(self.losses), None, "undisturbed")
        job.finish()
        self.digests = state.digests(state.capture(job))
        num_held = groups.num_communicators - num_live
        del job
        close_job(groups)
        wait_for(lambda: groups.num_communicators <= num_held, HANG_S, f"the job {name} to close its groups")

    def _goes_on(self, number: int, ends_s: float) -> bool:
        """Rank 0's clock decides for all."""
        key = f"round {number} goes on"
        if self._own.rank == 0:
            self._own.store.set(key, str(int(time.monotonic() < ends_s)))
        return self._own.store.get(key) == b"1"

    def _round(self, job: Job, number: int) -> None:
        preparer = Preparer(self._own, self._groups, number)
        preparer.start()
        ends_s, stride = time.monotonic() + HANG_S, 0
        self._train(job, self._own.arguments["stride"], preparer, "undisturbed")
        while not self._all_are_done(f"round {number} stride {stride}", preparer):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"round {number}: a preparation hung: it isn't over after {HANG_S:g} s")
            stride += 1
            self._train(job, self._own.arguments["stride"], preparer, "undisturbed")
        preparer.join()
        if preparer.error is not None:
            raise RuntimeError(f"round {number}: {preparer.error}") from preparer.error
        self.rounds.append(preparer.row)
        self.resources.append(count_resources(self._own.device))
        self._train(job, 1, None, "after_join")  # whose ranks come one after the other
        self._train(job, self._own.arguments["alone"], None, "undisturbed")

    def _all_are_done(self, key: str, preparer: Preparer) -> bool:
        """The same answer on all ranks, so that all train equally many iterations."""
        own = self._own
        own.store.set(f"{key}/{own.rank}", str(int(not preparer.is_alive())))
        return all(own.store.get(f"{key}/{rank}") == b"1" for rank in range(own.world))

    def _train(self, job: Job, num_iterations: int, preparer: Preparer | None, kind: str) -> None:
        """`kind`: of iterations beside which no thread works."""
        for _ in range(num_iterations):
            start_s = time.perf_counter()
            result = job.run_iteration()
            seconds = time.perf_counter() - start_s
            self.losses.append(f"{result.loss.hex()} {result.grad_norm.hex()}")
            self.iterations.append((preparer.kind_of(start_s) if preparer else kind, seconds, start_s - self._began_s))


def count_resources(device: torch.device) -> dict[str, int]:
    """What must stay flat. `device_mib` counts whoever else uses the device."""
    gc.collect()
    used = 0
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        used = (whole - free) >> 20
    rss_bytes, num_fds, num_threads = process_counts()
    return {"device_mib": used, "threads": num_threads, "fds": num_fds, "resident_mib": rss_bytes >> 20}
