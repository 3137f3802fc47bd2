"""Which GPU and which NCCL host id each process gets, as tables."""
from __future__ import annotations

import pytest

from migration.placement import place


def placements(hosts: str, num_gpus: int, machines: str = "") -> list[tuple[int, str | None, bool]]:
    names = hosts.split()
    on = machines.split() or ["m"] * len(names)
    found = [place(on, names, rank, num_gpus) for rank in range(len(names))]
    return [(p.device, p.host_id, p.shares_gpu) for p in found]


@pytest.mark.parametrize(("hosts", "num_gpus", "expected"), [
    ("b0 b0 b1 b1", 2, [(0, "b0", False), (1, "b0", False), (0, "b1", False), (1, "b1", False)]),
    ("b0 b0 b1 b1", 1, [(0, "b0-0", True), (0, "b0-1", True), (0, "b1-0", True), (0, "b1-1", True)]),
    ("b0 b0 b1 b1", 4, [(0, "b0", False), (1, "b0", False), (2, "b1", False), (3, "b1", False)]),
    ("b0 b0 b1 b1 b2 b2 b3 b3", 8, [(i, f"b{i // 2}", False) for i in range(8)]),
    ("b0 b1 b2 b3", 4, [(i, f"b{i}", False) for i in range(4)]),
    ("r0 r1", 1, [(0, "r0", False), (0, "r1", False)]),
    ("n n", 8, [(0, None, False), (1, None, False)]),
    ("n n", 1, [(0, "n-0", True), (0, "n-1", True)]),
])
def test_one_machine(hosts: str, num_gpus: int, expected: list[tuple[int, str | None, bool]]) -> None:
    assert placements(hosts, num_gpus) == expected


def test_every_machine_counts_its_own_processes() -> None:
    assert placements("n0 n0 n1 n1", 2, "n0 n0 n1 n1") == [(0, None, False), (1, None, False)] * 2
