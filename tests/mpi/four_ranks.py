"""What the tests in several ranks share: the world, stores to build generations with, and waits that end.

MPI is imported when asked for, not when a module is: a plain pytest process that only collects must not become an MPI
process.
"""
from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_jobs import shared_groups

from migration.communicators.base import Communicator
from migration.communicators.makers import Maker, build_maker
from migration.groups import Groups
from migration.stores import connect_store, start_store

WAIT_S = 90.0  # for what takes milliseconds: the limit of a wait, and no measurement
# What the count of a resource may differ by although nothing was left behind. On a GPU the other ranks' memory counts
# too, and CUDA and NCCL make threads and descriptors of their own when they like.
SLACK = {"cpu": {}, "cuda": {"threads": 1, "fds": 2, "device_mib": 64}}


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def device() -> torch.device:
    """Where this rank's tensors are, and so the communicators under test: Gloo on the CPU, NCCL on a GPU."""
    return shared_groups().device


def make_maker(switch: str, *, allow_lazy: bool = False) -> Maker:
    """One that follows this policy, for this device. Skips the test where the library can't."""
    if switch == "parked" and device().type == "cuda":
        from nccl_bindings.library import load
        if not load().has("park"):
            pytest.skip("parking comes with NCCL 2.30.3; name one with LM_NCCL")
    return build_maker(device(), switch, connect_in_background=False, allow_lazy=allow_lazy)


def new_store() -> tuple[dist.TCPStore | None, dist.TCPStore]:
    """A store for one generation: (the server on rank 0, else None; this rank's connection). Collective over the world.

    It lives as long as rank 0 holds the server.
    """
    server = start_store("127.0.0.1") if world().rank == 0 else None
    port = world().bcast(server.port if server else None)
    return server, connect_store(("127.0.0.1", port), WAIT_S)


def build_generation(groups: Groups, generation: int, slots: Iterable[int]) -> tuple[int, int]:
    """Prepare, activate and adopt the groups touched by `slots`. Collective over the world, all of which hold slots."""
    server, store = new_store()
    groups.prepare(generation, store, slots, WAIT_S)
    groups.activate()
    counts = groups.adopt()
    world().barrier()  # the store must outlast every member's preparation
    del server
    return counts


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls, for what another thread does in the background. Raises AssertionError after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"world rank {world().rank}: waited {WAIT_S:g} s for {what}"
        time.sleep(0.005)


class Background(threading.Thread):
    """A thread that keeps what its function returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        if device().type == "cuda":
            torch.cuda.set_device(device())  # which each thread has its own
        try:
            self.result = self._function()
        except Exception as error:  # the test looks at it
            self.error = error

    def outcome(self) -> Any:
        """What the function returned; raises what it raised. Raises AssertionError if it doesn't end."""
        self.join(WAIT_S)
        assert not self.is_alive(), f"world rank {world().rank}: a background thread didn't end within {WAIT_S:g} s"
        if self.error is not None:
            raise self.error
        return self.result


class Issued:
    """Counts what is issued on a pair from now on, so that an abort can come after it.

    NCCL frees what a thread that is just issuing uses; Gloo has nothing to be careful about: there it doesn't count.
    """

    def __init__(self, pair: Communicator) -> None:
        self.num = 0
        if device().type == "cuda":
            for name in ("send", "recv"):
                setattr(pair.inner, name, self._counting(getattr(pair.inner, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            work = call(*args, **options)
            self.num += 1
            return work

        return counted

    def wait_for(self, num: int, doing: Background) -> None:
        """Until `num` operations have been issued, or the thread that does it has ended."""
        if device().type == "cuda":
            wait_until(lambda: self.num >= num or not doing.is_alive(), f"operation {num} of a pair to be issued")


def end_for_peer(pair: Communicator) -> None:
    """What the control plane does at the other end of a pair whose one end was aborted.

    With Gloo the aborting end closes the connections, and the peer notices; NCCL tells nobody.
    """
    if device().type == "cuda":
        pair.abort()


def count_resources(groups: Groups) -> dict[str, int]:
    """What must stay flat over many moves."""
    gc.collect()
    found = {"communicators": groups.num_communicators, "threads": len(os.listdir("/proc/self/task")),
             "fds": len(os.listdir("/proc/self/fd"))}
    if device().type == "cuda":
        free, total = torch.cuda.mem_get_info(device())
        found["device_mib"] = (total - free) >> 20
    return found


def thread_names() -> list[str]:
    """What the system calls the threads of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            found.append((task / "comm").read_text().strip())
    return found


def is_flat(now: dict[str, int], before: dict[str, int]) -> bool:
    """Whether no count has grown."""
    slack = SLACK[device().type]
    return all(now[name] <= before[name] + slack.get(name, 0) for name in before)
