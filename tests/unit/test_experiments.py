"""The jobs that experiments run: their arguments are those that a user could give, and do what the experiment is."""
from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from synthetic_run import make_run

from analysis import experiments, gpu_moves
from migration.arguments import parse_run
from migration.arms import ARMS
from migration.errors import UserError
from migration.experiments import (Site, ablation_job, build_site, m24_job, scale_job, straggler_job, to_and_fro)
from migration.plan import check_moves, initial_roster, parse_vacate, plan_move
from migration.profiles import get_profile


def site_of(profile: str, num_processes: int | None = None, hosts: tuple[str, ...] = ()) -> Site:
    return build_site(get_profile(profile), num_processes, hosts, ("--profile", profile))


def requests(arguments: list[str]) -> list[str]:
    return [text for flag, text in zip(arguments, arguments[1:]) if flag == "--vacate"]


@pytest.mark.parametrize("profile, num_processes, vacated, spare, movable", [
    ("tiny_TP2_PP1", 8, "b1", "b3", 2), ("tiny_TP4_PP2", 32, "b1", "b3", 8), ("20B_TP4_PP2", 32, "b1", "b3", 8),
    ("one_rank_20GB", 2, "b0", "b1", 1), ("tiny_TP2_PP2", 6, "b1", "b2", 2)])
def test_a_profile_gets_its_hosts_and_a_spare_one(profile: str, num_processes: int, vacated: str, spare: str,
                                                  movable: int) -> None:
    site = site_of(profile)
    assert (len(site.hosts), site.vacated, site.spare, site.num_movable) == (num_processes, vacated, spare, movable)


def test_given_hosts_are_taken_and_too_few_refused() -> None:
    assert site_of("one_rank_20GB", 2, ("left", "right")).vacated == "left"
    with pytest.raises(UserError, match="no host has 2 spare processes and no slot: b1 can't be moved"):
        site_of("tiny_TP2_PP1", 6)
    with pytest.raises(UserError, match="9 processes can't be shared evenly by 4 hosts"):
        site_of("tiny_TP2_PP1", 9)


@pytest.mark.parametrize("profile", ["tiny_TP2_PP1", "one_rank_20GB"])
def test_ablation_takes_every_arm_there_and_back(profile: str) -> None:
    site = site_of(profile)
    arguments, arms = ablation_job(site, 4, 8)
    asked = requests(arguments)
    assert len(asked) == len(arms) == 16
    for name in ARMS:
        ways = [text.partition("@")[0] for text, arm in zip(asked, arms, strict=True) if arm == name]
        assert sorted(ways) == sorted([f"{site.vacated}->{site.spare}", f"{site.spare}->{site.vacated}"] * 2), name
    check_moves(initial_roster(site.hosts, site.config), tuple(asked))
    config, options = parse_run([*site.arguments, *arguments])
    assert options.arms == tuple(arms)
    assert config.iterations > max(parse_vacate(text, need_iteration=True).iteration or 0 for text in asked)


def test_scale_takes_one_to_all_of_a_host_and_brings_them_back() -> None:
    site = site_of("tiny_TP4_PP2")
    arguments, numbers = scale_job(site, 1, 8)
    roster = initial_roster(site.hosts, site.config)
    before = roster
    assert numbers == [n for n in range(1, 9) for _ in range(2)]
    for number, text in zip(numbers, requests(arguments), strict=True):
        plan = plan_move(roster, parse_vacate(text, need_iteration=True))
        assert len(plan.assignments) == number
        roster = roster.after(plan)
    assert roster.holders == before.holders


def test_rebalance_moves_at_the_asked_distance() -> None:
    iterations = [parse_vacate(text, need_iteration=True).iteration
                  for text in requests(to_and_fro(site_of("tiny_TP2_PP1"), 3, 50))]
    assert iterations == [50, 100, 150]


def test_of_two_slots_nobody_can_be_slow() -> None:
    with pytest.raises(UserError, match="of 2 slots nobody can say which one is slow; 3 are needed"):
        parse_run(["--set", "dp=1", "--auto-evict"])


def test_straggler_and_m24() -> None:
    site = site_of("tiny_TP2_PP1")
    assert straggler_job(site, "", evict=True)[:3] == ["--slow", "2:3@10", "--auto-evict"]
    config, options = parse_run([*site.arguments, *straggler_job(site, "4:2@7", evict=False)])
    assert (options.slow, options.find_stragglers, options.auto_evict) == (("4:2@7",), True, False)
    text, = requests(m24_job(site_of("tiny_TP4_PP2"), 12))
    assert text == "b1->b3@12"


@pytest.mark.parametrize("ways", [("--data", "my.txt", "--load=saved", "--checkpoints", "../kept"),
                                  ("--set", "data=my.txt", "--load", "saved", "--checkpoints", "../kept")])
def test_paths_are_seen_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str], ways: tuple[str, ...]) -> None:
    """Jobs are started elsewhere. The command that is shown does the same when it is pasted into a shell."""
    started: list[str] = []

    def start(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        started.extend(arguments)
        return subprocess.CompletedProcess(arguments, 3)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(experiments, "run_child", start)
    with pytest.raises(UserError, match="exit code 3"):
        experiments.main(["--experiment", "m24_live_migration", "--connect", "pause", *ways])
    shown = capsys.readouterr().out
    assert shlex.split(shown.removeprefix("=== python ")) == started and " 'b1->b3@12' " in shown
    monkeypatch.chdir("/")
    config, options = parse_run(started[1:])
    assert (config.data, options.load) == (str(tmp_path / "here" / "my.txt"), str(tmp_path / "here" / "saved"))
    assert (options.checkpoints, options.connect) == (str(tmp_path / "kept"), "pause")


@pytest.mark.parametrize("code", [0, 1])
def test_the_command_of_a_bench_section_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
                                                      ) -> None:
    (tmp_path / "harness.py").write_text(f"raise SystemExit({code})")
    monkeypatch.setattr(gpu_moves, "CODE_ROOT", tmp_path)
    folder, arguments = make_run(tmp_path / "run"), ["--vacate", "b1->b3@8"]
    try:
        shown = gpu_moves.run_arm(folder, arguments, environment={}, on_gpu=False, timeout_s=60.0).command
    except gpu_moves.RunFailed as error:
        shown = str(error)
    assert "harness.py --vacate 'b1->b3@8'" in shown and ("ended with 1" in shown) is (code == 1)
