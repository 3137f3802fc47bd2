"""Old communicators are closed one by one, in order, and only when released."""
from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from migration.communicators.base import Communicator
from migration.communicators.closer import Closer

WAIT_S = 30.0


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


def test_nothing_to_close_starts_no_thread() -> None:
    before = threading.active_count()
    closer = Closer(0.0)
    closer.close_all([])
    assert threading.active_count() == before
