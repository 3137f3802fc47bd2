"""A torch process group whose identity outlives its communicator, on the stock wheel.

Owns the private names of torch.distributed that the project touches (tried with torch 2.11 and 2.13):
`ProcessGroup._set_default_backend`, `_register_backend`, `_set_group_name`,
`ProcessGroupGloo._set_sequence_number_for_group`, `ProcessGroupGloo._Options` and the names of the collectives below.
Knows nothing of moves, slots or generations.

Megatron-Core holds a process group in some 70 places. So the group object stays, and what is inside it is replaced:
a subclass of `ProcessGroup` made by a backend registered with `extended_api=True` is accepted by `init_process_group`
and `new_group` as it is, and forwards each call to a stock group.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

BACKEND = "migratable"

# torch renamed some collectives (`_allgather_base` is `all_gather_single` in newer versions): both names are forwarded
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "gather", "scatter", "alltoall",
    "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource",
)
_PLUMBING = ("_start_coalescing", "_end_coalescing", "_get_backend", "set_timeout",
             "_get_sequence_number_for_group", "_wait_for_pending_works")


class MigratableGroup(ProcessGroup):
    """A process group handle; `inner` is the stock group (or a sandbox) that does the work.

    Megatron and torch keep references to this object for the whole run; only `inner` is ever replaced, and only by
    groups.py, at a boundary where no operation is outstanding.
    """

    def __init__(self, name: str, group_rank: int, slots: tuple[int, ...]) -> None:
        super().__init__(group_rank, len(slots))
        self.name = name
        self.description = ""
        self.slots = slots
        self.inner: Any = None
        self.is_used = False  # a collective has been asked for, since somebody looked

    # The C++ base knows a name only through its own backends, and it has none.
    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self.name

    def getGroupDesc(self) -> str:
        return self.description

    group_name = property(lambda self: self.name)
    group_desc = property(lambda self: self.description)

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    def _get_backend_name(self) -> str:
        return self.inner._get_backend_name()

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """The inner group has set its own."""

    def shutdown(self) -> None:
        """Nothing: groups.py alone closes communicators."""

    def abort(self) -> None:
        """Nothing: groups.py alone aborts communicators."""


class NoGroup:
    """Stands inside a handle while its communicator is away: whatever is called is refused, with `reason`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} now: {self._reason}")


def _forward(name: str, is_use: bool) -> Callable[..., Any]:
    # Written out per name: a lookup by string at each call would cost more than the call itself.
    namespace: dict[str, Any] = {}
    noted = "    self.is_used = True\n" if is_use else ""
    exec(f"def {name}(self, *args, **kwargs):\n{noted}    return self.inner.{name}(*args, **kwargs)\n", namespace)
    return namespace[name]


for _name in COLLECTIVES + _PLUMBING:
    if hasattr(ProcessGroup, _name):
        setattr(MigratableGroup, _name, _forward(_name, _name in COLLECTIVES))


def register(create: Callable[[str, int, tuple[int, ...]], MigratableGroup]) -> None:
    """Make `init_process_group("migratable")` and every `new_group` after it call `create(name, group_rank, slots)`.

    Once in a process: torch keeps a backend's creator for ever.
    """
    def creator(options: Any, _backend_options: Any = None) -> MigratableGroup:
        slots = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return create(options.group_id, options.group_rank, slots)

    dist.Backend.register_backend(BACKEND, creator, extended_api=True, devices=["cpu", "cuda"])


@functools.cache
def _gloo_devices() -> list[Any]:
    """One set for all groups of this process, on the interfaces that GLOO_SOCKET_IFNAME names, as torch does it.

    Every device has a thread that wakes up each 10 ms, and torch would make one for each group: with 20 groups in each
    of 8 processes those threads alone kept a scheduler of two cores busy enough to delay training.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return ([ProcessGroupGloo.create_device(interface=name) for name in names.split(",")] if names
            else [ProcessGroupGloo.create_default_device()])


def _gloo_options(operation_timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = _gloo_devices()
    options._timeout = timedelta(seconds=operation_timeout_s)
    return options


def meet_gloo(store: dist.Store, name: str, group_rank: int, group_size: int, timeout_s: float) -> None:
    """Until all members of a Gloo group have come. Collective over them, before `connect_gloo`.

    Raises RuntimeError when a member doesn't come within `timeout_s`, or when the store's server goes away.
    """
    # A Gloo context has one time-out for connecting and for every send and receive (setting the default one later
    # changes that of collectives only). So whoever doesn't come is noticed here, before Gloo connects.
    store.set(f"here/{group_rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(group_size)], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank in range(group_size) if not store.check([f"here/{rank}"])]
        raise RuntimeError(f"{name}: group ranks {missing} of {group_size} didn't come within {timeout_s:g} s"
                           ) from error


def connect_gloo(store: dist.Store, name: str, group_rank: int, group_size: int, operation_timeout_s: float
                 ) -> ProcessGroup:
    """A connected stock Gloo process group. Collective over its members, who have met.

    Nothing ends it before `operation_timeout_s` where a member is killed meanwhile that was to connect to this one.
    """
    group = ProcessGroup(store, group_rank, group_size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(store, group_rank, group_size, _gloo_options(operation_timeout_s))
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(name)
    return group


def build_gloo(store: dist.Store, name: str, group_rank: int, group_size: int, *, connect_timeout_s: float,
               operation_timeout_s: float) -> ProcessGroup:
    """Both: they meet within `connect_timeout_s`, and connect."""
    meet_gloo(store, name, group_rank, group_size, connect_timeout_s)
    return connect_gloo(store, name, group_rank, group_size, operation_timeout_s)
