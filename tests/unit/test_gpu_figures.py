"""Figures of the GPU benchmarks from rows as ranks return them, their targets, and the files they are kept in."""
from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import bench_gpu, bench_parts
from analysis.device_memory import MemorySampler, peak_by_phase
from analysis.gpu_figures import MIB, beside_figures, host_cost_figures, job_times, state_figures
from analysis.machine import Machine
from analysis.results import (Figure, Section, build_markdown, format_value, read_sections, replace_section,
                              write_sections)


def rank(**changes: Any) -> dict[str, Any]:
    """A rank of two rounds of one preparing and one undisturbed iteration."""
    rounds = [{"prepare_s": 0.3, "rests_s": 0.2, "work_s": 0.1, "close_s": 0.1, "device_bytes": 4 * 3 * MIB}] * 2
    resources = [{"device_mib": 100, "threads": 9, "fds": 20, "resident_mib": 500}] * 2
    iterations = numbered([["undisturbed", 0.100], ["preparing", 0.102]] * 2)
    return {"iterations": iterations, "rounds": rounds, "resources": resources,
            "differs": "", "num_losses": 4, "num_compared": 4, "num_groups": 4} | changes


def numbered(iterations: list[list[Any]]) -> list[list[Any]]:
    """With a second from start to start."""
    return [[kind, seconds, float(i)] for i, (kind, seconds) in enumerate(iterations)]


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_slowdown_and_memory_while_preparing() -> None:
    figures, problem = beside_figures([rank(), rank()], bound=True, parked=True)
    found = by_name(figures)
    assert problem == ""
    median = found["median of iterations while preparing, over undisturbed"]
    assert median.value == pytest.approx(1.02) and median.met
    slow = rank(iterations=numbered([["undisturbed", 0.1], ["preparing", 0.104]] * 2))
    assert by_name(beside_figures([rank(), slow], bound=True, parked=True)[0])[median.name].met is False
    assert by_name(beside_figures([rank(), slow], bound=False, parked=True)[0])[median.name].met is None


def test_memory_of_streams_that_cuda_keeps_is_of_the_first_preparation() -> None:
    rounds = rank()["rounds"]
    row = rank(rounds=[rounds[0] | {"device_bytes": 5 * 4 * MIB}, *rounds])
    found = by_name(beside_figures([row, row], bound=True, parked=True)[0])
    first, later = (found[f"stage 1, device memory a group, {which}"] for which in ("first preparation",
                                                                                   "later ones, median"))
    assert (first.value, first.met) == (5.0, None) and (later.value, later.met) == (3.0, True)
    only = by_name(beside_figures([rank(rounds=row["rounds"][:1])] * 2, bound=True, parked=True)[0])
    assert only[first.name].met is False and later.name not in only


def test_an_iteration_is_the_slowest_ranks_and_of_the_worst_kind() -> None:
    early = rank(iterations=numbered([["undisturbed", 0.3], ["closing", 0.1], ["resting", 0.1]]))
    late = rank(iterations=numbered([["preparing", 0.2], ["after_join", 0.4], ["undisturbed", 0.2]]))
    times = job_times([early, late])
    assert {kind: some.tolist() for kind, some in times.items()} == {
        "undisturbed": [], "closing": [], "resting": [0.2], "preparing": [0.3], "after_join": [0.4]}


def test_no_iteration_of_a_kind_is_no_figure() -> None:
    none = rank(iterations=numbered([["preparing", 0.2]]))
    figures = by_name(beside_figures([none, none], bound=True, parked=False)[0])
    assert figures["median of iterations while preparing, over undisturbed"].met is False


def test_rests_are_part_of_a_preparation_and_windows_are_told_by_themselves() -> None:
    window = [["undisturbed", 0.100]] * 20
    row = rank(iterations=numbered([*window, ["preparing", 0.150], *[["resting", 0.110]] * 2, ["closing", 0.1],
                                    *[["undisturbed", 0.104]] * 20, ["after_join", 0.3], *window[1:]]))
    found = by_name(beside_figures([row, row], bound=True, parked=True)[0])
    assert found["preparing iterations"].value == 3
    assert found["median of iterations while preparing, over undisturbed"].value == pytest.approx(1.1)
    assert found["preparing, beside a group's work, median of 1"].value == pytest.approx(150)
    assert found["preparing, beside rests, median of 2"].value == pytest.approx(110)
    shortest, longest = (found[f"undisturbed, median of a window, {name} of 2"] for name in ("shortest", "longest"))
    assert (shortest.value, longest.value) == (pytest.approx(100), pytest.approx(104))


@pytest.mark.parametrize("name, most", [("device_mib", 132), ("threads", 10), ("fds", 22)])
def test_what_grew_is_a_problem(name: str, most: int) -> None:
    for value, expected in ((most, ""), (most + 1, f"{name} grew by")):
        resources = rank()["resources"]
        grown = rank(resources=[resources[0], {**resources[1], name: value}])
        problem = beside_figures([rank(), grown], bound=True, parked=True)[1]
        assert problem.startswith(expected) and bool(problem) == bool(expected)


def test_a_difference_is_a_problem() -> None:
    problem = beside_figures([rank(), rank(differs="the loss of iteration 3")], bound=False, parked=False)[1]
    assert problem == "rank 1 differs from the job left alone: the loss of iteration 3"


def test_state_and_host_cost() -> None:
    rows = [{}, {"bytes": 8_000_000_000, "num_tensors": 7, "state_s": 0.05, "bare_s": 0.04}]
    assert by_name(state_figures(rows, bound=True))["state over bare"].met is True
    assert by_name(state_figures([{}, {**rows[1], "state_s": 0.051}], bound=True))["state over bare"].met is False
    costs = [{"collective": name, "bare_us": 30.0, "handle_us": 33.3} for name in ("all_reduce", "barrier")]
    found = by_name(host_cost_figures(costs, bound=True))
    assert found["all_reduce, ours over stock"].met is False and found["barrier, ours over stock"].met is None


def test_peaks_by_phase() -> None:
    samples = [(10.0, 0, 100.0), (10.0, 1, 300.0), (11.0, 0, 500.0)]
    assert peak_by_phase(samples, {"a": (9.0, 10.5), "b": (10.9, 10.95), "c": (20.0, 30.0)}) == {
        "a": 300.0, "b": 500.0, "c": None}


def test_memory_is_sampled_without_a_gpu() -> None:
    with MemorySampler(on_gpu=False) as sampler:
        while len(sampler.samples) < 2:
            time.sleep(0.02)
    assert all(used > 0 for _, _, used in sampler.samples)


# ---- results


def test_a_table_has_a_column_for_each_way() -> None:
    figures = (Figure(name="downtime", value=30.2, unit="ms", column="ahead"),
               Figure(name="downtime", value=5500.0, unit="ms", column="in the pause"),
               Figure(name="ratio", value=0.0055, unit="x", column="ahead", at_most=0.05),
               Figure(name="lost", value=None, at_least=1.0, column="ahead"))
    text = build_markdown([Section(title="One move", machine="a machine", figures=figures, commands=("make it",))])
    assert text.splitlines() == [
        "### One move", "", "a machine", "", "    make it", "", "|  | ahead | in the pause | target |",
        "| --- | --- | --- | --- |", "| downtime | 30.2 ms | 5500 ms |  |",
        "| ratio | 0.0055 x |  | at most 0.05: met |", "| lost | - |  | at least 1: **missed** |"]


def test_sections_are_read_back_and_replaced(tmp_path: Path) -> None:
    first = Section(title="a", machine="m", figures=(Figure(name="f", value=1.5, at_most=2.0),), notes=("n",))
    second = Section(title="b", machine="m", problem="it hung")
    write_sections(tmp_path / "new", "bench", [first, second])
    read = read_sections(tmp_path / "new" / "bench.json")
    assert read == [first, second] and read_sections(tmp_path / "none.json") == []
    assert "**Failed**: it hung" in (tmp_path / "new" / "bench.md").read_text()
    newer = Section(title="a", machine="another")
    assert replace_section(read, newer) == [newer, second]
    assert replace_section([second], newer) == [second, newer]


@pytest.mark.parametrize("value, text", [(None, "-"), ("parked", "parked"), (16, "16"), (0.0123456, "0.0123"),
                                         (1234.5, "1234"), (99.95, "100"), (5.0, "5")])
def test_three_digits_that_count(value: float | str | None, text: str) -> None:
    assert format_value(value) == text


# ---- the command


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are there after each part, and a part that is run again takes its old place."""
    def grows(bench: bench_parts.Bench) -> Iterator[Section]:
        yield Section(title="moves", machine="m", notes=("one arm",))
        assert read_sections(tmp_path / "bench_gpu.json")[-1].notes == ("one arm",)
        yield Section(title="moves", machine="m", notes=("two arms",))

    def fails(bench: bench_parts.Bench) -> Iterator[Section]:
        bench.left_s(-1.0)
        yield Section(title="never", machine="m")

    machine = Machine(date="2026-01-01", gpus=(), driver="none", torch="2", nccl="none", megatron_core="0", cores=2,
                      python="3", code="0" * 64)
    monkeypatch.setattr(bench_parts, "ask_machine", lambda: machine)
    monkeypatch.setattr(bench_gpu, "PARTS", {"a": fails, "b": grows})
    assert bench_gpu.main(["--out", str(tmp_path), "--time-box", "10"]) == 1
    failed, moves = read_sections(tmp_path / "bench_gpu.json")
    assert failed.title == "Part a, which failed" and failed.problem == "no time left in the box of 10 s"
    assert moves.notes == ("two arms",)
    assert bench_gpu.main(["--out", str(tmp_path), "--parts", "b"]) == 0
    assert len(read_sections(tmp_path / "bench_gpu.json")) == 2
