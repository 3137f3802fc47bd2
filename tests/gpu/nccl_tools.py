"""What the bodies share: making a communicator, the sums that it must give, a busy loop, and memory in use."""
from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from ranks import Rank

from migration.communicators.nccl import NcclCommunicator
from migration.communicators.nccl_policy import NcclPolicy

MIB = 1 << 20
NUM_ELEMENTS = 4 << 20
TIMEOUT_S = 60.0


def make(own: Rank, name: str, switch: str = "lazy", **policy: Any) -> NcclCommunicator:
    return NcclCommunicator(name, tuple(range(own.world)), own.rank, device=own.device, library=own.library,
                            policy=NcclPolicy(switch=switch, **policy))


def ready(own: Rank, name: str, switch: str = "lazy") -> NcclCommunicator:
    """Prepared, connected, probed."""
    communicator = make(own, name, switch)
    communicator.prepare(own.store, TIMEOUT_S)
    communicator.activate()
    communicator.probe(own.device)
    return communicator


def check_sums(own: Rank, inner: Any) -> None:
    """All-reduce, all-gather and reduce-scatter through the stock group give the exact sums."""
    world = own.world
    values = torch.full((NUM_ELEMENTS,), float(own.rank + 1), device=own.device)
    inner.allreduce([values]).wait()
    gathered = torch.empty(world * 1024, device=own.device)
    inner._allgather_base(gathered, torch.full((1024,), float(own.rank), device=own.device)).wait()
    part = torch.empty(1024, device=own.device)
    inner._reduce_scatter_base(part, torch.arange(world * 1024.0, device=own.device)).wait()
    torch.cuda.synchronize(own.device)
    assert bool((values == world * (world + 1) / 2).all())
    assert gathered.view(world, 1024)[:, 0].tolist() == [float(r) for r in range(world)]
    assert bool((part == world * torch.arange(own.rank * 1024.0, (own.rank + 1) * 1024.0, device=own.device)).all())


class Busy:
    """A loop like training: matrix products, then an all-reduce on `inner`."""

    def __init__(self, own: Rank, inner: Any) -> None:
        self.own, self.inner = own, inner
        self.left = torch.randn(2048, 2048, device=own.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.left)
        self.grads = torch.ones(1 << 20, device=own.device)

    def iterate(self, num_iterations: int) -> list[float]:
        times_s = []
        for _ in range(num_iterations):
            started_s = time.perf_counter()
            for _ in range(10):
                torch.mm(self.left, self.left, out=self.out)
            self.inner.allreduce([self.grads]).wait()
            torch.cuda.synchronize(self.own.device)
            times_s.append(time.perf_counter() - started_s)
        return times_s


def used_mib(own: Rank, name: str) -> float:
    """Device memory in use while all ranks stand still."""
    torch.cuda.synchronize(own.device)
    own.barrier(f"{name}/before")
    free, total = torch.cuda.mem_get_info(own.device)
    own.barrier(f"{name}/after")
    return (total - free) / MIB


def costs(communicator: NcclCommunicator) -> dict[str, dict[str, float]]:
    return {name: asdict(cost) for name, cost in communicator.costs.items()}
