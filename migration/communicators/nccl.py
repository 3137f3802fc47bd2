"""The NCCL communicator: prepared beside training by our bindings, used through stock ProcessGroupNCCL.

| call | stage after it | by which thread | who joins |
| --- | --- | --- | --- |
| `prepare` | PREPARED, or PARKED by policy | prepare thread | the members |
| `connect` (policy `connected`) | CONNECTED | training thread, at a boundary, one group a boundary | the members |
| `activate` | CONNECTED | training thread | the members, unless it is connected already |
| `park` / `resume` (old one) | PARKED, or CLOSED if `lazy` / CONNECTED | training thread | the members, leaver too |
| `rebuild` after `lazy` | CONNECTED | training thread | the members |
| `abort` | ABORTED; the wait under way ends with an error | any | nobody |
| `close` | CLOSED | one thread, in one order on all members | the members, if it was parked or connected |

Owns the bare communicator until torch's group adopts it, and its stages and costs. Knows nothing of moves. Its group's
work has no own deadline: a wait on the device ends when all have come, or when somebody calls `abort`.
"""
from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from migration.communicators import nccl_device
from migration.communicators.base import OPERATION_TIMEOUT_S, Communicator, StageCost
from migration.communicators.nccl_meeting import meet
from migration.communicators.nccl_policy import NcclPolicy, choose_switch, connected_peers
from migration.errors import MoveFailed
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.library import Library
from nccl_bindings.operations import new_unique_id
from third_party.pytorch.nccl_group import backend_of, build_nccl

_log = logging.getLogger(__name__)


class Stage(Enum):
    NEW = "new"
    PREPARED = "prepared"
    PARKED = "parked"
    CONNECTED = "connected"
    CLOSED = "closed"
    ABORTED = "aborted"


class NcclCommunicator(Communicator):
    """`peers`: group ranks to connect to for point-to-point, None for what the policy says; symmetric over the group.

    `switch` is agreed by the members in `prepare`: the weakest of their choices. Whoever parks an old communicator
    for a new one sets the old one's to the new one's before, on the leaver too.
    """

    probes_when_prepared = False  # a probe connects, and the prepare thread must not: call it after `activate`

    def __init__(self, name: str, slots: tuple[int, ...], group_rank: int, *, device: torch.device, library: Library,
                 policy: NcclPolicy, num_groups: int = 1, peers: tuple[int, ...] | None = None) -> None:
        super().__init__(name, slots, group_rank)
        self.device, self.library, self.policy = device, library, policy
        self.num_groups = num_groups  # that this process prepares for the same move
        self.peers = connected_peers(policy.p2p, group_rank, len(slots)) if peers is None else peers
        self.switch = ""
        self.stage = Stage.NEW
        self._bare = Bare(library, group_rank, len(slots), name)
        self._operation_timeout_s = OPERATION_TIMEOUT_S
        self._owner_lock = threading.Lock()  # held while the bare communicator changes its owner

    # ---- stage 1

    def prepare(self, store: dist.Store, timeout_s: float, operation_timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        self._expect(Stage.NEW)
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            raise MoveFailed(f"{self.name}: NCCL_NVLS_ENABLE must be 0 before NCCL starts, or init can't be aborted")
        torch.cuda.set_device(self.device)  # of this thread
        self._operation_timeout_s = operation_timeout_s
        ends_s = time.monotonic() + timeout_s
        with self._measured("prepare"):
            unique_id = self._meet(store, ends_s)
            with self._deadline(ends_s - time.monotonic(), "init"):
                self._bare.init(unique_id, **self._config_fields())
            with self._owner_lock:
                self._expect(Stage.NEW)
                self.inner = self._adopt()
                self.stage = Stage.PREPARED
            if self.switch == "parked":
                self._suspend()

    def _meet(self, store: dist.Store, ends_s: float) -> bytes:
        """Settles `switch`; returns the unique id."""
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        wanted = choose_switch(self.policy, can_park=self.library.has("park"), free_bytes=free_bytes,
                               num_groups=self.num_groups)
        size = len(self.slots)
        agreed, unique_id = meet(store, self.name, self.group_rank, size, wanted,
                                 lambda: new_unique_id(self._bare.raw), ends_s)
        self.switch = agreed if size > 1 else "connected"
        return unique_id

    def _adopt(self) -> Any:
        """What a handle forwards to: a stock group that owns the bare communicator from now on."""
        group = build_nccl(None, self.name, self.group_rank, len(self.slots), self.device, ranks=self.slots,
                           communicator=self._bare.pointer, operation_timeout_s=self._operation_timeout_s)
        self._bare.hand_over()
        return group

    def _config_fields(self) -> dict[str, int]:
        return {} if self.policy.max_ctas is None else {"maxCTAs": self.policy.max_ctas}

    # ---- stage 2

    def connect(self) -> None:
        """Connect with every algorithm and pair that training uses; idle otherwise. Takes 0.15 s and the memory."""
        self._expect(Stage.PREPARED)
        timeout_s = self.policy.connect_timeout_s
        with self._measured("connect"), self._deadline(timeout_s, "connecting"):
            nccl_device.connect(self._bare, self.device, self.policy.connect_sizes_bytes, self.peers,
                                lambda: self._wait("connecting", timeout_s))
        self._become(Stage.CONNECTED)

    @property
    def connects_ahead(self) -> bool:
        return self.stage is Stage.PREPARED and self.switch == "connected"

    def activate(self) -> None:
        if self.stage is Stage.CONNECTED:
            return
        with self._measured("activate"):
            if self.stage is Stage.PARKED:
                self._resume_memory()
            self.connect()

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
            with self._measured("park"):
                self._suspend()
        elif self.switch == "lazy":
            self.close()

    def resume(self) -> None:
        if self.stage is Stage.CLOSED:
            raise MoveFailed(f"{self.name}: was closed to make room (policy lazy): rebuild it")
        if self.stage is Stage.PARKED:
            with self._measured("resume"):
                self._resume_memory(Stage.CONNECTED)

    @property
    def needs_rebuild(self) -> bool:
        """Whether `resume` can't bring it back."""
        return self.stage is Stage.CLOSED

    def rebuild(self, store: dist.Store, timeout_s: float) -> None:
        """Make it anew after `lazy` has closed it: `inner` is another object then. Collective over the members."""
        self._expect(Stage.CLOSED)
        self._bare = Bare(self.library, self.group_rank, len(self.slots), self.name)
        self.stage = Stage.NEW
        self.prepare(dist.PrefixStore("rebuilt", store), timeout_s, self._operation_timeout_s)
        self.activate()

    def _suspend(self) -> None:
        with self._deadline(self.policy.park_timeout_s, "parking"):
            self._bare.suspend()
        self._become(Stage.PARKED)

    def _resume_memory(self, stage: Stage = Stage.PREPARED) -> None:
        with self._deadline(self.policy.park_timeout_s, "resuming"):
            self._bare.resume()
        self._become(stage)

    # ---- the end

    def abort(self) -> None:
        """Returns at once; the work is done on a thread of its own, since NCCL may take its time over it."""
        with self._owner_lock:
            if self.stage in (Stage.ABORTED, Stage.CLOSED):
                return
            self.stage = Stage.ABORTED
            inner = self.inner
        threading.Thread(target=self._abort_now, args=(inner,), name=f"abort {self.name}", daemon=True).start()

    def _abort_now(self, inner: Any) -> None:
        try:
            if self._bare.owned:
                self._bare.abort()
            else:
                self._bare.mark_aborted()
                backend_of(inner).abort()
        except Exception:  # nobody waits for this thread; the process may go on without the memory
            _log.exception("%s: abort", self.name)

    def close(self) -> None:
        """Collective over the members if it was parked or connected: in one order on all of them.

        Every wait has a deadline; what isn't done by then is logged and left behind.
        """
        if self.stage is Stage.CLOSED:
            return
        connected = self.stage is Stage.CONNECTED
        if self.stage is Stage.PARKED:
            connected = "connect" in self.costs
            try:
                self._resume_memory()  # NCCL can't free memory that isn't mapped
            except RuntimeError:
                _log.exception("%s: couldn't be resumed to be closed; its memory may be lost", self.name)
        with self._owner_lock:
            aborted = self.stage is Stage.ABORTED
            inner, self.inner = self.inner, None
            self.stage = Stage.CLOSED
        if self._bare.owned:  # no torch group has it: a pair, or its init failed or never began
            self._bare.abort()
        elif not aborted:
            self._free(backend_of(inner), connected)

    def _free(self, backend: Any, connected: bool) -> None:
        """One that was never connected has nothing to flush, so it is freed without its peers."""
        worker = threading.Thread(target=backend.shutdown if connected else backend.abort, name=f"close {self.name}",
                                  daemon=True)
        worker.start()
        worker.join(self.policy.close_timeout_s)
        if worker.is_alive():
            _log.warning("%s: still not closed after %s s; left to a thread", self.name, self.policy.close_timeout_s)

    # ---- inside

    def _wait(self, what: str, timeout_s: float) -> None:
        nccl_device.wait_for_stream(self._bare, self.device, time.monotonic() + timeout_s, what, self.abort)

    def _deadline(self, timeout_s: float, what: str) -> contextlib.AbstractContextManager[None]:
        return nccl_device.deadline(f"{self.name}: {what}", timeout_s, self.abort)

    @contextlib.contextmanager
    def _measured(self, stage: str) -> Iterator[None]:
        free_before, _ = torch.cuda.mem_get_info(self.device)
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        free_after, _ = torch.cuda.mem_get_info(self.device)
        self.costs[stage] = StageCost(seconds=seconds, device_bytes=free_before - free_after)

    def _become(self, stage: Stage) -> None:
        with self._owner_lock:
            if self.stage is Stage.ABORTED:
                raise MoveFailed(f"{self.name} was aborted before it was {stage.value}")
            self.stage = stage

    def _expect(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise MoveFailed(f"{self.name} is {self.stage.value}, expected {stage.value}")
