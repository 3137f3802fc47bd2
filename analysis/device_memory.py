"""Device memory in use over time, whoever uses it: sampled beside a run, cut into the phases of a move afterwards.

On GPUs from nvidia-smi, a GPU at a time; without GPUs it is the machine's memory, so that the same code runs.
"""
from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping
from types import TracebackType

PERIOD_S = 0.25
_QUERY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms",
          str(int(PERIOD_S * 1e3))]


class MemorySampler:
    """A context in which memory is sampled. `samples`: (unix seconds, GPU's index, MiB)."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.samples: list[tuple[float, int, float]] = []
        self._ended = threading.Event()
        self._smi: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read_smi if on_gpu else self._poll_meminfo, daemon=True)

    def __enter__(self) -> MemorySampler:
        if self._on_gpu:
            self._smi = subprocess.Popen(_QUERY, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ended.set()
        if self._smi is not None:
            self._smi.kill()
            self._smi.wait()
        self._thread.join(10.0)

    def _read_smi(self) -> None:
        assert self._smi is not None and self._smi.stdout is not None
        for line in self._smi.stdout:
            index, _, used = line.partition(",")
            if used.strip().isdecimal():
                self.samples.append((time.time(), int(index), float(used)))

    def _poll_meminfo(self) -> None:
        while not self._ended.wait(PERIOD_S):
            with open("/proc/meminfo") as meminfo:
                kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo}
            self.samples.append((time.time(), 0, (kib["MemTotal"] - kib["MemAvailable"]) / 1024))


def peak_by_phase(samples: list[tuple[float, int, float]],
                  phases: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    """MiB of the GPU that had most in use, in each phase (unix seconds, from and to). None without a sample.

    A phase shorter than the period has the samples around it.
    """
    peaks: dict[str, float | None] = {}
    for name, (start_s, end_s) in phases.items():
        inside = [used for at_s, _, used in samples if start_s - PERIOD_S <= at_s <= end_s + PERIOD_S]
        peaks[name] = max(inside, default=None)
    return peaks
