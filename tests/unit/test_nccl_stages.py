"""Stages of the NCCL communicator, in order and out of it, on fakes of NCCL and of torch's group. No GPU.

What NCCL really does is for tests/gpu; here it is who is called, by whom it is freed, and which wait ends how.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from migration.communicators import nccl, nccl_device, nccl_life
from migration.communicators.nccl import NcclCommunicator, Stage
from migration.communicators.nccl_policy import NcclPolicy
from migration.errors import DeadlineExpired, MoveFailed
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.errors import Aborted
from nccl_bindings.library import Library, load

Log = list[str]
DEVICE = torch.device("cpu")


@dataclass
class FakeNccl:
    """Answers every call at once, except those in `hangs`, which end when the communicator is aborted."""

    log: Log = field(default_factory=list)
    hangs: set[str] = field(default_factory=set)
    aborted: threading.Event = field(default_factory=threading.Event)
    library: Library | None = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.log.append(name)
            if name == "ncclCommInitRankConfig":
                arguments[0]._obj.value = 0xABC0
            if name == "ncclCommAbort":
                self.aborted.set()
            if name in self.hangs:
                assert self.aborted.wait(20.0), f"{name} was never aborted"
                return 3
            return 0

        return {"ncclGetErrorString": lambda code: b"fake", "ncclGetLastError": lambda comm: b""}.get(name, call)


@dataclass
class FakeBackend:
    nccl: FakeNccl

    def shutdown(self) -> None:
        self.nccl.log.append("torch.shutdown")

    def abort(self) -> None:
        self.nccl.log.append("torch.abort")
        self.nccl.aborted.set()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    fake = FakeNccl()
    stock_init = Bare.__init__

    def init(self: Bare, *arguments: Any) -> None:
        stock_init(self, *arguments)
        fake.library, self.raw = self.raw.library, fake

    monkeypatch.setattr(Bare, "__init__", init)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 40))
    monkeypatch.setattr(nccl, "new_unique_id", lambda raw: bytes(128))
    monkeypatch.setattr(nccl_life, "build_nccl", lambda *a, communicator, **k: FakeBackend(fake))
    monkeypatch.setattr(nccl_life, "backend_of", lambda inner: inner)
    monkeypatch.setattr(nccl_device, "connect", lambda bare, *a: fake.log.append("connect"))
    monkeypatch.setattr(nccl_device, "probe", lambda *a: "digest")
    yield fake


@pytest.fixture(scope="module")
def library() -> Library:
    real = load()
    return Library(handle=real.handle, path="fake", version=23007)


def make(library: Library, switch: str, **policy: Any) -> NcclCommunicator:
    """Of two members, the other of which has come already."""
    return NcclCommunicator("g1/tp", (0, 1), 0, device=DEVICE, library=library,
                            policy=NcclPolicy(switch=switch, **policy))


def store_with_peer(switch: str) -> dist.HashStore:
    store = dist.HashStore()
    store.set("g1/tp/switch/1", switch)
    store.set("rebuilt/g1/tp/switch/1", switch)
    return store


def prepared(library: Library, switch: str, **policy: Any) -> NcclCommunicator:
    communicator = make(library, switch, **policy)
    communicator.prepare(store_with_peer(switch), 20.0)
    return communicator


def eventually(log: Log, entry: str) -> None:
    ends_s = time.monotonic() + 20.0
    while entry not in log:
        assert time.monotonic() < ends_s, log
        time.sleep(0.001)


def test_connected_ahead(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "connected")
    assert own.stage is Stage.PREPARED and own.switch == "connected" and not own._bare.owned
    own.connect()
    own.park()
    own.activate()
    assert fake.log == ["ncclCommInitRankConfig", "connect"], "neither parks nor connects again"
    assert own.probe(DEVICE) == own.probe_digest == "digest"
    assert set(own.costs) == {"prepare", "connect"}


def test_parked_and_back(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "parked")
    assert own.stage is Stage.PARKED and own.inner is None and own._bare.owned, "torch has nothing of it yet"
    own.activate()
    assert own.inner is not None and not own._bare.owned
    own.park()
    own.resume()
    assert own.stage is Stage.CONNECTED
    assert fake.log[1:] == ["ncclCommSuspend", "ncclCommResume", "connect", "ncclCommSuspend", "ncclCommResume"]


def test_a_parked_one_is_connected_ahead_once_and_only_resumed_in_the_pause(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "parked")
    assert own.connects_ahead and own.has_room_ahead
    own.connect_ahead(DEVICE)
    own.connect_ahead(DEVICE)
    assert own.stage is Stage.PARKED and own.inner is None and own.probe_digest == "digest" and not own.connects_ahead
    assert fake.log[1:] == ["ncclCommSuspend", "ncclCommResume", "connect", "ncclCommSuspend"]
    own.activate()
    assert own.stage is Stage.CONNECTED and fake.log[5:] == ["ncclCommResume"]
    own.close()
    assert fake.log[-1] == "torch.shutdown"
    assert list(own.costs) == ["prepare", "unpark", "connect", "repark", "resume", "adopt", "activate", "close"]


def test_a_parked_one_that_was_connected_is_freed_with_its_memory(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "parked")
    own.connect_ahead(DEVICE)
    own.close()
    assert fake.log[-2:] == ["ncclCommResume", "ncclCommAbort"]


def test_without_memory_for_one_more_it_waits_for_the_pause(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "parked", connected_bytes=(1 << 30) + 1)
    assert own.connects_ahead and not own.has_room_ahead
    assert prepared(library, "connected", connected_bytes=1 << 40).has_room_ahead, "it was chosen with the memory"


@pytest.mark.parametrize("switch", ["connected", "parked", "lazy"])
def test_one_that_training_does_not_use_is_ready_not_connected(fake: FakeNccl, library: Library, switch: str) -> None:
    own = make(library, switch)
    own.connects = False
    own.prepare(store_with_peer(switch), 20.0)
    assert not own.connects_ahead
    own.activate_and_probe(DEVICE)
    own.activate_and_probe(DEVICE)
    assert own.inner is not None and own.stage is Stage.PREPARED and not own.is_connected and own.probe_digest == ""
    assert "connect" not in fake.log
    own.connects = True  # it is used after all
    own.activate_and_probe(DEVICE)
    assert own.stage is Stage.CONNECTED and own.probe_digest == "digest" and fake.log[-1] == "connect"


def test_the_weaker_peer_decides(fake: FakeNccl, library: Library) -> None:
    own = make(library, "parked")
    own.prepare(store_with_peer("lazy"), 20.0)
    assert own.switch == "lazy" and own.stage is Stage.PREPARED


@pytest.mark.parametrize("close_by, call", [("abort", "ncclCommAbort"), ("destroy", "ncclCommDestroy")])
def test_a_parked_one_is_resumed_before_it_is_freed(fake: FakeNccl, library: Library, close_by: str, call: str) -> None:
    own = prepared(library, "parked", close_by=close_by)
    own.close()
    assert fake.log[-2:] == ["ncclCommResume", call]
    assert own.costs["close"].seconds > own.costs["resume"].seconds > 0


def test_who_is_not_resumed_is_aborted_whatever_the_policy(fake: FakeNccl, library: Library) -> None:
    """A peer that is gone takes no part in destroying either."""
    own = prepared(library, "parked", close_by="destroy", close_timeout_s=0.3)
    fake.hangs.add("ncclCommResume")
    own.close()
    own.wait_aborted(30.0)
    assert "ncclCommDestroy" not in fake.log and fake.log.count("ncclCommAbort") == 1


def test_lazy_closes_the_old_one_and_rebuilds_it(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "lazy")
    own.activate()
    first = own.inner
    own.park()
    assert own.needs_rebuild and fake.log[-1] == "torch.shutdown"
    own.close()
    assert fake.log.count("torch.shutdown") == 1, "the closer may come to it again"
    with pytest.raises(MoveFailed, match="rebuild it"):
        own.resume()
    own.rebuild(store_with_peer("lazy"), 20.0)
    assert own.stage is Stage.CONNECTED and own.inner is not first and not own.needs_rebuild
    assert [stage for stage, _ in own.take_costs()] == ["prepare", "connect", "activate", "park", "rebuild"]
    assert own.take_costs() == []


def test_what_is_aborted_while_it_is_closed_is_not_rebuilt(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "lazy")
    own.activate()
    own.park()
    own.abort()
    with pytest.raises(MoveFailed, match="g1/tp was aborted before it was rebuilt"):
        own.rebuild(store_with_peer("lazy"), 20.0)


@pytest.mark.parametrize("switch, freed_by", [("lazy", ["torch.abort"]),
                                              ("parked", ["ncclCommSuspend", "ncclCommResume", "ncclCommAbort"])])
def test_what_was_never_connected_is_freed_without_its_peers(fake: FakeNccl, library: Library, switch: str,
                                                             freed_by: list[str]) -> None:
    prepared(library, switch).close()
    assert fake.log[1:] == freed_by, "nothing is freed while it is suspended"


def test_init_that_hangs_ends_by_its_deadline(fake: FakeNccl, library: Library) -> None:
    fake.hangs.add("ncclCommInitRankConfig")
    own = make(library, "lazy")
    with pytest.raises(DeadlineExpired, match=r"g1/tp: init took longer than 0\.\d s"):
        own.prepare(store_with_peer("lazy"), 0.3)
    own.close()
    assert fake.log.count("ncclCommAbort") == 1


def test_init_is_ended_from_another_thread(fake: FakeNccl, library: Library) -> None:
    fake.hangs.add("ncclCommInitRankConfig")
    own = make(library, "lazy")
    threading.Timer(0.1, own.abort).start()
    with pytest.raises(Aborted, match="aborted by another thread"):
        own.prepare(store_with_peer("lazy"), 20.0)
    assert own.stage is Stage.ABORTED


def test_an_adopted_one_is_aborted_by_torch(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "lazy")
    own.abort()
    own.abort()
    eventually(fake.log, "torch.abort")
    with pytest.raises(MoveFailed, match="is aborted, expected prepared"):
        own.activate()
    own.close()
    assert fake.log.count("torch.abort") == 1 and "ncclCommAbort" not in fake.log and own.inner is None


@pytest.mark.parametrize("call", ["ncclCommSuspend", "ncclCommResume"])
def test_parking_that_hangs_ends_by_its_deadline(fake: FakeNccl, library: Library, call: str) -> None:
    fake.hangs.add(call)
    own = make(library, "parked", park_timeout_s=0.3)
    with pytest.raises(DeadlineExpired, match=r"g1/tp: (parking|resuming) took longer than 0\.3 s"):
        own.prepare(store_with_peer("parked"), 20.0)
        own.activate()
    assert own.stage is Stage.ABORTED
    own.close()


def test_an_abort_while_it_is_activated_leaves_no_two_owners(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "parked")
    fake.hangs.add("ncclCommResume")
    threading.Timer(0.1, own.abort).start()
    with pytest.raises((Aborted, RuntimeError)):
        own.activate()
    own.wait_aborted(30.0)
    own.close()
    assert own.inner is None and fake.log.count("ncclCommAbort") == 1 and "torch.abort" not in fake.log


def test_what_was_aborted_while_it_was_parked_is_never_adopted(fake: FakeNccl, library: Library) -> None:
    """It is connected already, so that nothing but the adoption is left to do."""
    own = prepared(library, "parked")
    own.connect_ahead(DEVICE)
    own.abort()
    with pytest.raises(MoveFailed, match="is aborted, expected connected"):
        own.activate()
    own.wait_aborted(30.0)
    assert own.inner is None and fake.log.count("ncclCommAbort") == 1


def test_an_abort_is_waited_for(fake: FakeNccl, library: Library) -> None:
    own = prepared(library, "lazy")
    own.wait_aborted(30.0)  # nothing to wait for
    own.abort()
    own.wait_aborted(30.0)
    assert fake.log[-1] == "torch.abort"


def test_a_group_of_one_never_parks(fake: FakeNccl, library: Library) -> None:
    own = NcclCommunicator("solo", (0,), 0, device=DEVICE, library=library, policy=NcclPolicy(switch="parked"))
    own.prepare(dist.HashStore(), 20.0)
    assert own.switch == "connected" and own.stage is Stage.PREPARED and own.peers == ()


def test_nvls_must_be_off(fake: FakeNccl, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    with pytest.raises(MoveFailed, match="NCCL_NVLS_ENABLE must be 0"):
        make(library, "lazy").prepare(dist.HashStore(), 1.0)
