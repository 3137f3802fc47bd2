"""What a bell wakes, and what it doesn't mind."""
from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from migration.bell import Bell

LONG_S = 20.0  # no wait here is so long unless something is wrong


@pytest.fixture
def bells() -> list[Bell]:
    """Two that know each other."""
    found = [Bell(), Bell()]
    for rank, bell in enumerate(found):
        bell.meet([other.hello for other in found], rank)
    for bell in found:  # each has been rung by the other one
        assert bell.wait(LONG_S) and bell.is_heard
        bell.is_heard = False
    return found


def test_ringing_wakes_the_other_one(bells: list[Bell]) -> None:
    threading.Timer(0.05, bells[0].ring, (1,)).start()
    started_s = time.monotonic()
    assert not bells[1].is_heard
    assert bells[1].wait(LONG_S) and time.monotonic() - started_s < LONG_S / 2
    assert bells[1].is_heard and not bells[0].is_heard
    assert not bells[1].wait(0.001), "once"


def test_waking_oneself_is_not_ringing(bells: list[Bell]) -> None:
    threading.Timer(0.05, bells[0].wake).start()
    started_s = time.monotonic()
    assert not bells[0].wait(LONG_S) and time.monotonic() - started_s < LONG_S / 2
    assert not bells[0].is_heard


def test_what_came_before_the_wait_ends_it(bells: list[Bell]) -> None:
    for _ in range(1000):  # more than a socket holds: nothing waits, nothing fails
        bells[0].ring(1)
        bells[1].wake()
    started_s = time.monotonic()
    while bells[1].wait(0.001):
        assert time.monotonic() - started_s < LONG_S


def test_whoever_is_gone_is_rung_in_vain(bells: list[Bell]) -> None:
    gone = Bell()
    bells[0].meet([bells[0].hello, gone.hello], 0)
    gone._socket.close()
    bells[0].ring(1)
    bells[0].ring(1)
    assert not bells[0].wait(0.05) and not bells[0].is_heard


def test_a_stranger_costs_a_poll(bells: list[Bell]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x" * 2000, ("127.0.0.1", bells[0].hello["bell"]))
    assert bells[0].wait(LONG_S)
    assert not bells[0].wait(0.001)


def test_among_several_machines_the_own_one_proves_nothing() -> None:
    """127.0.0.2 stands for another machine: the loopback has many addresses."""
    own, beside, far = (Bell() for _ in range(3))
    far._socket.close()
    far._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    far._socket.bind(("127.0.0.2", 0))
    hellos = [{**bell.hello, "address": address} for bell, address in
              ((own, "127.0.0.1"), (beside, "127.0.0.1"), (far, "127.0.0.2"))]
    own.meet(hellos, 0)
    assert far._socket.recv(1), "it rings on the other machine at once"
    beside.meet(hellos, 1)  # rings own, which is the next but one
    assert own.wait(LONG_S) and not own.is_heard
    far.meet(hellos, 2)  # rings own too
    assert own.wait(LONG_S) and own.is_heard


@pytest.mark.parametrize("addresses, expected", [
    (["10.0.0.1", "10.0.0.1"], ["127.0.0.1", "127.0.0.1"]), (["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
    (["localhost", "no such name"], ["127.0.0.1", ""])])
def test_addresses(bells: list[Bell], addresses: list[str], expected: list[str]) -> None:
    """Names are asked for once; on one machine its address isn't used, which may be shut off."""
    hellos: list[dict[str, Any]] = [{"address": address, "bell": 7} for address in addresses]
    bells[0].meet(hellos, 0)
    assert bells[0].peers == [(address, 7) for address in expected]
    if "" in expected:
        bells[0].ring(1)  # nowhere, and nothing happens
