"""Whether a joiner is accepted: figures and limits in, words out; and the figures of this machine."""
from __future__ import annotations

import dataclasses

import pytest
from one_move import PLAN, ROSTER

from migration.acceptance import DEFAULTS, Acceptance, Figures, judge, parse_limits
from migration.arguments import parse_run
from migration.errors import UserError

LEAVER = Figures(device="GPU", flops=700e12, free_bytes=40 * 10 ** 9, used_bytes=60 * 10 ** 9, bytes_per_s=200e9)
JOINER = Figures(device="GPU", flops=690e12, free_bytes=139 * 10 ** 9, used_bytes=10 ** 9, bytes_per_s=250e9)
LIMITS = DEFAULTS["GPU"]


def test_accepted() -> None:
    assert judge(JOINER, LEAVER, LIMITS) == ""
    assert judge(LEAVER, LEAVER, LIMITS) != "", "its free memory is less than it uses"


@pytest.mark.parametrize(("name", "just_right", "too_little", "words"), [
    ("flops", 350e12, 349e12, ("3.49e+05 GFLOP/s", "less than 0.5 of its leaver's 7e+05")),
    ("free_bytes", 60 * 10 ** 9, 59 * 10 ** 9, ("59 GB of memory are free", "less than 1 of the 60")),
    ("bytes_per_s", 20e9, 19e9, ("19 GB/s", "less than 0.1 of the 200")),
])
def test_each_limit(name: str, just_right: float, too_little: float, words: tuple[str, ...]) -> None:
    assert judge(dataclasses.replace(JOINER, **{name: just_right}), LEAVER, LIMITS) == ""
    wrong = judge(dataclasses.replace(JOINER, **{name: too_little}), LEAVER, LIMITS)
    assert all(word in wrong for word in words) and ";" not in wrong, wrong


def test_everything_wrong_is_named() -> None:
    wrong = judge(dataclasses.replace(JOINER, flops=1.0, free_bytes=1, bytes_per_s=1.0), LEAVER, LIMITS)
    assert [part.split("(")[-1] for part in wrong.split("; ")] == ["matmul)", "memory)", "bandwidth)"]


def test_a_limit_of_nothing_and_a_leaver_without_a_figure() -> None:
    slow = dataclasses.replace(JOINER, flops=1.0, bytes_per_s=0.0)
    limits = parse_limits("matmul=0,bandwidth=0", "GPU")
    assert limits is not None and judge(slow, LEAVER, limits) == ""
    alone = dataclasses.replace(LEAVER, bytes_per_s=0.0)  # in a job of one slot
    assert judge(dataclasses.replace(JOINER, bytes_per_s=0.0), alone, LIMITS) == ""


def test_another_kind_of_device() -> None:
    assert judge(dataclasses.replace(JOINER, device="CPU"), LEAVER, LIMITS) == "it has a CPU, its leaver a GPU"
    assert judge(dataclasses.replace(JOINER, device="shared GPU"), LEAVER, LIMITS) == ""


@pytest.mark.parametrize("device", DEFAULTS)
def test_limits(device: str) -> None:
    assert parse_limits("", device) == DEFAULTS[device]
    assert parse_limits("matmul=0.25", device) == dataclasses.replace(DEFAULTS[device], matmul=0.25)
    assert parse_limits("memory=0,bandwidth=2", device) == dataclasses.replace(DEFAULTS[device], memory=0, bandwidth=2)
    assert parse_limits("none", device) is None


@pytest.mark.parametrize("text", ["matmul", "matmul=", "matmul=fast", "matmul=-1", "matmul=nan", "matmul=inf",
                                  "speed=0.5", "none,matmul=1", "0.5"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=f"--accept {text}: write it as matmul=SHARE,memory=SHARE,bandwidth=SHARE"):
        parse_run(["--accept", text])


def test_a_slow_joiner_that_nobody_measures() -> None:
    with pytest.raises(UserError, match="slow@2:PREPARING: with --accept none nobody"):
        parse_run(["--accept", "none", "--fault", "slow@2:PREPARING"])
    with pytest.raises(UserError, match="slow@2:READY: .* in PREPARING only"):
        parse_run(["--fault", "slow@2:READY"])


@pytest.mark.parametrize("order", [(2, 4), (4, 2)])
def test_a_pair_is_judged_once_both_have_spoken(order: tuple[int, int]) -> None:
    """PLAN moves slot 2 from world rank 2 to 4, and slot 3 from 3 to 5."""
    figures = {2: LEAVER, 4: dataclasses.replace(JOINER, flops=1e12), 3: LEAVER, 5: JOINER}
    acceptance = Acceptance(PLAN, ROSTER.hosts, "")
    assert acceptance.take(5, figures[5]) == ("", "")
    assert acceptance.take(order[0], figures[order[0]]) == ("", "")
    told, wrong = acceptance.take(order[1], figures[order[1]])
    assert told.startswith("world rank 4 on c for slot 2: 1e+03 GFLOP/s")
    assert wrong.startswith("world rank 4 on c isn't fit for slot 2 of world rank 2 on b: a matrix multiply runs at 1e")
    told, wrong = acceptance.take(3, figures[3])
    assert told.startswith("world rank 5 on c for slot 3") and wrong == ""


def test_limits_of_the_run() -> None:
    slow = dataclasses.replace(JOINER, flops=1e12)
    for accept, is_fit in (("", False), ("none", True), ("matmul=0.001", True), ("matmul=0.01", False)):
        acceptance = Acceptance(PLAN, ROSTER.hosts, accept)
        acceptance.take(2, LEAVER)
        told, wrong = acceptance.take(4, slow)
        assert told and (wrong == "") is is_fit


def test_figures_of_this_machine() -> None:
    """A slowed measurement of the same processor is slower; and what is measured leaves the job's randomness alone."""
    import torch

    from migration.check_measure import measure_figures, measure_matmul
    before = torch.get_rng_state()
    figures = measure_figures(torch.device("cpu"), is_shared=False)
    slowed = measure_figures(torch.device("cpu"), is_shared=False, slowdown=100)
    assert figures.device == "CPU" and figures.free_bytes > 0 and figures.used_bytes > 1 << 20
    assert slowed.flops < 0.2 * figures.flops
    assert Figures(**figures.to_json()) == figures
    measure_matmul(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
