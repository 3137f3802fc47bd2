"""Process groups whose identity outlives their communicator; the only file that makes or frees communicators.

Megatron-Core asks torch for its groups as always and gets handles (third_party/pytorch/process_group.py). What is
inside a handle belongs to a generation. A move prepares the next generation's communicators of the touched groups
beside the live ones, and at the commit the handles point to them; untouched groups keep theirs.

Knows nothing of MPI, of the protocol, or of what moves.
"""
from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist

from migration.communicators.base import Communicator
from migration.communicators.makers import GlooMaker, Maker
from migration.communicators.sandbox import SandboxCommunicator
from migration.errors import MoveFailed
from third_party.pytorch import process_group as wiring


def start_store(host: str) -> dist.TCPStore:
    """The store that bootstraps one generation, served by the controller's process and needed only meanwhile.

    Dropping it ends every wait on it, at every member: that is how a half-built generation is aborted.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def connect_store(address: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    host, port = address
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Groups:
    """Every handle of this process, their live communicators, and those of the generation being prepared.

    One object in a process, since torch keeps a backend's creator for ever. `maker` makes the real ones.
    """

    def __init__(self, device: torch.device, maker: Maker | None = None) -> None:
        self.device = device
        self._maker = maker or GlooMaker()
        self.handles: dict[str, wiring.MigratableGroup] = {}
        self._live: dict[str, Communicator] = {}
        self._next: dict[str, Communicator] = {}
        self._solo: Communicator | None = None
        self._closer = _Closer()
        wiring.register(self._create_handle)

    # ---- handles

    def _create_handle(self, name: str, group_rank: int, slots: tuple[int, ...]) -> wiring.MigratableGroup:
        handle = wiring.MigratableGroup(name, group_rank, slots)
        communicator = SandboxCommunicator(name, slots, group_rank)
        communicator.prepare()
        handle.inner = communicator.inner
        self.handles[name] = handle
        return handle

    def open(self, slot: int, job_size: int) -> None:
        """Make torch's world as `slot` of `job_size`: handles only, in a sandbox. Nobody else is needed."""
        assert not self.handles, "the handles of another slot are still open"
        dist.init_process_group(wiring.BACKEND, store=dist.HashStore(), rank=slot, world_size=job_size)

    def close(self) -> None:
        """Forget the slot: drop torch's world and close every live communicator in the background."""
        dist.destroy_process_group()
        self.handles.clear()
        self._closer.close_all(list(self._live.values()))
        self._live.clear()
        self.discard()
        gc.collect()  # Megatron's objects refer to each other in cycles

    def isolate(self) -> None:
        """From now on this process's groups answer by themselves, without peers, as while they are being opened."""
        for handle in self.handles.values():
            communicator = SandboxCommunicator(handle.name, handle.slots, handle.rank())
            communicator.prepare()
            handle.inner = communicator.inner

    @property
    def num_communicators(self) -> int:
        """Communicators held: live, being prepared, and not yet closed."""
        return len(self._live) + len(self._next) + self._closer.num_waiting + (self._solo is not None)

    # ---- the next generation

    def touched(self, slots: Iterable[int]) -> list[wiring.MigratableGroup]:
        """Handles of more than one slot with a member in `slots`, in the order that is one on all members."""
        wanted = set(slots)
        found = [h for h in self.handles.values() if h.size() > 1 and wanted.intersection(h.slots)]
        return sorted(found, key=lambda h: (len(h.name), h.name))  # torch's names are running numbers

    def prepare(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float) -> str:
        """Stage 1: build the next generation's communicators of the groups touched by `slots`, one after the other.

        Collective over each group. Runs on the prepare thread beside training. Returns the digest of the adversarial
        reductions on them. Raises RuntimeError when a member doesn't come in `timeout_s` or the move is aborted.
        """
        assert not self._next, f"generation {generation}: the last preparation was neither adopted nor discarded"
        handles = self.touched(slots)
        with self._maker.background():
            self._make_solo()
            for handle in handles:
                communicator = self._maker.make(f"g{generation}/{handle.name}", handle.slots, handle.rank(),
                                                num_groups=len(handles))
                self._next[handle.name] = communicator  # before it is prepared, so that `abort_next` can end that too
                communicator.prepare(store, timeout_s)
                if generation and communicator.switch == "lazy":
                    raise MoveFailed(f"group {handle.name}: the device lacks memory for a second connected one, "
                                     "and this NCCL can't park the old one (2.30.3 can); free memory, or take it")
                self._maker.connect_ahead(communicator)
                if communicator.probes_when_prepared:
                    communicator.probe(self.device)
        return _join(self._next.values(), when_prepared=True)

    def learn_switches(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float) -> None:
        """A leaver's part in stage 1: what the others will do with the communicators it shares with them."""
        for handle in self.touched(slots):
            self._live[handle.name].switch = self._maker.agreed_switch(
                f"g{generation}/{handle.name}", handle.slots, store, time.monotonic() + timeout_s)

    def prepare_pair(self, name: str, store: dist.Store, group_rank: int, timeout_s: float,
                     operation_timeout_s: float) -> Communicator:
        """The two-member communicator of a leaver (rank 0) and its joiner (rank 1). Collective over the two.

        The caller owns it; `release_pair` frees it.
        """
        communicator = self._maker.make_pair(name, group_rank)
        communicator.prepare(store, timeout_s, operation_timeout_s)
        with self._maker.background():
            communicator.activate()
        return communicator

    def background(self) -> AbstractContextManager[object]:
        """What a thread beside the training thread works in."""
        return self._maker.background()

    def release_pair(self, communicator: Communicator) -> None:
        self._closer.close_all([communicator])

    def live_probe(self, slots: Iterable[int]) -> str:
        """The same digest, of the live communicators of those groups, kept since they were built."""
        return _join((self._live[h.name] for h in self.touched(slots)), when_prepared=True)

    @property
    def unconnected(self) -> list[str]:
        """Names of prepared groups that can be connected ahead of the pause, old and new side by side."""
        return [name for name, communicator in self._next.items() if communicator.connects_ahead]

    def describe_costs(self, stage: str) -> str:
        """What a stage of the prepared communicators took, for the log; empty where no device memory is at stake."""
        costs = {n: c.costs[stage] for n, c in self._next.items() if stage in c.costs}
        switches = ", ".join(sorted({self._next[name].switch for name in costs}))
        total = sum(c.seconds for c in costs.values()), sum(c.device_bytes for c in costs.values())
        return (f"{stage} of {len(costs)} groups ({switches}): {total[0]:.3f} s, device memory {total[1] / 2**20:+.0f} "
                "MiB on a GPU that others may use too") if costs else ""

    def connect(self, names: Iterable[str]) -> None:
        """Stage 2 ahead of the pause, by the training thread. Collective over each of these groups."""
        for name in names:
            if name in self._next:
                self._activate(self._next[name])

    def activate(self) -> tuple[str, str]:
        """Stage 2, at the boundary: park the old communicators and activate the new ones, group by group.

        Collective over each group, where it parks or connects. Returns the (old, new) probe digests of communicators
        that aren't probed when prepared; empty if there are none.
        """
        old = _join((self._live[name] for name in self._next if name in self._live), when_prepared=False)
        for name, communicator in self._next.items():
            if name in self._live:
                self._live[name].switch = communicator.switch
                self._live[name].park()
            self._activate(communicator)
        return old, _join(self._next.values(), when_prepared=False)

    def _activate(self, communicator: Communicator) -> None:
        communicator.activate()
        if not communicator.probe_digest:
            communicator.probe(self.device)

    def abort_next(self) -> None:
        """End every operation under way on prepared communicators. From any thread; `discard` frees them."""
        for communicator in list(self._next.values()):
            communicator.abort()

    def park(self, slots: Iterable[int]) -> str:
        """A leaver's part in stage 2: park what the others park. Collective over each group. Returns the old probes."""
        touched = [self._live[h.name] for h in self.touched(slots)]
        for communicator in touched:
            communicator.park()
        return _join(touched, when_prepared=False)

    def adopt(self) -> tuple[int, int]:
        """The commit: handles point to the next generation. Returns (rebuilt, kept) groups.

        Counted are groups of more than one slot in which this process comes first, so that the sum over the job's
        processes is the number of groups. The old communicators stay open until `retire`: a member that still waits
        for the verdict may use them.
        """
        for name, communicator in self._next.items():
            self.handles[name].inner = communicator.inner
            if name in self._live:
                self._closer.hold(self._live[name])
            self._live[name] = communicator
        first_in = [h.name for h in self.handles.values() if h.size() > 1 and h.rank() == 0]
        num_rebuilt = sum(name in self._next for name in first_in)
        self._next.clear()
        self._make_solo()  # where no group of several was prepared
        for handle in self.handles.values():
            if handle.size() == 1:
                handle.inner = self._solo.inner
        return num_rebuilt, len(first_in) - num_rebuilt

    def _make_solo(self) -> None:
        """Groups of one share one communicator for the life of the process: nobody else is in them."""
        if self._solo is None:
            self._solo = self._maker.make("solo", (0,), 0, num_groups=1)
            self._solo.prepare(dist.HashStore(), 60.0)
            self._solo.activate()

    def retire(self) -> None:
        """After everybody has acknowledged the commit: close the old generation in the background, in one order."""
        self._closer.release()

    def resume(self, slots: Iterable[int]) -> None:
        """The move aborted at the boundary: the live communicators go on. Collective over each parked group."""
        for handle in self.touched(slots):
            if handle.name in self._live:  # a joiner has none
                self._live[handle.name].resume()

    def discard(self) -> None:
        """The move aborted: close what was prepared, in the background."""
        self._closer.close_all(list(self._next.values()))
        self._next.clear()

    def shutdown(self) -> None:
        """Close everything at the end of the run and wait for it."""
        self._closer.stop()


def _join(communicators: Iterable[Communicator], *, when_prepared: bool) -> str:
    return " ".join(c.probe_digest for c in communicators if c.probes_when_prepared is when_prepared)


class _Closer:
    """Closes communicators on a thread of its own: a destructor takes about 40 ms, which training needn't wait for."""

    def __init__(self) -> None:
        self._held: list[Communicator] = []
        self._queue: queue.SimpleQueue[Communicator | None] = queue.SimpleQueue()
        self._num_queued = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._held) + self._num_queued

    def hold(self, communicator: Communicator) -> None:
        with self._lock:
            self._held.append(communicator)

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        self.close_all(held)

    def close_all(self, communicators: list[Communicator]) -> None:
        if communicators and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="closer", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_queued += len(communicators)
        for communicator in communicators:
            self._queue.put(communicator)

    def _run(self) -> None:
        while (communicator := self._queue.get()) is not None:
            communicator.close()
            del communicator
            with self._lock:
                self._num_queued -= 1

    def stop(self) -> None:
        self.release()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(30.0)
