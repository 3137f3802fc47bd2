"""The choice of how NCCL communicators are switched, and the place where members meet. No GPU, no NCCL."""
from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from migration.communicators.nccl_meeting import agreed_switch, meet
from migration.communicators.nccl_policy import (NcclPolicy, choose_switch, connected_peers, describe_pins,
                                                 parse_pins, pinned, weakest)
from migration.errors import DeadlineExpired, UserError
from third_party.pytorch import nccl_group

GIB = 1 << 30
POLICY = NcclPolicy(reserve_bytes=2 * GIB, connected_bytes=GIB)


@pytest.mark.parametrize("free_bytes, num_groups, can_park, expected", [
    (6 * GIB, 4, True, "connected"),
    (6 * GIB - 1, 4, True, "parked"),
    (6 * GIB - 1, 4, False, "lazy"),
    (2 * GIB, 0, False, "connected"),
    (0, 1, True, "parked"),
])
def test_auto_takes_what_fits(free_bytes: int, num_groups: int, can_park: bool, expected: str) -> None:
    assert choose_switch(POLICY, can_park=can_park, free_bytes=free_bytes, num_groups=num_groups) == expected


@pytest.mark.parametrize("switch", ["connected", "parked", "lazy"])
def test_what_was_asked_for_is_what_one_gets(switch: str) -> None:
    assert choose_switch(NcclPolicy(switch=switch), can_park=True, free_bytes=0, num_groups=9) == switch


def test_parked_needs_a_library_that_can() -> None:
    with pytest.raises(UserError, match="switch=parked needs NCCL 2.30.3"):
        choose_switch(NcclPolicy(switch="parked"), can_park=False, free_bytes=0, num_groups=1)


@pytest.mark.parametrize("policy", [NcclPolicy(switch="fast"), NcclPolicy(p2p="some"),
                                    NcclPolicy(connect_sizes_bytes=()), NcclPolicy(connect_sizes_bytes=(0,))])
def test_values_that_mean_nothing_are_refused(policy: NcclPolicy) -> None:
    with pytest.raises(UserError, match="NCCL policy: "):
        policy.validate()
    NcclPolicy().validate()


def test_the_weakest_member_decides() -> None:
    assert weakest(["connected", "lazy", "parked"]) == "lazy"
    assert weakest(["connected", "parked"]) == "parked"


def test_what_was_pinned_is_said() -> None:
    assert pinned({"NCCL_DEBUG": "INFO", "NCCL_ALGO": ""}) == {}
    assert pinned({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}) == {"NCCL_ALGO": "Ring"}
    assert describe_pins({"NCCL_PROTO": "Simple", "NCCL_ALGO": "Ring"}) == "pinned: NCCL_ALGO=Ring, NCCL_PROTO=Simple"
    assert describe_pins({}).startswith("nothing pinned")


def test_pins_are_read() -> None:
    assert parse_pins("") == {}
    assert parse_pins("ALGO=Ring,MAX_CHANNELS=4") == {"NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "4"}


@pytest.mark.parametrize("text", ["ALGO", "ALGO=", "NVLS=1", "MAX_CTAS=many", "MIN_CHANNELS=0", "Ring"])
def test_pins_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--nccl-pin"):
        parse_pins(text)


@pytest.mark.parametrize("p2p", ["none", "ring", "all"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_peers_are_symmetric(p2p: str, size: int) -> None:
    peers = [connected_peers(p2p, rank, size) for rank in range(size)]
    assert all(rank in peers[peer] for rank in range(size) for peer in peers[rank])
    assert [len(p) for p in peers] == [{"none": 0, "ring": min(2, size - 1), "all": size - 1}[p2p]] * size


# ---- meeting


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_members_agree_and_one_makes_the_id() -> None:
    store, made = dist.HashStore(), []

    def make_id() -> bytes:
        made.append(threading.get_ident())
        return bytes(range(128))

    wanted = ["connected", "parked", "connected"]
    with ThreadPoolExecutor(3) as pool:
        members = [pool.submit(meet, store, "g1/tp", rank, 3, switch, make_id, in_s(30))
                   for rank, switch in enumerate(wanted)]
        assert [m.result() for m in members] == [("parked", bytes(range(128)))] * 3
    assert len(made) == 1
    assert agreed_switch(store, "g1/tp", 3, in_s(30)) == "parked", "a leaver asks without being a member"


def test_the_first_makes_no_id_before_all_are_there() -> None:
    with pytest.raises(DeadlineExpired, match=r"g1/tp: waited 0\.\d s in vain for switch/1 of the members"):
        meet(dist.HashStore(), "g1/tp", 0, 2, "lazy", lambda: pytest.fail("an id too early"), in_s(0.3))


def test_the_wait_ends_when_the_stores_server_goes_away() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, client, "g1/tp", 1, 2, "lazy", lambda: b"", in_s(120))
        while not server.check(["g1/tp/switch/1"]):
            pass
        del server
        with pytest.raises(RuntimeError) as caught:
            waiting.result(60)
    assert not isinstance(caught.value, DeadlineExpired)


# ---- point-to-point grouping, with a group that says what it was called


class FakeBackend:
    supports_coalescing = True


class FakeInner:
    """Stands for a group on NCCL."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _get_backend(self, _device: object) -> FakeBackend:
        return FakeBackend()

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> str:
            self.calls.append(name if name.startswith("_") else f"{name} {arguments[1]}")
            return f"work of {name}"

        return call


def test_a_batch_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tiny_jobs import shared_groups

    monkeypatch.setattr(dist, "batch_isend_irecv", dist.batch_isend_irecv)
    monkeypatch.setattr(dist.distributed_c10d, "batch_isend_irecv", dist.batch_isend_irecv)
    nccl_group.install_p2p_grouping()
    installed = dist.batch_isend_irecv
    nccl_group.install_p2p_grouping()
    assert dist.batch_isend_irecv is installed, "once is enough"
    groups = shared_groups()
    groups.open(1, 4)
    try:
        dist.group.WORLD.inner = inner = FakeInner()
        tensor = torch.zeros(2)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 2), dist.P2POp(dist.irecv, tensor, 0)])
        assert inner.calls == ["_start_coalescing", "send 2", "recv 0", "_end_coalescing"]
        assert works == ["work of _end_coalescing"]
    finally:
        groups.close()
