"""Process groups whose identity outlives their communicator.

Megatron-Core asks torch for its groups as always and gets handles (third_party/pytorch/process_group.py). What is
inside a handle belongs to a generation. A move prepares the next generation's communicators of the touched groups
beside the live ones (next_generation.py), and at the commit the handles point to them; untouched groups keep theirs.

Knows nothing of MPI, of the protocol, or of what moves.
"""
from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from migration import usage
from migration.communicators.base import Communicator
from migration.communicators.closer import Closer
from migration.communicators.makers import GlooMaker, Maker
from migration.handles import place
from migration.next_generation import NextGeneration, join_probes
from third_party.pytorch import process_group as wiring

CLOSE_PAUSE_S = 0.05
_ABORTS_S = 60.0  # for all communicators of a process to be aborted
_ABORTS_MEANWHILE_S = 15.0  # for those of an aborted move, while the old ones wait and training with them


class Groups(NextGeneration):
    """Every handle of this process, their live communicators, and those of the generation being prepared.

    `maker` makes the real ones; at least `close_pause_s` lies between two that are closed, more where closing would
    take more than `close_share` of the time.
    """

    def __init__(self, device: torch.device, maker: Maker | None = None, close_pause_s: float = CLOSE_PAUSE_S,
                 close_share: float = 1.0) -> None:
        super().__init__(device, maker or GlooMaker(), Closer(close_pause_s, close_share))
        self._live: dict[str, Communicator] = {}

    @property
    def live(self) -> list[Communicator]:
        """The communicators of this generation."""
        return list(self._live.values())

    @property
    def communicators(self) -> list[Communicator]:
        """Live ones and those being prepared, but for the one of the groups of one."""
        return [*self.live, *self._next.values()]

    @property
    def num_communicators(self) -> int:
        """Communicators held: live, being prepared, and not yet closed."""
        return len(self.communicators) + self._closer.num_waiting + (self._solo is not None)

    # ---- the switchover

    def learn_switches(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float) -> None:
        """A leaver's part in stage 1: what the others will do with the communicators it shares with them."""
        alone = self.within(slots)  # the new one of these is the joiners' only
        for handle in self.touched(slots):
            self._live[handle.name].switch = "connected" if handle.name in alone else self._maker.agreed_switch(
                f"g{generation}/{handle.name}", handle.slots, store, time.monotonic() + timeout_s)

    def live_probe(self, slots: Iterable[int]) -> str:
        """The digest that `prepare` returns, but of the live communicators, kept since they were built."""
        return join_probes((self._live[h.name] for h in self.touched(slots)), when_prepared=True)

    def sums_digest(self) -> str:
        """One digest of the probes of the live communicators that training uses, in one order: the same for whoever
        holds the slot, for as long as its sums keep their bits. Empty where it isn't known which these are."""
        if self.used is None:
            return ""
        digests = (self._live[name].probe_digest for name in sorted(self.used & self._live.keys(), key=place))
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]

    def room(self, slots: Iterable[int]) -> str:
        """How this process's old communicators make room, by the weakest: lazy, parked, or empty if none has to."""
        old = (self._live[handle.name] for handle in self._old(slots))  # a leaver's know what the others do
        switches = {*(c.switch for c in old if c.is_connected), *(c.switch for c in self._next.values() if c.connects)}
        return next((switch for switch in ("lazy", "parked") if switch in switches), "")

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
        old = join_probes((self._live[handle.name] for handle in handles), when_prepared=False)
        for handle in handles:
            communicator = self._live[handle.name]
            if handle.name in self._next:
                communicator.switch = self._next[handle.name].switch  # a leaver's was learned
            if communicator.switch in ("parked", "lazy") and communicator.is_connected:  # its successor will be
                handle.inner = wiring.NoGroup(f"{communicator.name} has made room for its successor")
                communicator.park()
        return old

    def activate(self) -> str:
        """Stage 2, at the boundary, after `park`: the new communicators. Collective over each group, where it connects.

        Returns the probe digests of those that aren't probed when prepared; empty if there are none.
        """
        for communicator in self._next.values():
            communicator.activate_and_probe(self.device)
        return join_probes(self._in_order(), when_prepared=False)

    def adopt(self) -> tuple[int, int]:
        """The commit: handles point to the next generation. Returns (rebuilt, kept) groups.

        Counted are groups of more than one slot in which this process comes first, so that the sum over the job's
        processes is the number of groups. The old communicators stay open until `retire`: a member that still waits
        for the verdict may use them.
        """
        if self._next_used is not None:
            self.used = self._next_used
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

    def resume(self, slots: Iterable[int], store_address: tuple[str, int] | None = None,
               timeout_s: float = 60.0) -> tuple[int, int]:
        """The move aborted at the boundary: old communicators that made room go on; closed ones (`lazy`) are rebuilt.

        Collective over each of these groups; `store_address` is where members meet to rebuild, each group within
        `timeout_s`. Returns (rebuilt, those of them whose sums have other bits now), each group counted by its first
        member. Raises RuntimeError when one can't go on, or `abort_all` has ended it: then the job can't.
        """
        handles = [handle for handle in self._old(slots) if isinstance(handle.inner, wiring.NoGroup)]
        ends_s = time.monotonic() + _ABORTS_MEANWHILE_S
        for communicator in self._next.values() if handles else ():
            communicator.wait_aborted(max(0.0, ends_s - time.monotonic()))  # the old ones need the memory
        store, rebuilt = None, []
        with ExitStack() as met:
            for handle in handles:
                communicator = self._live[handle.name]
                if communicator.needs_rebuild:
                    assert store_address is not None, f"{communicator.name} was closed; there is no store to rebuild it"
                    store = store or met.enter_context(self.meeting(store_address, timeout_s, after_abort=True))
                    before = communicator.probe_digest
                    communicator.rebuild(store, timeout_s)
                    # one that training doesn't use wasn't probed before either
                    rebuilt.append((handle.rank(), not before or before == communicator.probe(self.device)))
                else:
                    communicator.resume()
                handle.inner = communicator.inner
        firsts = [keeps_bits for group_rank, keeps_bits in rebuilt if group_rank == 0]
        return len(firsts), firsts.count(False)

    # ---- all slots together: a generation, and its first iteration

    def begin(self, generation: int, store: dist.Store, slot: int, timeout_s: float) -> None:
        """All groups of a generation, in which every slot is built: that of a run, or one after a loss.

        Connected are those that somebody knows to be used; at first nobody knows, and none is. Collective over the job.
        """
        slots = range(dist.get_world_size())
        usage.tell(store, slot, self.used)
        used = usage.ask(store, slots, timeout_s)
        self.prepare(generation, store, slots, timeout_s, used=used or frozenset())
        self.activate()
        self.adopt()
        self.used = used

    def forget_use(self) -> None:
        """What was done so far, such as building the model, is not what training does."""
        for handle in self.handles.values():
            handle.is_used = False

    def learn_used(self, check: Callable[[], None]) -> None:
        """After the first iteration: the groups that it has used, on whatever slot, are connected and probed.

        By the training thread. Collective over the job. `check` raises where operations were aborted.
        """
        own = {name for name, handle in self.handles.items() if handle.is_used}
        own |= {name for name, communicator in self._live.items() if communicator.connects}  # a move was that early
        used = usage.union(own | (self.used or set()), self.device, check)
        torch.cuda.empty_cache()  # NCCL takes its memory from the device, not from torch
        for name in sorted(used & self._live.keys(), key=place):
            self._live[name].connects = True
            self._live[name].activate_and_probe(self.device)
        check()
        self.used = used

    # ---- the end of a generation, or of all

    def retire(self) -> None:
        """After everybody has acknowledged the commit: close the old generation in the background, in one order."""
        self._closer.release()

    @property
    def is_closing(self) -> bool:
        """Whether communicators that nobody needs any more are still there."""
        return self._closer.num_waiting > 0

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
        self._is_all_over = True
        self.abort_next()
        for communicator in [*self._live.values(), *self._closer.unclosed]:  # a close waits for members too
            communicator.abort()

    def close_aborted(self) -> None:
        """After `abort_all`, out of every operation: `close`, also where no slot is open. The memory is back then."""
        ends_s = time.monotonic() + _ABORTS_S
        for communicator in [*self._live.values(), *self._next.values(), *self._closer.unclosed]:
            communicator.wait_aborted(max(0.0, ends_s - time.monotonic()))
        self._maker.recover_thread()
        self._closer.release()
        self.close()
        self._is_all_over = False
