"""A stock torch process group on NCCL that adopts a prepared communicator, and grouping of its point-to-point calls.

Owns the private names of torch.distributed that NCCL needs (see README.md). Knows nothing of moves, slots or stages.
"""
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from third_party.nccl import overlay
from third_party.pytorch.process_group import MigratableGroup

_ID_KEY = "0"                    # under which ProcessGroupNCCL looks for the id of its first communicator
_NO_ID = "\0" * 128              # an adopted communicator needs none; torch checks the length only
_LOCAL_TIMEOUT = timedelta(seconds=10)


def build_nccl(store: dist.Store | None, name: str, group_rank: int, group_size: int, device: torch.device, *,
               communicator: int | None, ranks: Sequence[int], operation_timeout_s: float) -> ProcessGroup:
    """A stock group whose only backend is ProcessGroupNCCL on `device`, with its communicator in place.

    With a `communicator` (an ncclComm_t of this size and rank) it is adopted: not collective, no store needed, a few
    milliseconds; the group owns it from then on. Without one, torch makes one: collective over the members, through
    `store`. The communicator exists when this returns, so point-to-point calls share it instead of making one per
    pair. Raises RuntimeError when it wasn't adopted; then it still belongs to the caller.
    """
    if communicator is None and store is None:
        raise ValueError(f"{name}: a communicator or a store is needed")
    options = _options(name, ranks, operation_timeout_s)
    backend = dist.ProcessGroupNCCL(store or _local_store(), group_rank, group_size, options)
    backend._set_sequence_number_for_group()
    if communicator is None:
        backend.eager_connect_single_device(device)
    else:
        _adopt(backend, name, group_rank, group_size, device, communicator)
    group = ProcessGroup(store or dist.HashStore(), group_rank, group_size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    return group


def backend_of(group: ProcessGroup) -> Any:
    """The ProcessGroupNCCL inside."""
    return group._get_backend(torch.device("cuda"))


def communicator_of(group: ProcessGroup) -> int:
    """Its ncclComm_t on the current device; 0 if there is none."""
    return backend_of(group)._comm_ptr()


def _options(name: str, ranks: Sequence[int], operation_timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=operation_timeout_s)
    options.group_name = name
    options.global_ranks_in_group = list(ranks)
    options.config.blocking = 1  # torch's default may become non-blocking, which costs 0.2 ms a call
    return options


def _local_store() -> dist.Store:
    """A store of this process alone in which the id is found at once, whoever is rank 0."""
    store = dist.HashStore()
    store.set_timeout(_LOCAL_TIMEOUT)  # should torch look for another key, it fails soon instead of waiting
    store.set(_ID_KEY, _NO_ID)
    return store


def _adopt(backend: Any, name: str, group_rank: int, group_size: int, device: torch.device, communicator: int) -> None:
    loaded = overlay.loaded()
    loaded.hand_over(communicator, group_size, group_rank)
    try:
        backend.eager_connect_single_device(device)
    finally:
        left = loaded.take_back()
    if left:
        raise RuntimeError(f"{name}: torch made a communicator of its own instead of adopting the prepared one: the "
                           f"overlay {loaded.path} doesn't stand before NCCL in this process")


def install_p2p_grouping() -> None:
    """Make `batch_isend_irecv` on a MigratableGroup one grouped launch, as it is on a stock group. Once is enough.

    torch groups the calls only when the group's type is exactly ProcessGroup; one by one they deadlock on NCCL, where
    a send waits for its receive.
    """
    if getattr(dist.batch_isend_irecv, "groups_migratable", False):
        return
    stock = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group if p2p_op_list else None
        group = group or dist.group.WORLD
        if not isinstance(group, MigratableGroup):
            return stock(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        if not group.inner._get_backend(device).supports_coalescing:
            return stock(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for op in p2p_op_list:
                peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return manager.works

    batch_isend_irecv.groups_migratable = True
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
