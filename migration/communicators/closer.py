"""Closes communicators in the background, one after the other, in the order in which they were given."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque

from migration import heap
from migration.communicators.base import Communicator
from migration.pacing import close_pause_s

_log = logging.getLogger(__name__)


class Closer:
    """Closes communicators on a thread of its own: a destructor takes about 40 ms, which training needn't wait for.

    But it also takes about 2 ms of a core, in Gloo's threads: all at once, right after the switch, that was 8 % of the
    first iteration where cores are scarce. On GPUs it takes longer and frees device memory, for which the device stops.
    So there is a pause before each: at least `pause_s`, and as long as it takes that closing has no more than `share`
    of the time. After the last one the system gets back what all of them had.
    """

    def __init__(self, pause_s: float, share: float = 1.0) -> None:
        self._pause_s, self._share = pause_s, share
        self._held: list[Communicator] = []
        self._queue: deque[Communicator] = deque()  # the first of them is being closed
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._hurried = threading.Event()

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._held) + len(self._queue)

    @property
    def unclosed(self) -> list[Communicator]:
        """Those that may still be used, until `release`, and those whose turn hasn't come or isn't over."""
        with self._lock:
            return [*self._held, *self._queue]

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
            self._queue.extend(communicators)
            self._lock.notify_all()

    def hurry(self) -> None:
        """Somebody waits for what is queued, or needs its room: no more pauses until all of it is closed."""
        with self._lock:
            if self._queue:
                self._hurried.set()

    def _run(self) -> None:
        last_s = 0.0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue)
                communicator = self._queue[0]
            self._hurried.wait(close_pause_s(last_s, self._share, self._pause_s))
            started_s = time.perf_counter()
            try:
                communicator.close()
                if self.num_waiting == 1:  # it was the last
                    heap.give_back()
            except Exception:  # the others are closed all the same
                _log.exception("%s: close; its memory may be lost", communicator.name)
            last_s = time.perf_counter() - started_s
            del communicator
            with self._lock:
                self._queue.popleft()
                if not self._queue:
                    self._hurried.clear()
