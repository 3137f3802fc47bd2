"""What the benchmark with a GPU for every process runs on which machine, and which model its ablation takes."""
from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import gpus_ablation
from analysis.gpus_model import LEAST_STATE_BYTES, Model, build_model, choose_model, estimate_iteration_s
from analysis.gpus_plan import (CPU, CYCLE, HOSTS, HOSTS_SWAPPED, OWN, SHARED, Estimate, Layout, Shape, build_estimates,
                                build_layout, build_row, format_plan, share_s)
from migration.arguments import parse_run
from migration.arms import ARMS
from migration.errors import UserError
from migration.placement import place
from migration.plan import check_moves, initial_roster, parse_vacate, plan_move, spread_hosts

ROOT = Path(__file__).resolve().parents[2]
H200 = 138 << 30
TP2, TP1 = Shape(tp=2, pp=1), Shape(tp=1, pp=1)


@pytest.mark.parametrize("num_gpus, used, per_host, shapes, rates, a_gpu", [
    (8, 8, 2, "TP2 PP1 DP3, TP1 PP2 DP3", OWN, 1), (10, 8, 2, "TP2 PP1 DP3, TP1 PP2 DP3", OWN, 1),
    (4, 4, 1, "TP1 PP1 DP3", OWN, 1), (7, 4, 1, "TP1 PP1 DP3", OWN, 1),
    (2, 2, 2, "TP2 PP1 DP3, TP1 PP2 DP3", SHARED, 4), (3, 3, 2, "TP2 PP1 DP3, TP1 PP2 DP3", SHARED, 3),
    (0, 0, 2, "TP2 PP1 DP3, TP1 PP2 DP3", CPU, 0)])
def test_layouts(num_gpus: int, used: int, per_host: int, shapes: str, rates: object, a_gpu: int) -> None:
    layout = build_layout(num_gpus, H200)
    assert (layout.num_gpus, layout.per_host, layout.processes_a_gpu) == (used, per_host, a_gpu)
    assert ", ".join(shape.name for shape in layout.shapes) == shapes and layout.rates is rates
    for shape in layout.shapes:  # the slots fill three hosts
        assert shape.tp * shape.pp * shape.dp == 3 * per_host


@pytest.mark.parametrize("num_gpus", [4, 8])
def test_every_process_has_its_own_gpu_and_only_those_of_a_host_an_id(num_gpus: int) -> None:
    layout = build_layout(num_gpus, H200)
    hosts = spread_hosts(HOSTS.split(","), layout.num_processes)
    placed = [place(["machine"] * len(hosts), hosts, rank, num_gpus) for rank in range(len(hosts))]
    assert [p.device for p in placed] == list(range(layout.num_processes))
    assert [p.host_id for p in placed] == list(hosts) and not any(p.shares_gpu for p in placed)


def hosts_of(layout: Layout) -> tuple[str, ...]:
    return spread_hosts(HOSTS.split(","), layout.num_processes)


@pytest.mark.parametrize("num_gpus", [0, 4, 8])
@pytest.mark.parametrize("num_moves", [3, 10])
def test_moves_in_a_row(num_gpus: int, num_moves: int) -> None:
    """The first three vacate b0, b1 and b2; the plan can be carried out; after four moves the same host is spare."""
    layout = build_layout(num_gpus, H200)
    row = build_row(num_moves, spacing=5, settle=30)
    config, options = parse_run([*layout.shapes[0].settings, "--set", f"iterations={row.iterations}", *row.arguments])
    assert [text[:2] for text in options.vacate[:3]] == ["b0", "b1", "b2"]
    roster = initial_roster(hosts_of(layout), config)
    check_moves(roster, options.vacate)
    spare_after = []
    for text in options.vacate:
        roster = roster.after(plan_move(roster, parse_vacate(text, need_iteration=True)))
        spare_after.append(roster.hosts[roster.spares()[0]])
    at = [parse_vacate(text, need_iteration=True).iteration or 0 for text in options.vacate]
    gaps = [later - earlier for earlier, later in zip([0, *at], [*at, config.iterations])]
    if num_moves == 10:
        assert row.settled == (5, 9) and spare_after[5] == spare_after[9] and row.settled[1] - row.settled[0] == CYCLE
        assert gaps == [5] * 6 + [35] + [5] * 3 + [35]
    else:
        assert row.settled == () and gaps == [5] * 4


def test_arms_there_and_back() -> None:
    layout = build_layout(8, H200)
    assert sorted(gpus_ablation.ARMS) == sorted(ARMS)
    config, options = parse_run([*TP2.settings, "--set", "iterations=1000", *gpus_ablation.build_requests()])
    assert options.arms == gpus_ablation.ARMS
    check_moves(initial_roster(hosts_of(layout), config), options.vacate)
    schedule = options.schedule()
    first = schedule.waiting[0]
    assert schedule.holds == {first.hold} and first.arm_name == "naive", "nobody must be through by its iteration"
    before, after = HOSTS.split(","), HOSTS_SWAPPED.split(",")
    assert after == ["b0", before[3], "b2", before[1]]


# ---- the model


def choose(shape: Shape, *, seconds: float, gib: int = 138, least: int = LEAST_STATE_BYTES) -> Model:
    return choose_model(shape, OWN, process_bytes=gib << 30, seconds=seconds, least_bytes=least)


def test_the_model_grows_with_the_time_and_never_falls_below_its_state() -> None:
    hurried, patient, idle = (choose(TP2, seconds=seconds) for seconds in (10.0, 500.0, 1e9))
    assert min(hurried.state_bytes, patient.state_bytes, idle.state_bytes) >= LEAST_STATE_BYTES
    assert hurried.seconds > 10.0 and patient.seconds <= 500.0
    assert hurried.used_bytes <= patient.used_bytes < idle.used_bytes <= 0.85 * H200
    smaller = dataclasses.replace(hurried.config, num_layers=hurried.config.num_layers - 1)
    assert build_model(smaller, OWN).state_bytes < LEAST_STATE_BYTES
    assert not hurried.config.distributed_optimizer  # fewer parameters for as many bytes
    assert idle.config.distributed_optimizer


def test_where_memory_is_short_it_is_the_largest_that_fits() -> None:
    small = choose(TP2, seconds=1e9, gib=24)
    assert small.state_bytes < LEAST_STATE_BYTES and small.used_bytes <= 0.85 * (24 << 30)
    larger = dataclasses.replace(small.config, num_layers=small.config.num_layers + 1)
    assert build_model(larger, OWN).used_bytes > 0.85 * (24 << 30)
    with pytest.raises(UserError, match="1.07 GB of a GPU for a process: too little for any model"):
        choose(TP2, seconds=1e9, gib=1)


@pytest.mark.parametrize("shape", [TP2, TP1, Shape(tp=1, pp=2)])
def test_the_arguments_give_the_model_that_was_counted(shape: Shape) -> None:
    model = choose(shape, seconds=300.0)
    config, _ = parse_run(list(model.arguments(77)))
    assert config == dataclasses.replace(model.config, iterations=77)


def test_a_large_iteration_is_what_goes_over_the_wire() -> None:
    """The reduction alone of 1.65 billion gradients in fp32 over three hosts, by hand: 2 x 2/3 x 4 bytes each."""
    config = dataclasses.replace(choose(TP2, seconds=10.0).config, num_microbatches=1)
    halved = dataclasses.replace(OWN, host_bytes_s=OWN.host_bytes_s / 2)
    assert 1.8 < estimate_iteration_s(config, halved) / estimate_iteration_s(config, OWN) <= 2.0


# ---- the time


def test_a_part_has_its_share_of_what_is_left() -> None:
    estimates = [Estimate(name=name, answers="", seconds=seconds) for name, seconds in
                 (("a", 100.0), ("b", 300.0), ("c", 100.0))]
    assert share_s("a", estimates, 1000.0) == 200.0
    assert share_s("b", estimates, 100.0) == 75.0
    assert share_s("c", estimates, 42.0) == 42.0


@pytest.mark.parametrize("num_gpus", [4, 8])
def test_all_of_it_fits_into_nine_minutes(num_gpus: int) -> None:
    done = subprocess.run([sys.executable, "-m", "analysis.bench_gpus", "--plan", "--gpus", str(num_gpus)], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    words = last.split()
    assert words[0] == "sum" and words[4:] == ["525", "s"] and float(words[1]) <= 525, last
    assert "too long" not in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[2:-1]] == ["moves", "ablation", "switches", "kill"]


def test_what_is_too_long_is_said() -> None:
    layout = build_layout(8, H200)
    estimates = build_estimates(layout, num_moves=10, ablation="a model", ablation_s=1000.0, can_park=False)
    told = format_plan(layout, estimates, 525.0)
    assert "too long" in told.splitlines()[-1] and "connected, lazy (parking isn't possible)" in told
