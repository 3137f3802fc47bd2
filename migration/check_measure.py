"""Figures of one process's device and groups: memory, matrix multiply, all-reduce, what NCCL can do.

Owns how each is measured, for the preflight and for the acceptance of a joiner. Every rate is the best of several,
since something else on the machine can only lower it. Must not know who asks. Imported after preload.py has run.
"""
from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from migration.acceptance import Figures
from migration.communicators.base import Communicator

_NUM_ALL_REDUCES = 5
_NUM_WINDOWS = 5
_WINDOW_S = 0.06
_MATMUL = {"cpu": (384, torch.float32), "cuda": (8192, torch.bfloat16)}  # milliseconds each
# for an acceptance: short, and small beside a job that trains; on a GPU 96 MiB
_SHORT_MATMUL = {"cpu": (256, torch.float32), "cuda": (4096, torch.bfloat16)}
_NUM_SHORT = {"cpu": 20, "cuda": 50}  # 0.2 ms each
_PAIR_BYTES = {"cpu": 2 << 20, "cuda": 32 << 20}
_NUM_SENDS = 2
_SLOTS_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
_CGROUP = Path("/sys/fs/cgroup")


def measure_matmul(device: torch.device, slowdown: int = 1) -> float:
    """Floating-point operations per second of square products, as wide as the device likes.

    `slowdown`, for tests: so many products are taken for one.
    """
    left, right, out = _factors(device, *_MATMUL[device.type])
    best = 0.0
    for _ in range(_NUM_WINDOWS):
        _finish(device)
        num, started_s = 0, time.perf_counter()
        while time.perf_counter() < started_s + _WINDOW_S or not num:
            for _ in range(slowdown):
                torch.matmul(left, right, out=out)
            _finish(device)
            num += 1
        best = max(best, num * _operations(out) / (time.perf_counter() - started_s))
    return best


def _measure_short_matmul(device: torch.device, slowdown: int) -> float:
    """The same beside training. One product at a time: some will have the core, or the GPU, for themselves.

    A number of products and not a time: where a process must wait for its core, time passes without a product.
    """
    left, right, out = _factors(device, *_SHORT_MATMUL[device.type])
    best = 0.0
    for _ in range(_NUM_SHORT[device.type]):
        _finish(device)
        started_s = time.perf_counter()
        for _ in range(slowdown):
            torch.matmul(left, right, out=out)
        _finish(device)
        best = max(best, _operations(out) / (time.perf_counter() - started_s))
    return best


def _factors(device: torch.device, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random numbers, since zeros take less power; from a generator of their own. And the first product."""
    generator = torch.Generator(device).manual_seed(1)
    left, right = (torch.randn(size, size, generator=generator, dtype=dtype, device=device) for _ in range(2))
    return left, right, left @ right


def _operations(product: torch.Tensor) -> int:
    return 2 * len(product) ** 3


# ---- acceptance

def measure_figures(device: torch.device, *, is_shared: bool, slowdown: int = 1) -> Figures:
    """Of this process, before it builds a job. `is_shared`: other processes of the run are on the same GPU."""
    kind = "CPU" if device.type == "cpu" else "shared GPU" if is_shared else "GPU"
    free = free_host_bytes() if device.type == "cpu" else (
        torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    flops = _measure_short_matmul(device, slowdown)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Figures(device=kind, flops=flops, free_bytes=free, used_bytes=used_bytes(device))


def used_bytes(device: torch.device) -> int:
    """What this process has taken of the device's memory; on the CPU, of memory that isn't a file's."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def measure_slots(group: Any, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce over the slots, bytes per second; 0 of a single one. Collective over `group`."""
    if group.size() == 1:
        return 0.0
    num_bytes = _SLOTS_BYTES[device.type]
    return 2 * (group.size() - 1) / group.size() * num_bytes / min(measure_all_reduce(group, device, num_bytes, 2))


def measure_pair(pair: Communicator, device: torch.device) -> float:
    """Bytes per second from leaver (group rank 0) to joiner (1), on a stream of its own beside training.

    Collective over the two. Takes 32 MiB of a GPU meanwhile. Raises RuntimeError as the pair's operations do.
    """
    beside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
    move = pair.send_all if pair.group_rank == 0 else pair.recv_all
    times_s = []
    with beside:
        first, rest = (torch.zeros(num, dtype=torch.uint8, device=device) for num in (1, _PAIR_BYTES[device.type]))
        for _ in range(_NUM_SENDS):
            move([first], 1 - pair.group_rank)  # now both are here
            started_s = time.perf_counter()
            move([rest], 1 - pair.group_rank)
            times_s.append(time.perf_counter() - started_s)
    return len(rest) / min(times_s)


# ---- both

def measure_all_reduce(group: Any, device: torch.device, size_bytes: int, num: int = _NUM_ALL_REDUCES) -> list[float]:
    """Seconds of each of `num` all-reduces of fp32, after one that isn't counted. Collective over `group`."""
    values = torch.ones(max(1, size_bytes // 4), device=device)
    times_s = []
    for _ in range(1 + num):
        values.fill_(1.0)
        _finish(device)
        started_s = time.perf_counter()
        group.allreduce([values]).wait()
        _finish(device)
        times_s.append(time.perf_counter() - started_s)
    wrong = float(values[-1])
    assert wrong == group.size(), f"an all-reduce of ones over {group.size()} members gave {wrong:g}"
    return times_s[1:]


def free_host_bytes() -> int:
    """What the kernel could give to new processes: of the machine, or of the container where that has a limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((_CGROUP / "memory.current").read_text())
        counters = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, int(text) - used + int(counters["inactive_file"]))  # files' pages can be dropped
    return free


def gpu_versions() -> dict[str, str]:
    """Of CUDA and NCCL, and what this NCCL can do."""
    from nccl_bindings.library import FEATURES, load, version_text
    library = load()
    return {"cuda": torch.version.cuda or "none", "nccl": version_text(library.version),
            "nccl_features": " ".join(f.name for f in FEATURES if library.has(f.name))}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
