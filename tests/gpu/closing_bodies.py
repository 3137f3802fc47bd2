"""Communicators that are made, used and closed again and again, beside one that is busy: nothing may stay behind.

In a move each member closes the groups of the old generation, a leaver and its joiner also their pair.
"""
from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from nccl_tools import MIB, TIMEOUT_S, Busy, check_sums, make, ready, used_mib
from ranks import Rank

from migration.communicators.nccl import NcclCommunicator, Stage
from migration.communicators.nccl_pair import NcclPair
from migration.communicators.nccl_policy import NcclPolicy
from migration.timeline import process_counts

RESIDENT_MIB = 32  # of all rounds but the first quarter; an NCCL buffer between hosts alone has 4


def discard_rounds(own: Rank) -> dict[str, Any]:
    """Prepared on another thread while this one trains, and closed: a move that is given up."""
    switch = "parked" if own.library.has("park") else "lazy"

    def one(name: str, busy: Busy) -> None:
        discarded = make(own, name, switch)
        thread = threading.Thread(target=_prepare_and_close, args=(own, discarded))
        thread.start()
        busy.iterate(5)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive() and discarded.stage is Stage.CLOSED, f"{name}: {discarded.stage}"

    return {"switch": switch, **_rounds(own, 20, one)}


def _prepare_and_close(own: Rank, communicator: NcclCommunicator) -> None:
    communicator.prepare(own.store, TIMEOUT_S)
    communicator.close()


def group_rounds(own: Rank) -> dict[str, Any]:
    """Connected, used through torch's group, and closed: an old generation after a commit."""
    def one(name: str, busy: Busy) -> None:
        group = ready(own, name)
        check_sums(own, group.inner)
        busy.iterate(1)
        group.close()

    return _rounds(own, 12, one)


def pair_rounds(own: Rank) -> dict[str, Any]:
    """Connected, used in one direction, and closed by both ends: a leaver's and a joiner's pair."""
    def one(name: str, busy: Busy) -> None:
        two = NcclPair(name, (0, 1), own.rank, device=own.device, library=own.library, policy=NcclPolicy())
        two.prepare(own.store, TIMEOUT_S)
        two.activate()
        part = [torch.zeros(MIB, dtype=torch.uint8, device=own.device)]
        if own.rank == 0:
            two.send_all(part, 1)
        else:
            two.recv_all(part, 0)
        busy.iterate(1)
        two.close()

    return _rounds(own, 12, one)


def _rounds(own: Rank, num_rounds: int, one: Callable[[str, Busy], None]) -> dict[str, Any]:
    """`one`, which is given a name, so many times. What is there after a quarter of them must be all at the end."""
    live = ready(own, "live")
    busy = Busy(own, live.inner)
    rows = []
    for i in range(num_rounds):
        one(f"round {i}", busy)
        gc.collect()
        resident_bytes, num_fds, num_threads = process_counts()
        rows.append({"device_mib": used_mib(own, f"round {i}"), "threads": num_threads, "descriptors": num_fds,
                     "resident_mib": resident_bytes / MIB, "kinds": _descriptors()})
    check_sums(own, live.inner)
    live.close()
    early, late = rows[num_rounds // 4], rows[-1]
    slack = {"device_mib": 16 * own.world, "threads": 1, "descriptors": 2, "resident_mib": RESIDENT_MIB}
    grown = {name: late[name] - early[name] for name in slack if late[name] - early[name] > slack[name]}
    assert not grown, f"in {num_rounds - num_rounds // 4 - 1} rounds grew {grown}: {early} -> {late}"
    return {"early": early, "late": late}


def _descriptors() -> dict[str, int]:
    """Open ones by kind: socket, pipe, /dev/nvidia0, ..."""
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one of the listing itself
            continue
        kinds[re.sub(r":\[\d+\]$|\d{3,}.*", "", target)] += 1
    return dict(kinds)
