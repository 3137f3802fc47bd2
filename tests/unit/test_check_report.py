"""The preflight's verdicts and table from rows as they would be measured, and the order in which it measures."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from migration.check_conductor import LINK_BETWEEN, LINK_WITHIN, default_bytes, plan_steps
from migration.check_report import GroupRow, Measured, ProcessRow, find_problems, needed_bytes, report_text
from migration.profiles import get_profile
from migration.sizes import gradient_buffer_bytes, slot_state_bytes

CONFIG = get_profile("tiny_TP2_PP1")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "code": "a" * 64}


def process(rank: int, **changed: Any) -> ProcessRow:
    """Two processes a host, one machine a host."""
    row = ProcessRow(world_rank=rank, host=f"b{rank // 2}", machine=f"m{rank // 2}", versions=VERSIONS, data="d" * 64,
                     device="CPU, 2 cores", free_bytes=10 ** 9, latency_s=0.001 if rank else None, flops=100e9)
    return dataclasses.replace(row, **changed)


def measured(changed: dict[int, dict[str, Any]] | None = None, *, num: int = 8, **fields: Any) -> Measured:
    rows = tuple(process(r, **(changed or {}).get(r, {})) for r in range(num))
    groups = tuple(GroupRow(kind="tp", world_ranks=(r, r + 1), num_bytes=10 ** 6, time_s=0.001) for r in (0, 2, 4))
    return Measured(**{"config": CONFIG, "processes": rows, "groups": groups, **fields})


def the_problem(found: Measured) -> str:
    problems = find_problems(found)
    assert len(problems) == 1, problems
    assert f"1 thing wrong:\n  - {problems[0]}" in report_text(found)
    return problems[0]


def test_nothing_wrong() -> None:
    assert find_problems(measured()) == []
    text = report_text(measured(seconds=4.2))
    lines = text.splitlines()
    assert lines[-1] == "nothing is wrong"
    assert "processes: 8, hosts: 4" in text and "code aaaaaaaaaaaa\n" in text
    assert "   3  b1    m1           3  CPU, 2 cores  1.00 GB  1.13 MB     1.00 ms  100.0 GFLOP/s" in lines
    assert "   6  b3    m3       spare  CPU, 2 cores  1.00 GB  1.13 MB     1.00 ms  100.0 GFLOP/s" in lines


def test_bus_bandwidth() -> None:
    """nccl-tests' factor: 2 (n - 1) / n."""
    row = GroupRow(kind="world", world_ranks=(0, 1, 2, 3), num_bytes=8 * 10 ** 9, time_s=2.0)
    assert row.bus_bytes_per_s == pytest.approx(6e9)
    text = report_text(measured(groups=(row,)))
    assert "world                 1        4  8.00 GB  2000.00 ms     4         6        6  0 1 2 3" in text


@pytest.mark.parametrize("name", ["torch", "code"])
def test_other_software(name: str) -> None:
    odd = {"versions": {**VERSIONS, name: "b" * 64}}
    problem = the_problem(measured({4: odd, 5: odd}))
    expected = "a" * 12 if name == "code" else "2.13.0"
    assert problem.startswith(f"host b2 (world ranks 4, 5) has {name} bbbbbbbbbbbb, host b0 (world rank 0) has "
                              f"{expected}: ")


def test_the_odd_one_may_be_the_first() -> None:
    problem = the_problem(measured({0: {"versions": {**VERSIONS, "torch": "2.12.0"}}}))
    assert problem.startswith("host b0 (world rank 0) has torch 2.12.0, host b0 (world rank 1) has 2.13.0")


def test_what_one_process_could_not_tell_is_no_difference() -> None:
    nccl = {r: {"versions": {**VERSIONS, "nccl": "2.30.7"}} for r in range(7)}
    assert find_problems(measured(nccl)) == []
    assert "nccl 2.28.9" in the_problem(measured(nccl | {7: {"versions": {**VERSIONS, "nccl": "2.28.9"}}}))


def test_other_data_and_unread_data() -> None:
    assert the_problem(measured({2: {"data": "e" * 64}})).startswith("host b1 (world rank 2) has data eeeeeeeeeeee, ")
    unread = {"data": "", "data_problem": "--data x: no such file"}
    assert the_problem(measured({2: unread, 3: unread})) == (
        "host b1 (world ranks 2, 3) can't read the data: --data x: no such file")


def test_slow_process() -> None:
    assert find_problems(measured({5: {"flops": 51e9}})) == []
    problem = the_problem(measured({5: {"flops": 49e9}}))
    assert problem.startswith("host b2 (world rank 5): ") and "49.0 GFLOP/s" in problem and "100.0" in problem


def test_slow_group() -> None:
    """Groups are compared with those of their own kind."""
    groups = [GroupRow(kind="tp", world_ranks=(r, r + 1), num_bytes=10 ** 6, time_s=0.001) for r in (0, 2, 4)]
    slower_kind = GroupRow(kind="world", world_ranks=tuple(range(6)), num_bytes=10 ** 6, time_s=0.1)
    assert find_problems(measured(groups=(*groups, slower_kind))) == []
    groups[1] = dataclasses.replace(groups[1], time_s=0.004)
    problem = the_problem(measured(groups=(*groups, slower_kind)))
    assert problem.startswith("host b1 (world ranks 2, 3): ")
    assert "(tp) has 0.25 GB/s" in problem and "median 1 of 3" in problem


def test_needed_memory() -> None:
    slot = slot_state_bytes(CONFIG, 0).total + gradient_buffer_bytes(CONFIG, 0)
    assert needed_bytes(CONFIG, 0) == slot
    uneven = get_profile("20B_TP1_PP8")
    assert needed_bytes(uneven, None) == max(needed_bytes(uneven, s) for s in range(uneven.job_size))


def test_short_of_memory_counts_who_shares() -> None:
    needed = needed_bytes(CONFIG, 2)
    enough = {r: {"free_bytes": 2 * needed} for r in (2, 3)}
    assert find_problems(measured(enough)) == []
    problem = the_problem(measured({r: {"free_bytes": 2 * needed - 1} for r in (2, 3)}))
    assert problem.startswith("machine m1: 2.26 MB free, ") and "take 2.26 MB in host b1 (world ranks 2, 3)" in problem
    on_own_gpus = {r: {"free_bytes": needed, "gpu": r % 2} for r in range(8)}
    assert find_problems(measured(on_own_gpus)) == []
    on_one_gpu = {r: {"free_bytes": needed, "gpu": 0 if r == 3 else r % 2} for r in range(8)}
    assert the_problem(measured(on_one_gpu)).startswith("GPU 0 of machine m1: ")


def test_too_few_processes() -> None:
    assert "needs 6 processes" in the_problem(measured(num=5))
    assert the_problem(measured(num=6)) == (
        "host b0, b1, b2 can't be vacated: for its 2 slots there are 0 spare processes on other hosts: "
        "start more processes")
    assert "for its 2 slots there are 1 spare" in the_problem(measured(num=7))


def test_failures_come_first() -> None:
    found = measured({3: {"flops": None, "free_bytes": None, "device": ""}}, failures=("matmul: not done",), groups=())
    assert the_problem(found) == "matmul: not done"
    assert "   3  b1    m1           3  -                   -  1.13 MB     1.00 ms              -" in report_text(found)


@pytest.mark.parametrize("num", range(1, 10))
def test_nobody_is_in_two_groups_of_a_step(num: int) -> None:
    hosts = [f"b{r // 2}" for r in range(num)]
    steps = plan_steps(hosts, hosts, CONFIG)
    for step in steps:
        members = [r for group in step.groups for r in group]
        assert len(members) == len(set(members)), step
    for do in ("device", "matmul"):
        assert sorted(r for s in steps if s.do == do for group in s.groups for r in group) == list(range(num))
    pairs = {(s.kind, group) for s in steps for group in s.groups if s.kind in (LINK_WITHIN, LINK_BETWEEN)}
    ring = {tuple(sorted((r, (r + 1) % num))) for r in range(num if num > 2 else num - 1)}
    assert pairs == {(LINK_WITHIN if hosts[a] == hosts[b] else LINK_BETWEEN, (a, b)) for a, b in ring}
    assert any(s.kind.startswith("world") for s in steps) == (num >= CONFIG.job_size)


def test_kinds_with_the_same_groups_are_measured_once() -> None:
    steps = plan_steps(["b0"] * 6, ["m0"] * 6, CONFIG)
    assert [s.kind for s in steps if s.do == "all_reduce"][-3:] == ["world, tp_dp", "tp, tp_pp", "dp"]


def test_processes_of_a_machine_take_turns() -> None:
    steps = plan_steps(["a", "a", "b", "b"], ["m", "m", "n", "n"], CONFIG)
    assert [s.groups for s in steps if s.do == "matmul"] == [((0,), (2,)), ((1,), (3,))]


def test_size_of_an_all_reduce() -> None:
    """As much as the device likes; less where processes share a GPU. Equal indexes on two machines are two GPUs."""
    assert default_bytes([process(r) for r in range(4)]) == 4 << 20
    assert default_bytes([process(r, gpu=r % 2) for r in range(4)]) == 64 << 20
    assert default_bytes([process(r, gpu=0) for r in range(4)]) == 8 << 20
