"""The NCCL communicator: prepared beside training by our bindings, used through stock ProcessGroupNCCL.

| call | stage after it | by which thread | who joins |
| --- | --- | --- | --- |
| `prepare` | PREPARED, or PARKED by policy | prepare thread | the members |
| `connect_ahead` | CONNECTED, or PARKED as before | training thread, ahead of the pause | the members |
| `activate` | CONNECTED | training thread | the members, unless it is connected and not parked |
| `park` / `resume` (old one) | PARKED, or CLOSED if `lazy` / CONNECTED | training thread | the members, leaver too |
| `rebuild` after `lazy` | CONNECTED | training thread | the members |
| `abort` | ABORTED; the wait under way ends with an error | any | nobody |
| `close` | CLOSED | one thread, in one order on all members | the members, if it was parked or connected |

A parked one stays bare until it is activated: torch's group around it would take memory that parking can't give back.
One that was connected before it was parked needs no more than to be resumed: 0.01 s instead of 0.5 s.
Knows nothing of moves. Its group's work has no own deadline: a wait on the device ends when all have come, or when
somebody calls `abort`.
"""
from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from migration.communicators import nccl_device
from migration.communicators.base import OPERATION_TIMEOUT_S
from migration.communicators.nccl_life import NcclLife, Stage
from migration.communicators.nccl_meeting import meet
from migration.communicators.nccl_policy import NcclPolicy, choose_switch, connected_peers
from migration.errors import MoveFailed
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.library import Library
from nccl_bindings.operations import new_unique_id


class NcclCommunicator(NcclLife):
    """`peers`: group ranks to connect to for point-to-point, None for what the policy says; symmetric over the group.

    `switch` is agreed by the members in `prepare`: the weakest of their choices. Whoever parks an old communicator
    for a new one sets the old one's to the new one's before, on the leaver too.
    """

    probes_when_prepared = False  # a probe connects, and the prepare thread must not: call it after `activate`

    def __init__(self, name: str, slots: tuple[int, ...], group_rank: int, *, device: torch.device, library: Library,
                 policy: NcclPolicy, num_groups: int = 1, peers: tuple[int, ...] | None = None) -> None:
        super().__init__(name, slots, group_rank, device=device, library=library, policy=policy)
        self.num_groups = num_groups  # that this process is to connect for the same move
        self.peers = connected_peers(policy.p2p, group_rank, len(slots)) if peers is None else peers

    # ---- stage 1

    def prepare(self, store: dist.Store, timeout_s: float, operation_timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        self._expect(Stage.NEW)
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            raise MoveFailed(f"{self.name}: NCCL_NVLS_ENABLE must be 0 before NCCL starts, or init can't be aborted")
        torch.cuda.set_device(self.device)  # of this thread
        self._operation_timeout_s = operation_timeout_s
        ends_s = time.monotonic() + timeout_s
        with self.measured("prepare"):
            unique_id = self._meet(store, ends_s)
            met_s = time.perf_counter()
            with self._deadline(ends_s - time.monotonic(), "init"):
                self._bare.init(unique_id)
            self._become(Stage.PREPARED)
            if self.switch == "parked":
                self._suspend()
            else:
                self._adopt(Stage.PREPARED)
        self.work_s = time.perf_counter() - met_s

    def _meet(self, store: dist.Store, ends_s: float) -> bytes:
        """Settles `switch`; returns the unique id."""
        wanted = choose_switch(self.policy, can_park=self.library.has("park"), free_bytes=self.free_bytes(),
                               num_groups=self.num_groups)
        size = len(self.slots)
        agreed, unique_id = meet(store, self.name, self.group_rank, size, wanted,
                                 lambda: new_unique_id(self._bare.raw), ends_s)
        self.switch = agreed if size > 1 else "connected"
        return unique_id

    # ---- stage 2

    def connect(self) -> None:
        """Connect with every algorithm and pair that training uses; idle otherwise. Takes 0.15 s and the memory."""
        self._expect(Stage.PREPARED)
        timeout_s = self.policy.connect_timeout_s
        with self.measured("connect"), self._deadline(timeout_s, "connecting"):
            nccl_device.connect(self._bare, self.device, self.policy.connect_sizes_bytes, self.peers,
                                lambda: self._wait("connecting", timeout_s))
        self.work_s += self.costs["connect"].seconds  # which counts where the prepare thread does it
        self._has_connected = True
        self._become(Stage.CONNECTED)

    @property
    def is_connected(self) -> bool:
        return self._has_connected

    @property
    def is_prepared(self) -> bool:
        return self.stage in (Stage.PREPARED, Stage.PARKED, Stage.CONNECTED)

    @property
    def connects_ahead(self) -> bool:
        is_ready = (self.stage, self.switch) in ((Stage.PREPARED, "connected"), (Stage.PARKED, "parked"))
        return is_ready and self.connects and not self._has_connected

    @property
    def has_room_ahead(self) -> bool:
        return self.stage is not Stage.PARKED or self.free_bytes() >= self.policy.connected_bytes

    def connect_ahead(self, device: torch.device) -> None:
        if self.stage is not Stage.PARKED:
            super().connect_ahead(device)
        elif not self._has_connected:  # else the move's position has changed since
            with self.measured("unpark"):
                self._resume_memory(self.policy.park_timeout_s)
            self.connect()
            self.probe(device)
            with self.measured("repark"):
                self._suspend()

    def activate(self) -> None:
        if self.stage is Stage.CONNECTED or (self.stage is Stage.PREPARED and not self.connects):
            return
        with self.measured("activate"):
            if self.stage is Stage.PARKED:
                with self.measured("resume"):
                    self._resume_memory(self.policy.park_timeout_s)
            if self.connects and not self._has_connected:
                self.connect()
            if self.inner is None:  # it was parked
                with self.measured("adopt"):
                    self._adopt(Stage.CONNECTED if self._has_connected else Stage.PREPARED)

    def probe(self, device: torch.device) -> str:
        """As in base.py, for every size that NCCL may treat differently. By the training thread, after `activate`."""
        self._expect(Stage.CONNECTED)
        timeout_s = self.policy.connect_timeout_s
        with self._deadline(timeout_s, "probe"):
            self.probe_digest = nccl_device.probe(self._bare, device, self.slots[self.group_rank],
                                                  self.policy.probe_sizes, lambda: self._wait("probe", timeout_s))
        return self.probe_digest

    # ---- the old one, at the boundary

    def park(self) -> None:
        if self.switch == "parked" and self.stage in (Stage.CONNECTED, Stage.PREPARED):
            with self.measured("park"):
                self._suspend()
        elif self.switch == "lazy":
            with self.measured("park", as_one=True):
                self.close()

    def resume(self) -> None:
        if self.stage is Stage.CLOSED:
            raise MoveFailed(f"{self.name}: was closed to make room (policy lazy): rebuild it")
        if self.stage is Stage.PARKED:
            with self.measured("resume"):
                self._resume_memory(self.policy.park_timeout_s)

    @property
    def needs_rebuild(self) -> bool:
        return self.stage is Stage.CLOSED

    def rebuild(self, store: dist.Store, timeout_s: float) -> None:
        with self._owner_lock:
            self._expect(Stage.CLOSED)
            if self._is_given_up:
                raise MoveFailed(f"{self.name} was aborted before it was rebuilt")
            self._bare = Bare(self.library, self.group_rank, len(self.slots), self.name)
            self.stage, self._has_connected = Stage.NEW, False
        with self.measured("rebuild", as_one=True):
            self.prepare(dist.PrefixStore("rebuilt", store), timeout_s, self._operation_timeout_s)
            self.activate()
