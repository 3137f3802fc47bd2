"""What a process does by itself in an iteration: the iteration's time without the time it waits for others.

In a synchronous job all slots' iterations take equally long, so that they don't tell who is slow. What differs is how
long each waits in the collectives of its process groups: the slow one hardly does. Owns that sum, on a CPU of the
training thread's time, on a GPU of the computing stream's, and the delay of a process that is slowed on purpose.
"""
from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import torch

from migration import device
from migration.config import Config
from migration.options import Options
from migration.straggler import Slow, parse_slow

_NUM_KEPT = 5  # iterations from which the usual own time is taken


class HostWaits:
    """Time that the training thread spends waiting, in seconds."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, begun: float) -> None:
        self._waited_s += time.perf_counter() - begun

    def take(self) -> float:
        """What was waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class DeviceWaits:
    """Time that the computing stream stands still for a collective; the host runs ahead and knows nothing of it."""

    def __init__(self) -> None:
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun: torch.cuda.Event) -> None:
        self._waits.append((begun, self.begin()))

    def take(self) -> float:
        """The same. Waits for the device, which an iteration has done anyway before its end."""
        waits, self._waits = self._waits, []
        for _, ended in waits:  # not only the last one: they may be of several streams
            ended.synchronize()
        return sum(begun.elapsed_time(ended) for begun, ended in waits) / 1e3


class OwnTime:
    """Of one process, whichever slot it holds. `slows`: which process is slowed on purpose, for experiments."""

    def __init__(self, waits: Any, slows: tuple[Slow, ...], num_forwards: int) -> None:
        """`num_forwards`: forward passes of an iteration, each of which gets its share of the delay."""
        self.waits = waits
        self._slows, self._num_forwards = slows, num_forwards
        self._recent_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._delay_s = 0.0

    def take(self, time_s: float) -> float:
        """Own seconds of the iteration that has just ended after `time_s`."""
        own_s = max(0.0, time_s - self.waits.take())
        self._recent_s.append(own_s)
        return own_s

    def begin(self, slot: int, iteration: int) -> str:
        """The process is about to run `iteration` in `slot`. Returns what is to be said if it gets slow now."""
        due = [slow for slow in self._slows if (slow.slot, slow.iteration) == (slot, iteration)]
        if not due or not self._recent_s:
            return ""
        own_s = median(self._recent_s)
        self._delay_s = (due[0].factor - 1) * own_s / self._num_forwards
        return (f"slot {slot}: this process works {due[0].factor:g} times as long from iteration {iteration} on "
                f"(--slow), so far {own_s:.3f} s an iteration")

    def delay(self) -> None:
        """Called in each forward pass: a slow process is slow here. It stays so, in whatever slot."""
        if self._delay_s:
            time.sleep(self._delay_s)


def build_own_time(config: Config, options: Options) -> OwnTime | None:
    """None where nobody wants it: measuring costs a little at each collective."""
    if not (options.find_stragglers or options.slow):
        return None
    return OwnTime(HostWaits() if device.is_cpu() else DeviceWaits(),
                   tuple(parse_slow(text, config.job_size) for text in options.slow),
                   config.num_microbatches * config.vpp)
