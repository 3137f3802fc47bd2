"""Where the members of a communicator meet before NCCL begins: over the store, which has time-outs and can go away.

NCCL itself waits without a time-out for members that don't come, and the thread behind a unique id never ends. So the
id is made only when all are there. Knows nothing of devices.
"""
from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from migration.communicators.nccl_policy import weakest
from migration.stores import wait_for_keys


def meet(store: dist.Store, name: str, group_rank: int, group_size: int, switch: str, make_id: Callable[[], bytes],
         ends_s: float) -> tuple[str, bytes]:
    """Returns the switch that all members use, and the unique id, which the first member makes.

    Collective over the members. `ends_s` is time.monotonic(). Raises DeadlineExpired, naming who didn't come, and
    RuntimeError at once when the store's server goes away: that is how the move's controller ends this wait.
    """
    own = dist.PrefixStore(name, store)
    own.set(f"switch/{group_rank}", switch)
    agreed = agreed_switch(store, name, group_size, ends_s)
    if group_rank == 0:
        own.set("id", make_id().hex())
    wait_for_keys(own, ["id"], _left_s(ends_s), name)
    return agreed, bytes.fromhex(own.get("id").decode())


def agreed_switch(store: dist.Store, name: str, group_size: int, ends_s: float) -> str:
    """What the members of `name` do. Waits for all of them. For a leaver too: no member, but it parks the old one."""
    own = dist.PrefixStore(name, store)
    keys = [f"switch/{rank}" for rank in range(group_size)]
    wait_for_keys(own, keys, _left_s(ends_s), name)
    return weakest(own.get(key).decode() for key in keys)


def _left_s(ends_s: float) -> float:
    return max(ends_s - time.monotonic(), 0.001)
