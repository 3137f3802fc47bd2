"""What each slot works by itself is told apart from what it waits, on real communicators. On the job of three_slots.py.
"""
from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from four_ranks import device, world
from three_slots import Process, start_job
from tiny_jobs import shared_groups

from migration.own_time import DeviceWaits, HostWaits
from third_party.pytorch.timed_group import TimedGroup

SLOW_SLOT, SLEEP_S, ROUNDS = 1, 0.4, 3


@pytest.fixture
def process() -> Iterator[Process]:
    groups = shared_groups()
    groups.waits = HostWaits() if device().type == "cpu" else DeviceWaits()
    try:
        with start_job() as made:
            yield made
    finally:
        groups.waits = None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_slow_slot_waits_least(process: Process, asynchronous: bool) -> None:
    own_s = None
    if process.slot is not None:
        waits, group = shared_groups().waits, process.handles[0, 1, 2]
        assert isinstance(group, TimedGroup)
        dist.all_reduce(torch.ones(4, device=device()), group=group)  # from here on all are together
        waits.take()
        began_s = time.perf_counter()
        for number in range(ROUNDS):
            if process.slot == SLOW_SLOT:
                time.sleep(SLEEP_S)
            tensor = torch.full((4,), float(process.slot + number), device=device())
            work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert tensor.tolist() == [3.0 + 3 * number] * 4
        time_s = time.perf_counter() - began_s
        waited_s = waits.take()
        assert 0 < waited_s <= time_s and waits.take() == 0.0
        own_s = time_s - waited_s
    by_slot = {slot: time_s for slot, time_s in world().allgather((process.slot, own_s)) if slot is not None}
    assert by_slot[SLOW_SLOT] >= ROUNDS * SLEEP_S
    assert by_slot[SLOW_SLOT] == max(by_slot.values()), by_slot
