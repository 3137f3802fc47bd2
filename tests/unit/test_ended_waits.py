"""What a thread of a move waits in ends when the move, or the whole generation, is given up: whoever else is lost.

The other side is one that hangs: it has connected, or may still be connected to, and never says anything again.
"""
from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from migration import stores
from migration.communicators.gloo import GlooCommunicator
from migration.communicators.makers import GlooMaker
from migration.errors import DeadlineExpired, MoveFailed
from migration.groups import Groups
from migration.stores import StoreClient
from migration.timeline import process_counts
from migration.wire import Listener
from third_party.pytorch import process_group as wiring
from third_party.pytorch.process_group import NoGroup, connect_gloo

WAIT_S = 30.0
LONG_S = 600.0  # what would be waited otherwise
SHORT_S, AT_ONCE_S = 1.0, 2.0
SERVE = "import time; from migration.stores import start_store; made = start_store('127.0.0.1')\n" \
        "print(made.port, flush=True); time.sleep(600)"


class Server:
    """A store in another process, which can be made to hang."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = "127.0.0.1", int(self._process.stdout.readline())

    def hang(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def end_until_done(end: Callable[[], object], waits: Future[Any]) -> BaseException:
    """`end`, again until the thread was in its wait. What it raised."""
    for _ in range(int(WAIT_S / 0.05)):
        end()
        try:
            error = waits.exception(0.05)
            assert error is not None, "it came to its end by itself"
            return error
        except TimeoutError:
            continue
    pytest.fail("the wait didn't end")


def test_waits_on_a_store_whose_server_hangs(server: Server, pool: ThreadPoolExecutor) -> None:
    client = StoreClient(server.address, LONG_S)
    store = client.connect()
    other = StoreClient(server.address, LONG_S).connect()
    server.hang()
    waits = pool.submit(store.wait, ["never"], timedelta(seconds=LONG_S))
    assert isinstance(end_until_done(client.end, waits), dist.DistNetworkError)
    with pytest.raises(dist.DistNetworkError):
        other.set("key", "value")  # of the same server: it is held for gone


def test_who_connects_to_a_server_that_hangs_is_ended_or_gives_up(server: Server, pool: ThreadPoolExecutor,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    server.hang()
    client = StoreClient(server.address, LONG_S)
    assert "was given up" in str(end_until_done(client.end, pool.submit(client.connect)))
    monkeypatch.setattr(stores, "_CONNECT_S", 0.2)
    with pytest.raises(RuntimeError, match="didn't answer within 0 s"):
        StoreClient(server.address, LONG_S).connect()


def test_a_joiner_that_listens(pool: ThreadPoolExecutor) -> None:
    listener = Listener(dist.HashStore(), "pair0", "127.0.0.1")
    error = end_until_done(listener.close, pool.submit(listener.accept, LONG_S))
    assert "nobody waits for the leaver any more" in str(error)


def test_other_connections_stay(server: Server) -> None:
    other = Server()
    try:
        mine, kept = StoreClient(server.address, LONG_S), StoreClient(other.address, LONG_S).connect()
        mine.connect()
        mine.end()
        kept.set("key", "value")
        assert kept.get("key") == b"value"
    finally:
        other.kill()


# ---- communicators


def test_a_group_that_is_aborted_while_it_is_built_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort finds nothing to end yet."""
    made = GlooCommunicator("g1/tp", (0, 1), 0)
    monkeypatch.setattr("migration.communicators.gloo.meet_gloo", lambda *_: made.abort())
    with pytest.raises(MoveFailed, match="g1/tp was aborted before it was prepared"):
        made.prepare(dist.HashStore(), WAIT_S)
    assert not made.is_prepared


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_group_that_connects_once_nobody_waits_for_it_is_freed(monkeypatch: pytest.MonkeyPatch,
                                                                 pool: ThreadPoolExecutor, is_aborted: bool) -> None:
    made = GlooCommunicator("g1/tp", (0,), 0)
    begun, may_connect, freed = threading.Event(), threading.Event(), threading.Event()

    def connect(*args: Any) -> Any:
        begun.set()
        assert may_connect.wait(WAIT_S)
        group = connect_gloo(*args)
        weakref.finalize(group, freed.set)
        return group

    monkeypatch.setattr("migration.communicators.gloo.connect_gloo", connect)
    waits = pool.submit(made.prepare, dist.HashStore(), LONG_S if is_aborted else SHORT_S)
    assert begun.wait(WAIT_S)
    if is_aborted:
        made.abort()
    assert isinstance(waits.exception(WAIT_S), MoveFailed)
    may_connect.set()
    assert freed.wait(WAIT_S)
    assert not made.is_prepared


class KillingStore(dist.Store):
    """Kills its process once that has published an address of Gloo's, before it has read the other member's.

    Of two members the one with the greater address connects; the other one listens, which nothing would end then.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        if "/here/" not in key:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, *args: Any) -> None:
        self._store.wait(*args)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def use_address(host: str) -> None:
    """For this process's groups from now on."""
    wiring._gloo_devices = functools.cache(lambda: [dist.ProcessGroupGloo.create_device(hostname=host)])


def be_killed(rank: int, address: tuple[str, int]) -> None:
    use_address("127.0.0.2")
    store = StoreClient(address, WAIT_S).connect()
    GlooCommunicator("g1/tp", (0, 1), rank).prepare(KillingStore(store), WAIT_S)


Pair = tuple[GlooCommunicator, dist.Store, SpawnProcess]


@pytest.fixture(params=[0, 1])
def pair(request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A communicator of two, where they meet, and the other member, which waits there."""
    monkeypatch.setattr(wiring, "_gloo_devices", None)
    use_address("127.0.0.1")
    victim = multiprocessing.get_context("spawn").Process(target=be_killed, args=(request.param, server.address))
    victim.start()
    try:
        store = StoreClient(server.address, WAIT_S).connect()
        store.wait([f"g1/tp//here/{request.param}"], timedelta(seconds=WAIT_S))
        yield GlooCommunicator("g1/tp", (0, 1), 1 - request.param), store, victim
    finally:
        victim.kill()
        victim.join()


def test_an_abort_ends_the_wait_for_who_was_killed_while_it_connected(pair: Pair, pool: ThreadPoolExecutor) -> None:
    made, store, victim = pair
    waits = pool.submit(made.prepare, store, LONG_S, WAIT_S)
    victim.join(WAIT_S)
    assert victim.exitcode == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        waits.exception(SHORT_S)  # by itself it doesn't notice
    made.abort()
    error = waits.exception(AT_ONCE_S)
    assert isinstance(error, MoveFailed) and "g1/tp was aborted before it was prepared" in str(error)
    assert not made.is_prepared


def test_who_waits_for_one_that_was_killed_while_it_connected_gives_up(pair: Pair, pool: ThreadPoolExecutor) -> None:
    made, store, victim = pair
    waits = pool.submit(made.prepare, store, SHORT_S, WAIT_S)
    victim.join(WAIT_S)
    assert victim.exitcode == -signal.SIGKILL
    error = waits.exception(SHORT_S + AT_ONCE_S)
    assert isinstance(error, DeadlineExpired) and "all members came, but weren't connected" in str(error)
    assert not made.is_prepared


@pytest.fixture
def groups() -> Groups:
    """Of two slots; its old communicators were closed to make room for new ones, and the move has aborted."""
    made = Groups(torch.device("cpu"), GlooMaker("lazy", allow_lazy=True))
    for name in ("tp", "dp"):
        made._live[name] = GlooCommunicator(f"g0/{name}", (0, 1), 0, "lazy")
        made._live[name].park()
    handles = [SimpleNamespace(name=name, inner=NoGroup("away"), rank=lambda: 0) for name in made._live]
    made._old = lambda slots: handles  # type: ignore[method-assign]
    made.abort_next()
    return made


def test_a_recovery_ends_a_rebuilding_that_waits_for_a_lost_member(groups: Groups, server: Server,
                                                                   pool: ThreadPoolExecutor) -> None:
    """The store is served by the controller, which hangs: nobody drops it. What comes next isn't begun."""
    waits = pool.submit(groups.resume, (0, 1), server.address, LONG_S)
    client = StoreClient(server.address, WAIT_S).connect()
    client.wait(["rebuilt/g0/tp//here/0"], timedelta(seconds=WAIT_S))
    server.hang()
    assert isinstance(end_until_done(groups.abort_all, waits), dist.DistNetworkError)
    with pytest.raises(MoveFailed, match="the move was aborted before its members met"):
        groups.resume((0, 1), server.address, LONG_S)
    with pytest.raises(MoveFailed, match="g0/dp was aborted before it was prepared"):
        groups._live["dp"].rebuild(dist.HashStore(), LONG_S)


def test_members_meet_again_once_all_is_closed(groups: Groups, server: Server) -> None:
    with groups.meeting(server.address, WAIT_S, after_abort=True):
        pass
    with pytest.raises(MoveFailed), groups.meeting(server.address, WAIT_S):
        pass
    groups.abort_all()
    groups.close_aborted()
    with groups.meeting(server.address, WAIT_S) as store:
        store.set("key", "value")


def test_an_ended_wait_leaves_no_descriptor(server: Server) -> None:
    """Files, pipes and devices are none of its business."""
    for _ in range(3):
        client = StoreClient(server.address, WAIT_S)
        client.connect()
        before = process_counts()[1]
        client.end()
        assert process_counts()[1] <= before


def test_a_communicator_of_one_that_failed_is_not_taken_for_a_good_one() -> None:
    """The move aborts; the next one makes another."""
    maker = GlooMaker()
    real = maker.make
    fail = [True]

    def make(name: str, *args: Any, **fields: Any) -> Any:
        made = real(name, *args, **fields)
        if name == "solo" and fail.pop():
            made.prepare = Mock(side_effect=RuntimeError("out of memory"))
            fail.append(False)
        return made

    maker.make = make  # type: ignore[method-assign]
    groups = Groups(torch.device("cpu"), maker)
    with pytest.raises(RuntimeError, match="out of memory"):
        groups.prepare(1, dist.HashStore(), (), WAIT_S)
    groups.discard()
    groups.prepare(2, dist.HashStore(), (), WAIT_S)
    assert groups._solo is not None and groups._solo.inner is not None
