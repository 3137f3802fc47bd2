"""Device memory in use over time, whoever uses it: sampled beside a run, cut into the phases of a move afterwards.

On GPUs from nvidia-smi, for each of them; without GPUs it is the machine's memory, so that the same code runs.
"""
from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping
from types import TracebackType

PERIOD_S = 0.25
_QUERY_TIMEOUT_S = 20.0

Sample = tuple[float, int, float]  # unix seconds, GPU's index, MiB


class MemorySampler:
    """A context in which memory is sampled. Raises RuntimeError at its end if it couldn't be."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.samples: list[Sample] = []
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(2 * _QUERY_TIMEOUT_S)
        if self._error is not None and error is None:
            raise RuntimeError(f"device memory couldn't be sampled: {self._error}") from self._error

    def _poll(self) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self.samples += _ask_gpus() if self._on_gpu else _ask_machine()
        # raised at the end of the context
        except (OSError, RuntimeError, subprocess.SubprocessError, ValueError) as error:
            self._error = error


def _ask_gpus() -> list[Sample]:
    # asked again and again: what nvidia-smi prints in a loop of its own waits in a buffer, and is lost when it is ended
    return [(time.time(), int(index), float(used)) for index, used in ask_smi("index", "memory.used")]


def free_gpu_bytes() -> int:
    """Of the GPU that has least. Raises RuntimeError if nvidia-smi doesn't say."""
    return min(int(free) for free, in ask_smi("memory.free")) * 2**20


def ask_smi(*fields: str) -> list[list[str]]:
    """These fields of every GPU, sizes in MiB. Raises RuntimeError if nvidia-smi doesn't say."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_QUERY_TIMEOUT_S)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _ask_machine() -> list[Sample]:
    with open("/proc/meminfo") as meminfo:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo}
    return [(time.time(), 0, (kib["MemTotal"] - kib["MemAvailable"]) / 1024)]


def peak_by_phase(samples: list[Sample], phases: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    """MiB of the GPU that had most in use, in each phase (unix seconds, from and to). None without a sample.

    A phase shorter than the period has the samples around it.
    """
    peaks: dict[str, float | None] = {}
    for name, (start_s, end_s) in phases.items():
        inside = [used for at_s, _, used in samples if start_s - PERIOD_S <= at_s <= end_s + PERIOD_S]
        peaks[name] = max(inside, default=None)
    return peaks
