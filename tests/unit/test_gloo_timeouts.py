"""What the two time-outs of a Gloo group mean: the one for members that don't come, the other for each operation."""
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from migration.communicators.gloo import GlooCommunicator
from third_party.pytorch.process_group import build_gloo

SHORT_S, LONG_S = 0.5, 60.0


def build_two(connect_timeout_s: float, operation_timeout_s: float) -> list[Any]:
    """Both members of a group of two, in this process."""
    store = dist.HashStore()

    def build(rank: int) -> Any:
        return build_gloo(store, "two", rank, 2, connect_timeout_s=connect_timeout_s,
                          operation_timeout_s=operation_timeout_s)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, range(2)))


def test_a_member_that_does_not_come_is_named() -> None:
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"two: group ranks \[1\] of 2 didn't come within 0.5 s"):
        build_gloo(dist.HashStore(), "two", 0, 2, connect_timeout_s=SHORT_S, operation_timeout_s=LONG_S)
    assert time.monotonic() - started_s < LONG_S


def test_a_receive_outlasts_the_time_to_connect() -> None:
    """A joiner waits for the boundary, and a pipeline stage for its neighbour, longer than connecting may take."""
    first, second = build_two(SHORT_S, LONG_S)
    received = torch.zeros(1)
    work = first.recv([received], 1, 0)
    time.sleep(2 * SHORT_S)  # the delay is what is tested
    second.send([torch.ones(1)], 0, 0).wait()
    work.wait()
    assert received.item() == 1.0


@pytest.mark.parametrize("operation", ["recv", "allreduce"])
def test_an_operation_has_an_end(operation: str) -> None:
    first, _second = build_two(LONG_S, SHORT_S)
    call = {"recv": lambda: first.recv([torch.zeros(1)], 1, 0), "allreduce": lambda: first.allreduce([torch.zeros(1)])}
    with pytest.raises(RuntimeError):
        call[operation]().wait()


def test_an_abort_ends_what_waits_for_a_peer_that_hangs() -> None:
    """Also where another peer has closed its connections before: only who still holds one can run out of time."""
    communicators = [GlooCommunicator("three", (0, 1, 2), rank) for rank in range(3)]
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda communicator: communicator.prepare(store, LONG_S, LONG_S), communicators))
        first, second, _third = communicators
        waits = pool.submit(first.inner.recv([torch.zeros(1)], 2, 0).wait)  # the third never sends
        second.abort()
        assert not waits.done()
        first.abort()
        with pytest.raises(RuntimeError):
            waits.result(SHORT_S * 20)
