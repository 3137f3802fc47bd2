"""As bodies.py, where old communicators make room for new ones: parked, or closed."""
from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import Any

from nccl_tools import TIMEOUT_S, check_sums, costs, make, ready, used_mib
from ranks import Rank

from migration.communicators.nccl import NcclCommunicator, Stage


def park_and_resume(own: Rank) -> dict[str, Any]:
    """New connected ahead and suspended, old suspended, new resumed and used; then back again, as a move that aborts at
    the boundary would."""
    live = ready(own, "live", "parked")
    before_mib = used_mib(own, "before")
    following = make(own, "next", "parked")
    following.prepare(own.store, TIMEOUT_S)
    assert following.stage is Stage.PARKED and following._bare.memory_stats().is_suspended
    parked_mib = used_mib(own, "parked") - before_mib
    check_sums(own, live.inner)
    following.connect_ahead(own.device)
    assert following.stage is Stage.PARKED and following.inner is None
    ahead_mib = used_mib(own, "connected and parked") - before_mib
    check_sums(own, live.inner)
    live.park()
    following.activate()
    check_sums(own, following.inner)
    assert [stage for stage, _ in following.take_costs()].count("connect") == 1, "it is connected already"
    switched_mib = used_mib(own, "switched") - before_mib
    following.park()
    live.resume()
    assert live.probe(own.device) == following.probe_digest
    check_sums(own, live.inner)
    following.close()  # parked, so its members resume it first
    check_sums(own, live.inner)
    live.close()
    after_mib = used_mib(own, "after") - before_mib
    return {"parked_mib": parked_mib, "ahead_mib": ahead_mib, "switched_mib": switched_mib, "after_mib": after_mib,
            "costs": costs(following), "live_costs": costs(live)}


def parked_memory(own: Rank, num_communicators: int = 8) -> dict[str, Any]:
    """What one more parked communicator takes, MiB on this GPU for all its ranks, by what is done to it, one by one.

    First step by step: init, suspend. Then as the product does it: prepared, and some of them activated, which torch
    adopts, and parked again. What is left when they are closed, and when suspended ones are aborted.
    """
    steps: dict[str, list[float]] = {"init": [], "suspend": []}
    begin_mib = used_mib(own, "begin")
    stepped = []
    for i in range(num_communicators):
        communicator = make(own, f"step {i}", "parked")
        _park_step_by_step(own, communicator, steps)
        stepped.append(communicator)
    stats = asdict(stepped[-1]._bare.memory_stats())
    _close_all(own, stepped)
    closed_mib = used_mib(own, "closed")
    prepared, prepared_mib, before_mib = [], [], closed_mib
    for i in range(num_communicators):
        prepared.append(make(own, f"prepared {i}", "parked"))
        prepared[-1].prepare(own.store, TIMEOUT_S)
        prepared_mib.append(used_mib(own, f"prepared {i}") - before_mib)
        before_mib += prepared_mib[-1]
    used_again_mib = []
    for communicator in prepared[:2]:
        communicator.activate()
        check_sums(own, communicator.inner)
        communicator.park()
        used_again_mib.append(used_mib(own, f"{communicator.name} again") - before_mib)
        before_mib += used_again_mib[-1]
    _close_all(own, prepared[:4])
    half_mib = used_mib(own, "half")
    for communicator in prepared[4:]:
        communicator.abort()
        communicator.wait_aborted(30.0)
        communicator.close()
    aborted_mib = used_mib(own, "aborted")
    return {**{f"{name}_mib": values for name, values in steps.items()}, "stats": stats, "prepared_mib": prepared_mib,
            "activated_and_parked_mib": used_again_mib, "left_after_stepped_mib": closed_mib - begin_mib,
            "left_after_4_closed_mib": half_mib - closed_mib - sum(prepared_mib[4:]),
            "left_after_4_aborted_mib": aborted_mib - half_mib + sum(prepared_mib[4:])}


def _park_step_by_step(own: Rank, communicator: NcclCommunicator, steps: dict[str, list[float]]) -> None:
    before_mib = used_mib(own, f"{communicator.name} before")
    communicator._bare.init(communicator._meet(own.store, time.monotonic() + TIMEOUT_S))
    communicator._become(Stage.PREPARED)
    init_mib = used_mib(own, f"{communicator.name} init")
    communicator._suspend()
    steps["init"].append(init_mib - before_mib)
    steps["suspend"].append(used_mib(own, f"{communicator.name} suspend") - init_mib)


def _close_all(own: Rank, communicators: list[NcclCommunicator]) -> None:
    for communicator in communicators:
        communicator.close()
        assert communicator.stage is Stage.CLOSED
    gc.collect()


def lazy_and_rebuild(own: Rank) -> dict[str, Any]:
    """Without parking: the old one is closed, the new one used; then the old one is built anew."""
    live = ready(own, "live")
    digest = live.probe_digest
    following = make(own, "next")
    following.prepare(own.store, TIMEOUT_S)
    assert following.stage is Stage.PREPARED
    live.park()
    assert live.needs_rebuild
    following.activate()
    check_sums(own, following.inner)
    following.close()
    live.rebuild(own.store, TIMEOUT_S)
    assert live.probe(own.device) == digest
    check_sums(own, live.inner)
    live.close()
    return {"costs": costs(following), "rebuilt": costs(live)}
