"""The thread that prepares the next generation of a job's groups beside its training, and discards it.

It rests between groups as a move's preparation does, and knows at any time which of that it is at.
"""
from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch

from analysis.ranks import Rank
from migration import pacing
from migration.communicators.base import Communicator
from migration.groups import Groups
from migration.options import Options
from migration.stores import connect_store, start_store

TIMEOUT_S = 60.0  # of one preparation
RESTS_S = pacing.all_rests_s(Options(run="").prepare_deadline_s, float("inf"))  # as in a long run
HANG_S = 150.0 + RESTS_S  # after which a round is hung
MOVING = (0,)     # the slot that would move: it is in every group, and in none alone, so that each has an old one too
POLL_S = 0.002


class Preparer(threading.Thread):
    """One preparation of all groups for a generation that never comes."""

    def __init__(self, own: Rank, groups: Groups, number: int) -> None:
        super().__init__(name="prepare", daemon=True)
        self._own, self._groups, self._number = own, groups, number
        self.prepared_s = self.closed_s = float("inf")
        self.row: dict[str, float] = {}  # of the round's figures
        self._rests_s = 0.0
        self._resting_since_s = float("inf")
        self.error: Exception | None = None

    def kind_of(self, start_s: float) -> str:
        """Of an iteration that began at start_s and has just ended."""
        if start_s < self.prepared_s:
            return "resting" if self._resting_since_s <= start_s else "preparing"
        return "closing" if start_s < self.closed_s else "undisturbed"

    def run(self) -> None:
        try:
            self._prepare_and_discard()
        except Exception as error:  # the training thread raises it
            self.error = error

    def _prepare_and_discard(self) -> None:
        own, groups, device = self._own, self._groups, self._own.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        num_held, live = groups.num_communicators, groups.communicators
        server, store = fresh_store(own, f"round {self._number}")
        free_before, started_s = free_bytes(device), time.perf_counter()
        self._rests_until_s = time.monotonic() + RESTS_S
        groups.prepare(1 + self._number, store, MOVING, TIMEOUT_S, after_each=self._rest)
        device_bytes = free_before - free_bytes(device)
        self.prepared_s = time.perf_counter()
        own.barrier(f"round {self._number} prepared")
        del server
        prepared = [communicator for communicator in groups.communicators if communicator not in live]
        wanted = own.arguments["switch"]
        if unlike := [f"{c.name} {c.switch}" for c in prepared if c.switch != wanted]:
            raise RuntimeError(f"these were prepared otherwise than {wanted}: {', '.join(unlike)}")
        groups.discard()
        wait_for(lambda: groups.num_communicators <= num_held, HANG_S, "what was prepared to close")
        self.closed_s = time.perf_counter()
        self.row = {"prepare_s": self.prepared_s - started_s, "close_s": self.closed_s - self.prepared_s,
                    "rests_s": self._rests_s, "device_bytes": device_bytes,
                    "work_s": statistics.median(communicator.work_s for communicator in prepared),
                    **{f"close_group_{stage}_s": statistics.median(c.costs[stage].seconds for c in prepared)
                       for stage in ("close", "resume") if stage in prepared[0].costs}}

    def _rest(self, communicator: Communicator, num_left: int) -> None:
        """As a stayer does in a move (preparation.py), but that nobody aborts."""
        seconds = pacing.rest_s(communicator.work_s, self._own.arguments["share"],
                                self._rests_until_s - time.monotonic(), num_left)
        self._resting_since_s = time.perf_counter()
        time.sleep(seconds)
        self._resting_since_s = float("inf")
        self._rests_s += seconds


def fresh_store(own: Rank, name: str) -> tuple[Any, Any]:
    """A store as a controller makes one for each generation: (the server on rank 0, this rank's connection)."""
    server = start_store("127.0.0.1") if own.rank == 0 else None
    if server is not None:
        own.store.set(f"port/{name}", str(server.port))
    return server, connect_store(("127.0.0.1", int(own.store.get(f"port/{name}"))), TIMEOUT_S)


def free_bytes(device: torch.device) -> int:
    """Of the device; 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)
