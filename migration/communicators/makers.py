"""Who makes the communicators of a process: one maker per kind of device. groups.py asks it and nobody else does."""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from migration.communicators.base import Communicator
from migration.communicators.gloo import GlooCommunicator
from migration.communicators.nccl_policy import describe_pins

_log = logging.getLogger(__name__)


class Maker(ABC):
    """Makes communicators that are not prepared yet. `allow_lazy`: old ones may be closed before the commit."""

    allow_lazy = False

    @abstractmethod
    def make(self, name: str, slots: tuple[int, ...], group_rank: int, *, num_groups: int,
             beside_old: bool = True) -> Communicator:
        """Of a process group. `num_groups`: how many this process is to connect for the same move. `beside_old`: some
        member holds an old one, which may have to make room; the same on all members."""

    @abstractmethod
    def make_pair(self, name: str, group_rank: int) -> Communicator:
        """Of a leaver (group rank 0) and its joiner (1)."""

    @abstractmethod
    def describe(self) -> str:
        """What is used and how, for the log and the user."""

    def background(self) -> contextlib.AbstractContextManager[object]:
        """What the prepare thread works in."""
        return contextlib.nullcontext()

    def connect_beside(self, communicator: Communicator) -> None:
        """On the prepare thread, after stage 1: connect, where that doesn't wait for the boundary."""

    def recover_thread(self) -> None:
        """On the training thread, out of operations that were aborted: nothing of them hangs on to it."""

    @abstractmethod
    def agreed_switch(self, communicator_name: str, slots: tuple[int, ...], store: dist.Store, ends_s: float) -> str:
        """For a leaver, which has no part in the next generation: what its members do with the old communicator."""


class GlooMaker(Maker):
    """On a machine without CUDA. `switch` as for NCCL, `auto` being `connected`: host memory is there."""

    def __init__(self, switch: str = "auto", *, allow_lazy: bool = False) -> None:
        self._switch = "connected" if switch == "auto" else switch
        self.allow_lazy = allow_lazy

    def make(self, name: str, slots: tuple[int, ...], group_rank: int, *, num_groups: int = 1,
             beside_old: bool = True) -> Communicator:
        return GlooCommunicator(name, slots, group_rank, self._switch if beside_old else "connected")

    def make_pair(self, name: str, group_rank: int) -> Communicator:
        return GlooCommunicator(name, (0, 1), group_rank)

    def describe(self) -> str:
        return f"Gloo, switch {self._switch}"

    def agreed_switch(self, communicator_name: str, slots: tuple[int, ...], store: dist.Store, ends_s: float) -> str:
        return self._switch  # every member has the same


class NcclMaker(Maker):
    """On CUDA. `connect_in_background`: connect on the prepare thread, on a stream of its own, not in the pause."""

    def __init__(self, device: torch.device, switch: str, *, connect_in_background: bool, allow_lazy: bool,
                 close_by: str) -> None:
        from migration.communicators.nccl_policy import NcclPolicy, choose_switch
        from nccl_bindings.library import load
        from third_party.pytorch.nccl_group import install_p2p_grouping
        self._device, self._library = device, load()
        # A joiner waits in a connection until the others come to that boundary, and whoever resumes, for members that
        # still connect other groups; what hangs, the controller aborts long before these deadlines.
        # And whoever closes waits for members that rest between what they close before.
        self._policy = NcclPolicy(switch=switch, connect_timeout_s=600.0, park_timeout_s=600.0, close_timeout_s=120.0,
                                  close_by=close_by)
        self._policy.validate()
        choose_switch(self._policy, can_park=self._library.has("park"), free_bytes=0, num_groups=0)  # or raises
        self._connect_in_background, self.allow_lazy = connect_in_background, allow_lazy
        self._stream = torch.cuda.Stream(device)  # one for all: the allocator keeps what each stream has used
        install_p2p_grouping()

    def make(self, name: str, slots: tuple[int, ...], group_rank: int, *, num_groups: int = 1,
             beside_old: bool = True) -> Communicator:
        from migration.communicators.nccl import NcclCommunicator
        policy = self._policy if beside_old else dataclasses.replace(self._policy, switch="connected")
        return NcclCommunicator(name, slots, group_rank, device=self._device, library=self._library, policy=policy,
                                num_groups=num_groups)

    def make_pair(self, name: str, group_rank: int) -> Communicator:
        from migration.communicators.nccl_pair import NcclPair
        return NcclPair(name, (0, 1), group_rank, device=self._device, library=self._library, policy=self._policy)

    def describe(self) -> str:
        from nccl_bindings.library import version_text
        return (f"NCCL {version_text(self._library.version)}, switch {self._policy.switch}; "
                f"{describe_pins(os.environ)}")

    def background(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def connect_beside(self, communicator: Communicator) -> None:
        if self._connect_in_background and communicator.switch == "connected" and communicator.connects:
            communicator.connect()

    def recover_thread(self) -> None:
        from nccl_bindings.operations import leave_groups
        from nccl_bindings.raw import Raw
        if num := leave_groups(Raw(self._library)):
            _log.warning("NCCL had left %d groups open on this thread; they are ended", num)

    def agreed_switch(self, communicator_name: str, slots: tuple[int, ...], store: dist.Store, ends_s: float) -> str:
        from migration.communicators.nccl_meeting import agreed_switch
        return agreed_switch(store, communicator_name, len(slots), ends_s)


def build_maker(device: torch.device, switch: str, *, connect_in_background: bool, allow_lazy: bool = False,
                close_by: str = "abort") -> Maker:
    """The maker for `device`. `close_by`: on CUDA, see NcclPolicy."""
    if device.type == "cuda":
        return NcclMaker(device, switch, connect_in_background=connect_in_background, allow_lazy=allow_lazy,
                         close_by=close_by)
    return GlooMaker(switch, allow_lazy=allow_lazy)
