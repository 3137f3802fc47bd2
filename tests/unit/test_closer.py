"""Old communicators are closed one by one, in order, and only when released; the system gets back their memory."""
from __future__ import annotations

import ctypes
import threading
import time
from typing import cast

import pytest

from migration.communicators.base import Communicator
from migration.communicators.closer import Closer
from migration.timeline import process_counts

WAIT_S = 30.0
BLOCK_BYTES = 40_000


class Closable:
    """Stands for a communicator; tells when it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._all, self.done = name, closed, threading.Event()

    def close(self) -> None:
        self._all.append(self.name)
        self.done.set()


@pytest.fixture
def closed() -> list[str]:
    return []


def make(closed: list[str], *names: str) -> list[Communicator]:
    return [cast(Communicator, Closable(name, closed)) for name in names]


def test_in_order_once_released(closed: list[str]) -> None:
    closer = Closer(0.0)
    a, b, c = make(closed, "a", "b", "c")
    closer.hold(a)
    closer.hold(b)
    assert closer.num_waiting == 2 and closed == []
    closer.release()
    closer.close_all([c])
    assert cast(Closable, c).done.wait(WAIT_S) and closed == ["a", "b", "c"]


def test_there_is_a_pause_before_each(closed: list[str]) -> None:
    closer = Closer(3600.0)
    held, *queued = make(closed, "held", "x", "y")
    closer.hold(held)
    closer.close_all(queued)
    closer.release()
    assert closed == [] and closer.num_waiting == 3


def test_where_somebody_waits_there_is_no_pause_until_all_are_closed(closed: list[str]) -> None:
    closer = Closer(3600.0)
    first, second, later = make(closed, "first", "second", "later")
    closer.hurry()  # nothing is there to be closed: it means nothing for what comes later
    closer.close_all([first, second])
    assert not cast(Closable, first).done.wait(0.5)
    closer.hurry()
    assert cast(Closable, second).done.wait(WAIT_S) and closed == ["first", "second"]
    while closer.num_waiting:
        time.sleep(0.001)
    closer.close_all([later])
    assert not cast(Closable, later).done.wait(0.5), "the pauses are back"


class Hoard:
    """Stands for a communicator that took memory on a thread of its own, in an arena of its own, as NCCL's do."""

    def __init__(self, num_blocks: int) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._blocks: list[int] = []
        taking = threading.Thread(target=self._take, args=(num_blocks,))
        taking.start()
        taking.join()

    def _take(self, num_blocks: int) -> None:
        for number in range(num_blocks):  # below the size from which malloc gives back what is freed by itself
            block = self._libc.malloc(ctypes.c_size_t(BLOCK_BYTES))
            ctypes.memset(block, 1, BLOCK_BYTES)
            self._blocks.append(block)

    def close(self) -> None:
        for block in self._blocks[:-1]:  # the last one, on top of the others, stays in use, so none of them goes
            self._libc.free(ctypes.c_void_p(block))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps arenas")
def test_when_all_are_closed_the_system_gets_their_memory_back() -> None:
    before = process_counts()[0]
    hoards = [Hoard(500) for _ in range(4)]
    taken = process_counts()[0] - before
    assert taken > 0.9 * 4 * 500 * BLOCK_BYTES
    closer = Closer(0.0)
    closer.close_all([cast(Communicator, hoard) for hoard in hoards])
    ends_s = time.monotonic() + WAIT_S
    while closer.num_waiting:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    assert process_counts()[0] - before < 0.1 * taken


class Failing(Closable):
    """Stands for one that can't be closed."""

    def close(self) -> None:
        raise RuntimeError("can't start new thread")


def test_one_that_fails_keeps_none_from_being_closed(closed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    closer = Closer(0.0)
    (after,) = make(closed, "after")
    closer.close_all([cast(Communicator, Failing("failing", closed)), after])
    assert cast(Closable, after).done.wait(WAIT_S)
    assert "failing: close; its memory may be lost" in caplog.text


def test_nothing_to_close_starts_no_thread() -> None:
    before = threading.active_count()
    closer = Closer(0.0)
    closer.close_all([])
    assert threading.active_count() == before
