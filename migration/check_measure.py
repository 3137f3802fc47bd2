"""Figures of one process's device and groups: memory, matrix multiply, all-reduce, what NCCL can do.

Owns how each is measured. Every rate is the best of several, since something else on the machine can only lower it.
Must not know who asks. Imported after preload.py has run.
"""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

_NUM_ALL_REDUCES = 5
_NUM_WINDOWS = 5
_WINDOW_S = 0.06
_MATMUL = {"cpu": (384, torch.float32), "cuda": (8192, torch.bfloat16)}  # milliseconds each
_CGROUP = Path("/sys/fs/cgroup")


def measure_matmul(device: torch.device, slowdown: int = 1) -> float:
    """Floating-point operations per second of square products, as wide as the device likes. `slowdown`: for tests."""
    size, dtype = _MATMUL[device.type]
    left, right = (torch.randn(size, size, dtype=torch.float32).to(device, dtype) for _ in range(2))
    out = left @ right
    best = 0.0
    for _ in range(_NUM_WINDOWS):
        _finish(device)
        num, started_s = 0, time.perf_counter()
        while (now_s := time.perf_counter()) < started_s + _WINDOW_S or not num:
            torch.matmul(left, right, out=out)
            _finish(device)
            num += 1
            time.sleep((slowdown - 1) * (time.perf_counter() - now_s))
        best = max(best, num * 2 * size ** 3 / (time.perf_counter() - started_s))
    return best


def measure_all_reduce(group: Any, device: torch.device, size_bytes: int) -> list[float]:
    """Seconds of each of several all-reduces of fp32, after one that isn't counted. Collective over `group`."""
    values = torch.ones(max(1, size_bytes // 4), device=device)
    times_s = []
    for _ in range(1 + _NUM_ALL_REDUCES):
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
