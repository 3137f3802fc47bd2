"""Process groups whose identity outlives their communicator; the only file that makes or frees communicators.

Megatron-Core asks torch for its groups as always and gets handles (third_party/pytorch/process_group.py). What is
inside a handle belongs to a generation. A move prepares the next generation's communicators of the touched groups
beside the live ones, and at the commit the handles point to them; untouched groups keep theirs.

Knows nothing of MPI, of the protocol, or of what moves.
"""
from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from migration.communicators.base import Communicator
from migration.communicators.closer import Closer
from migration.communicators.makers import GlooMaker, Maker
from migration.errors import MoveFailed
from migration.handles import Handles, place
from migration.stores import connect_store
from third_party.pytorch import process_group as wiring


CLOSE_PAUSE_S = 0.05
_ABORTS_S = 60.0  # for all communicators of a process to be aborted


class Groups(Handles):
    """Every handle of this process, their live communicators, and those of the generation being prepared.

    `maker` makes the real ones; at least `close_pause_s` lies between two that are closed, more where closing would
    take more than `close_share` of the time.
    """

    def __init__(self, device: torch.device, maker: Maker | None = None, close_pause_s: float = CLOSE_PAUSE_S,
                 close_share: float = 1.0) -> None:
        super().__init__()
        self.device = device
        self._maker = maker or GlooMaker()
        self._live: dict[str, Communicator] = {}
        self._next: dict[str, Communicator] = {}
        self._next_lock = threading.Lock()
        self._is_aborting = False  # the generation being prepared: nothing may be added to it any more
        self._solo: Communicator | None = None
        self._closer = Closer(close_pause_s, close_share)

    def close(self) -> None:
        """Forget the slot: drop torch's world and close every live communicator in the background."""
        if self.handles:
            dist.destroy_process_group()
        self.handles.clear()
        self._closer.close_all(list(self._live.values()))
        self._live.clear()
        self.discard()
        self._closer.hurry()  # nobody trains here
        gc.collect()  # Megatron's objects refer to each other in cycles

    def abort_all(self) -> None:
        """End every operation under way, of whatever generation. From any thread; `close_aborted` frees them."""
        self.abort_next()
        for communicator in [*self._live.values(), *self._closer.unclosed]:  # a close waits for members too
            communicator.abort()

    def close_aborted(self) -> None:
        """After `abort_all`, out of every operation: `close`, also where no slot is open. The memory is back then."""
        ends_s = time.monotonic() + _ABORTS_S
        for communicator in [*self._live.values(), *self._next.values(), *self._closer.unclosed]:
            communicator.wait_aborted(max(0.0, ends_s - time.monotonic()))
        self._closer.release()
        self.close()

    @property
    def num_communicators(self) -> int:
        """Communicators held: live, being prepared, and not yet closed."""
        return len(self.communicators) + self._closer.num_waiting + (self._solo is not None)

    @property
    def communicators(self) -> list[Communicator]:
        """Live ones and those being prepared, but for the one of the groups of one."""
        return [*self._live.values(), *self._next.values()]

    # ---- the next generation

    def connect_among_joiners(self, names: Iterable[str]) -> dict[str, Any]:
        """Connect prepared groups whose members are all joiners; returns what their handles may forward to.

        Collective over each of these groups. By the training thread. Raises MoveFailed if one isn't prepared.
        """
        found = {}
        for name in names:
            if name not in self._next or not self._next[name].is_prepared:
                raise MoveFailed(f"group {name} among the joiners was not prepared; its preparation says why")
            self._activate(self._next[name])
            found[name] = self._next[name].inner
        return found

    def prepare(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float, *,
                first: Iterable[str] = (), when_first: Callable[[], None] = lambda: None,
                after_each: Callable[[Communicator, int], None] = lambda communicator, num_left: None,
                beside_old: bool = True) -> str:
        """Stage 1: build the next generation's communicators of the groups touched by `slots`, one after the other.

        Those named in `first`, which have joiners only, come first, and then `when_first` is called: still one order on
        all members. `after_each` is called with each one that is prepared and the number of those to come.
        `beside_old`: some member holds an old one of each. Collective over each group. Runs on the prepare thread
        beside training. Returns the digest of the adversarial reductions on them. Raises RuntimeError when a member
        doesn't come in `timeout_s` or the move is aborted.
        """
        assert not self._next, f"generation {generation}: the last preparation was neither adopted nor discarded"
        early = set(first)
        handles = sorted(self.touched(slots), key=lambda h: h.name not in early)  # stable
        self._closer.hurry()  # what is still to be closed takes the room of what comes now
        with self._maker.background():
            self._make_solo()
            for number, handle in enumerate(handles):
                if number == len(early):
                    when_first()
                communicator = self._maker.make(f"g{generation}/{handle.name}", handle.slots, handle.rank(),
                                                num_groups=len(handles))
                self._add_next(handle.name, communicator)  # before it is prepared: `abort_next` can end that too
                communicator.prepare(store, timeout_s)
                if generation and beside_old and communicator.switch == "lazy" and not self._maker.allow_lazy:
                    raise MoveFailed(f"group {handle.name}: the old one would have to be closed before the commit "
                                     "(policy lazy): the device lacks memory for a second connected one, and this NCCL "
                                     "can't park (2.30.3 can); free memory, take that NCCL, or --allow-lazy")
                self._maker.connect_ahead(communicator)
                if communicator.probes_when_prepared:
                    communicator.probe(self.device)
                after_each(communicator, len(handles) - 1 - number)
        when_first()  # once more, where these were all
        return _join(self._in_order(), when_prepared=True)

    def _in_order(self) -> list[Communicator]:
        """The prepared communicators in the order of `touched`, as a leaver lists the digests of its old ones."""
        return [self._next[name] for name in sorted(self._next, key=place)]

    def _add_next(self, name: str, communicator: Communicator) -> None:
        with self._next_lock:
            if self._is_aborting:
                raise MoveFailed(f"{communicator.name}: the move was aborted before it was prepared")
            self._next[name] = communicator

    def learn_switches(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float) -> None:
        """A leaver's part in stage 1: what the others will do with the communicators it shares with them."""
        for handle in self.touched(slots):
            self._live[handle.name].switch = self._maker.agreed_switch(
                f"g{generation}/{handle.name}", handle.slots, store, time.monotonic() + timeout_s)

    def make_pair(self, name: str, group_rank: int) -> Communicator:
        """Of a leaver (rank 0) and its joiner (1). The caller can abort it at any time; `release_pair` frees it."""
        return self._maker.make_pair(name, group_rank)

    def prepare_pair(self, pair: Communicator, store: dist.Store, timeout_s: float, operation_timeout_s: float) -> None:
        """Collective over the two. Raises RuntimeError when the other one doesn't come, or when `pair` is aborted."""
        pair.prepare(store, timeout_s, operation_timeout_s)
        with self._maker.background():
            pair.activate()

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

    def room(self, slots: Iterable[int]) -> str:
        """How this process's old communicators make room, by the weakest: lazy, parked, or empty if none has to."""
        old = {h.name: self._live[h.name] for h in self._old(slots)}  # a leaver's know what the others do
        switches = {communicator.switch for communicator in {**old, **self._next}.values()}
        return next((switch for switch in ("lazy", "parked") if switch in switches), "")

    def connect(self, names: Iterable[str]) -> None:
        """Stage 2 ahead of the pause, by the training thread. Collective over each of these groups."""
        for name in names:
            if name in self._next:
                self._activate(self._next[name])

    # Parking, resuming, rebuilding and activating are each one sweep over the groups in the order of `touched`, and the
    # sweeps come one after the other. So every process works through a part of one global sequence of collective
    # operations (at the head of which are the groups that have joiners only). Of those not done yet take the first:
    # each of its members has done all that comes before, and is at it or on its way to it without waiting for anything
    # else. So it gets done, whatever subsets the members belong to.

    def _old(self, slots: Iterable[int]) -> list[wiring.MigratableGroup]:
        """Touched handles with a live communicator: a joiner has none."""
        return [handle for handle in self.touched(slots) if handle.name in self._live]

    def park(self, slots: Iterable[int]) -> str:
        """At the boundary, on the leaver too: old communicators make room, as their policy says. Returns their probes.

        Collective over each touched group, where it parks. Their handles refuse everything until `adopt` or `resume`.
        """
        handles = self._old(slots)
        old = _join((self._live[handle.name] for handle in handles), when_prepared=False)
        for handle in handles:
            communicator = self._live[handle.name]
            if handle.name in self._next:
                communicator.switch = self._next[handle.name].switch  # a leaver's was learned
            if communicator.switch in ("parked", "lazy"):
                handle.inner = wiring.NoGroup(f"{communicator.name} has made room for its successor")
            communicator.park()
        return old

    def activate(self) -> str:
        """Stage 2, at the boundary, after `park`: the new communicators. Collective over each group, where it connects.

        Returns the probe digests of those that aren't probed when prepared; empty if there are none.
        """
        for communicator in self._next.values():
            self._activate(communicator)
        return _join(self._in_order(), when_prepared=False)

    def _activate(self, communicator: Communicator) -> None:
        communicator.activate()
        if not communicator.probe_digest:
            communicator.probe(self.device)

    def abort_next(self) -> None:
        """End every operation under way on prepared communicators. From any thread; `discard` frees them."""
        with self._next_lock:
            self._is_aborting = True
            communicators = list(self._next.values())
        for communicator in communicators:
            communicator.abort()

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

    @property
    def is_closing(self) -> bool:
        """Whether communicators that nobody needs any more are still there."""
        return self._closer.num_waiting > 0

    def resume(self, slots: Iterable[int], store_address: tuple[str, int] | None = None,
               timeout_s: float = 60.0) -> tuple[int, int]:
        """The move aborted at the boundary: old communicators that made room go on; closed ones (`lazy`) are rebuilt.

        Collective over each of these groups; `store_address` is where members meet to rebuild, each group within
        `timeout_s`. Returns (rebuilt, those of them whose sums have other bits now), each group counted by its first
        member. Raises RuntimeError when one can't go on: then the job can't.
        """
        handles = [handle for handle in self._old(slots) if isinstance(handle.inner, wiring.NoGroup)]
        for communicator in self._next.values() if handles else ():
            communicator.wait_aborted(timeout_s)  # the old ones need the memory
        store, rebuilt = None, []
        for handle in handles:
            communicator = self._live[handle.name]
            if communicator.needs_rebuild:
                assert store_address is not None, f"{communicator.name} was closed, and there is no store to rebuild it"
                store = store or connect_store(store_address, timeout_s)
                before = communicator.probe_digest
                communicator.rebuild(store, timeout_s)
                rebuilt.append((handle.rank(), before == communicator.probe(self.device)))
            else:
                communicator.resume()
            handle.inner = communicator.inner
        firsts = [keeps_bits for group_rank, keeps_bits in rebuilt if group_rank == 0]
        return len(firsts), firsts.count(False)

    def discard(self) -> None:
        """The move aborted: close what was prepared, in the background."""
        with self._next_lock:
            discarded = list(self._next.values())
            self._next.clear()
            self._is_aborting = False
        self._closer.close_all(discarded)


def _join(communicators: Iterable[Communicator], *, when_prepared: bool) -> str:
    return " ".join(c.probe_digest for c in communicators if c.probes_when_prepared is when_prepared)
