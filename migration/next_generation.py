"""The next generation's communicators: built beside the live ones, then connected, or given up.

No file but this one and groups.py, which puts them into the handles, makes or frees communicators. Knows nothing of
MPI, of the protocol, or of what moves.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from migration.communicators.base import Communicator
from migration.communicators.closer import Closer
from migration.communicators.makers import Maker
from migration.errors import MoveFailed
from migration.handles import Handles, place
from migration.stores import StoreClient
from migration.sums import NOT_PROBED


class NextGeneration(Handles):
    """The communicators being prepared, and the pair of a leaver and its joiner.

    `maker` makes the real ones; `closer` closes those that are given up, in the background.
    """

    def __init__(self, device: torch.device, maker: Maker, closer: Closer) -> None:
        super().__init__()
        self.device = device
        self._maker, self._closer = maker, closer
        self._next: dict[str, Communicator] = {}
        self.used: frozenset[str] | None = None  # names of groups that training uses, on any slot; None: unknown
        self._next_used: frozenset[str] | None = None  # the same, as all members of the next generation know it
        self._next_lock = threading.Lock()
        self._is_aborting = False  # nothing may be added to it any more
        self._is_all_over = False  # nor may anything else be built, until all that was there is closed
        self._meetings: list[StoreClient] = []
        self._solo: Communicator | None = None

    # ---- where members meet

    @contextmanager
    def meeting(self, address: tuple[str, int], timeout_s: float, *, after_abort: bool = False) -> Iterator[dist.Store]:
        """The store at `address`, at which members meet to build communicators; `timeout_s`: of each wait on it.

        An abort ends every wait on it, whether or not its server lives. Raises MoveFailed if one has come already, but
        `after_abort` only if all is over.
        """
        client = StoreClient(address, timeout_s)
        with self._next_lock:
            if self._is_all_over or (self._is_aborting and not after_abort):
                raise MoveFailed("the move was aborted before its members met")
            self._meetings.append(client)
        try:
            yield client.connect()
        finally:
            with self._next_lock:
                self._meetings.remove(client)

    def _end_meetings(self) -> None:
        """With the lock."""
        for client in self._meetings:
            client.end()

    # ---- stage 1, beside training

    def prepare(self, generation: int, store: dist.Store, slots: Iterable[int], timeout_s: float, *,
                used: frozenset[str] | None = None, first: Iterable[str] = (),
                when_first: Callable[[], None] = lambda: None,
                after_each: Callable[[Communicator, int], None] = lambda communicator, num_left: None) -> str:
        """Stage 1: build the next generation's communicators of the groups touched by `slots`, one after the other.

        Those in `used` are to be connected later, None: all. Those named in `first`, which have joiners only, come
        first, and then `when_first` is called: still one order on all members. `after_each` is called with each one
        that is prepared and the number of those to come. Where all members of a group are in `slots`, none of them
        holds an old one. Collective over each group. Runs on the prepare thread beside training. Returns the digest of
        the adversarial reductions on them. Raises RuntimeError when a member doesn't come in `timeout_s` or the move is
        aborted.
        """
        assert not self._next, f"generation {generation}: the last preparation was neither adopted nor discarded"
        early, slots = set(first), tuple(slots)
        alone = self.within(slots)
        self._next_used = used
        handles = sorted(self.touched(slots), key=lambda h: h.name not in early)  # stable
        connected = {handle.name for handle in handles if used is None or handle.name in used}
        self._closer.hurry()  # what is still to be closed takes the room of what comes now
        with self._maker.background():
            self._make_solo()
            for number, handle in enumerate(handles):
                if number == len(early):
                    when_first()
                communicator = self._maker.make(f"g{generation}/{handle.name}", handle.slots, handle.rank(),
                                                num_groups=len(connected), beside_old=handle.name not in alone)
                communicator.connects = handle.name in connected
                self._add_next(handle.name, communicator)  # before it is prepared: `abort_next` can end that too
                communicator.prepare(store, timeout_s)
                if communicator.connects and communicator.switch == "lazy" and not self._maker.allow_lazy:
                    raise MoveFailed(f"group {handle.name}: the old one would have to be closed before the commit "
                                     "(policy lazy): the device lacks memory for a second connected one, and this NCCL "
                                     "can't park (2.30.3 can); free memory, take that NCCL, or --allow-lazy")
                self._maker.connect_beside(communicator)
                if communicator.probes_when_prepared and communicator.connects:
                    communicator.probe(self.device)
                after_each(communicator, len(handles) - 1 - number)
        when_first()  # once more, where these were all
        return join_probes(self._in_order(), when_prepared=True)

    def _in_order(self) -> list[Communicator]:
        """The prepared communicators in the order of `touched`, as a leaver lists the digests of its old ones."""
        return [self._next[name] for name in sorted(self._next, key=place)]

    def _add_next(self, name: str, communicator: Communicator) -> None:
        with self._next_lock:
            if self._is_aborting:
                raise MoveFailed(f"{communicator.name}: the move was aborted before it was prepared")
            self._next[name] = communicator

    def _make_solo(self) -> None:
        """Groups of one share one communicator for the life of the process: nobody else is in them."""
        if self._solo is None:
            solo = self._maker.make("solo", (0,), 0, num_groups=1, beside_old=False)
            solo.prepare(dist.HashStore(), 60.0)
            solo.activate()
            self._solo = solo  # not one that failed, which the next move would take for a good one

    # ---- stage 2, ahead of the pause

    def connect_among_joiners(self, names: Iterable[str]) -> dict[str, Any]:
        """Connect prepared groups whose members are all joiners; returns what their handles may forward to.

        Collective over each of these groups. By the training thread. Raises MoveFailed if one isn't prepared.
        """
        found = {}
        for name in names:
            if name not in self._next or not self._next[name].is_prepared:
                raise MoveFailed(f"group {name} among the joiners was not prepared; its preparation says why")
            self._next[name].activate_and_probe(self.device)
            found[name] = self._next[name].inner
        return found

    @property
    def unconnected(self) -> list[str]:
        """Names of prepared groups that are still to be connected, and may be ahead of the pause."""
        return [name for name, communicator in self._next.items() if communicator.connects_ahead]

    @property
    def without_room(self) -> list[str]:
        """Those of them for which this device lacks the memory now: they wait until the old ones are parked."""
        return [name for name in self.unconnected if not self._next[name].has_room_ahead]

    def connect(self, names: Iterable[str]) -> None:
        """Stage 2 ahead of the pause, by the training thread. Collective over each of these groups."""
        for name in names:
            if name in self._next:
                self._next[name].connect_ahead(self.device)

    # ---- given up

    def abort_next(self) -> None:
        """End every operation under way on prepared communicators. From any thread; `discard` frees them."""
        with self._next_lock:
            self._is_aborting = True
            self._end_meetings()
            communicators = list(self._next.values())
        for communicator in communicators:
            communicator.abort()

    def discard(self) -> None:
        """The move aborted: close what was prepared, in the background."""
        with self._next_lock:
            discarded = list(self._next.values())
            self._next.clear()
            self._is_aborting = False
        self._closer.close_all(discarded)

    # ---- leaver and joiner

    def make_pair(self, name: str, group_rank: int) -> Communicator:
        """Of a leaver (rank 0) and its joiner (1). The caller can abort it at any time; `release_pair` frees it."""
        return self._maker.make_pair(name, group_rank)

    def prepare_pair(self, pair: Communicator, store: dist.Store, timeout_s: float, operation_timeout_s: float) -> None:
        """Collective over the two. Raises RuntimeError when the other one doesn't come, or when `pair` is aborted."""
        pair.prepare(store, timeout_s, operation_timeout_s)
        with self._maker.background():
            pair.activate()

    def release_pair(self, communicator: Communicator) -> None:
        self._closer.close_all([communicator])

    def background(self) -> AbstractContextManager[object]:
        """What a thread beside the training thread works in."""
        return self._maker.background()


def join_probes(communicators: Iterable[Communicator], *, when_prepared: bool) -> str:
    """The probe digests of those that are probed when prepared, or of those that are when activated."""
    return " ".join(c.probe_digest or NOT_PROBED for c in communicators if c.probes_when_prepared is when_prepared)
