"""Which process groups training uses. Of those that Megatron-Core makes, most never carry anything.

Only used ones are connected before they are needed: connecting takes 0.1 s to 0.5 s and up to 280 MiB of a GPU each.
The first iteration tells which they are; the others NCCL connects when they are first used, if ever, as it does in any
job. Names are torch's running numbers, the same on all processes.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set

import torch
import torch.distributed as dist

from migration.stores import wait_for_keys


def union(own: Set[str], device: torch.device, check: Callable[[], None]) -> frozenset[str]:
    """What any process of torch's world has used. Collective over it.

    `check` raises where operations were aborted, which leaves garbage behind without an error.
    """
    last = torch.tensor([max(map(int, own), default=0)], device=device)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    num_flags = int(last.item()) + 1
    check()
    flags = torch.zeros(num_flags, dtype=torch.int32)
    flags[[int(name) for name in own]] = 1
    flags = flags.to(device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    found = flags.nonzero().flatten().tolist()
    check()
    return frozenset(map(str, found))


def tell(store: dist.Store, slot: int, used: frozenset[str] | None) -> None:
    """On the store at which a generation's members meet: what the holder of `slot` knows; None: nothing."""
    store.set(_key(slot), json.dumps(None if used is None else sorted(used)))


def ask(store: dist.Store, slots: Iterable[int], timeout_s: float) -> frozenset[str] | None:
    """What the holders of `slots` know together: the same for whoever asks. None if none of them knows anything.

    Raises DeadlineExpired if one hasn't told in `timeout_s`, and RuntimeError when the store's server goes away.
    """
    keys = [_key(slot) for slot in slots]
    wait_for_keys(store, keys, timeout_s, "groups that training uses")
    known = [used for used in (json.loads(store.get(key)) for key in keys) if used is not None]
    return frozenset(name for used in known for name in used) if known else None


def _key(slot: int) -> str:
    return f"used/{slot}"
