"""A job that is moved equals the same job undisturbed, to the last bit.

Losses, gradient norms, samples, and at the end the digests of every kind of state of every slot. Each run vacates every
host that trains, b0 with world rank 0 too, and lets a vacated host take slots again.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import Case, Harness, Undisturbed, assert_equal, assert_moves, completed, undisturbed, vacate  # noqa: F401

from analysis.log import read_run
from migration.arms import ARMS

Move = tuple[str, list[list[int]]]  # request without its iteration, [slot, leaver, joiner] of each slot

# hosts have two processes each: b0 has world ranks 0 and 1
SIX_SLOTS: list[Move] = [("b1->b3", [[2, 2, 6], [3, 3, 7]]),
                         ("b0->b1", [[0, 0, 2], [1, 1, 3]]),
                         ("b2->b0", [[4, 4, 0], [5, 5, 1]])]
FOUR_SLOTS: list[Move] = [("b1->b2", [[2, 2, 4], [3, 3, 5]]),
                          ("b0->b1", [[0, 0, 2], [1, 1, 3]]),
                          ("b2->b0", [[2, 4, 0], [3, 5, 1]])]

DISTRIBUTED: tuple[str, ...] = ()
OVERLAP = ("overlap_grad_reduce=true", "bucket_size=20000")  # several buckets, or there is nothing to overlap
GATHER = ("overlap_param_gather=true",)
PLAIN = ("distributed_optimizer=false",)
FP16 = Case(iterations=16, settings=("dtype=fp16", "initial_loss_scale=2097152", "loss_scale_window=3"))


def move_and_compare(harness: Harness, undisturbed: Undisturbed, case: Case, at: tuple[int, int, int],
                     *more: str) -> Path:
    moves = SIX_SLOTS if case.job_size == 6 else FOUR_SLOTS
    num_processes = case.job_size + 2
    requests = [f"{request}@{iteration}" for (request, _), iteration in zip(moves, at, strict=True)]
    finished = harness(*case.arguments(num_processes), *vacate(*requests), *more, np=num_processes)
    result = completed(finished)
    assert_moves(result, [(iteration, assignments) for (_, assignments), iteration in zip(moves, at, strict=True)])
    assert_equal(case, undisturbed(case), finished.run)
    arms = more[more.index("--arm") + 1].split(",") if "--arm" in more else ["full"]
    # at the cut the joiner takes the step of the iteration before, and so that one is its own already
    first = tuple(iteration - ARMS[arms[i % len(arms)]].cuts for i, iteration in enumerate(at))
    assert_held_as_assigned(finished.run, moves, first, case.job_size)
    return finished.run


def assert_held_as_assigned(run: Path, moves: list[Move], at: tuple[int, ...], job_size: int) -> None:
    """From iteration `at` on it is the joiner, and nobody else, that has the slot."""
    rows = read_run(run).iterations
    held = {(int(row["iteration"]), int(row["slot"])): (int(row["world_rank"]), int(row["generation"])) for row in rows}
    holders = list(range(job_size))
    for iteration in range(int(rows["iteration"].max()) + 1):
        for (_, assignments), start in zip(moves, at, strict=True):
            for slot, leaver, joiner in assignments if start == iteration else []:
                assert holders[slot] == leaver
                holders[slot] = joiner
        generation = sum(start <= iteration for start in at)
        found = [held[iteration, slot] for slot in range(job_size)]
        assert found == [(holder, generation) for holder in holders], f"iteration {iteration}"


# every profile with every optimizer and with overlap; all pairs of these would take twice as long
@pytest.mark.parametrize(("profile", "settings"), [
    ("tiny_TP2_PP1", DISTRIBUTED), ("tiny_TP2_PP1", (*PLAIN, *OVERLAP)),
    ("tiny_TP2_PP2", DISTRIBUTED), ("tiny_TP2_PP2", (*OVERLAP, *GATHER)), ("tiny_TP2_PP2", PLAIN),
    ("tiny_TP1_PP2", (*OVERLAP, *GATHER)), ("tiny_TP1_PP2", PLAIN)])
def test_every_training_host_in_one_run(harness: Harness, undisturbed: Undisturbed, profile: str,
                                        settings: tuple[str, ...]) -> None:
    run = move_and_compare(harness, undisturbed, Case(profile=profile, settings=settings), at=(3, 6, 9))
    losses = read_run(run).series(Case(profile=profile).job_size - 1)["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0], "the job learns nothing: equality would mean little"


@pytest.mark.fast
def test_first_middle_and_last_iteration(harness: Harness, undisturbed: Undisturbed) -> None:
    """Before anything was trained, and for the last iteration alone. At the boundary, not at the cut."""
    move_and_compare(harness, undisturbed, Case(), (0, 7, Case().iterations - 1), "--arm", "two_stage+warmup,naive")


@pytest.mark.fast
def test_first_and_last_cut(harness: Harness, undisturbed: Undisturbed) -> None:
    """Inside iteration 0 and inside the last but one. Leavers take the step too, and it is the joiners'."""
    run = move_and_compare(harness, undisturbed, Case(), (1, 7, Case().iterations - 1), "--leaver-steps")
    assert sum(kind == b"proof" for kind in read_run(run).events["kind"]) == 6


@pytest.mark.parametrize("case", [
    Case(iterations=16, settings=(*OVERLAP, *GATHER)),
    Case(iterations=16, profile="tiny_TP1_PP2", settings=(*PLAIN, "per_token_loss=true")), FP16],
    ids=["distributed_overlap", "plain_per_token_loss", "fp16_with_overflows"])
def test_a_stream_over_many_iterations(harness: Harness, undisturbed: Undisturbed, case: Case) -> None:
    """Batches go over between several steps, whose gradients follow. Leavers take the last step too."""
    run = move_and_compare(harness, undisturbed, case, (10, 11, 12), "--transfer-limit", "0.15", "--leaver-steps")
    replays = [span for span in read_run(run).spans if span["name"] == b"replay"]
    first = [span["world_rank"] for span in replays if span["move"] == 0]
    assert min(first.count(rank) for rank in (2, 3)) >= 2, "the stream was over before steps came"
    assert sum(kind == b"proof" for kind in read_run(run).events["kind"]) == 6


def test_moves_at_neighbouring_iterations(harness: Harness, undisturbed: Undisturbed) -> None:
    move_and_compare(harness, undisturbed, Case(), at=(5, 6, 7))


def test_moves_at_one_iteration(harness: Harness, undisturbed: Undisturbed) -> None:
    """Each takes effect there, one after the other: training waits for both."""
    move_and_compare(harness, undisturbed, Case(), at=(5, 5, 5))


def test_fp16_with_overflows(harness: Harness, undisturbed: Undisturbed) -> None:
    """The loss scale is too large at first and grows fast, so that steps are skipped before, at and after the moves."""
    run = move_and_compare(harness, undisturbed, FP16, at=(2, 3, 9))  # the step of a cut is among the skipped ones
    assert read_run(run).series(0)["skipped"][[1, 2, 8]].any()
    skipped = read_run(run).series(0)["skipped"].astype(bool)
    assert skipped[:4].any() and skipped[4:].any() and not skipped.all(), f"no mix of skipped steps: {skipped}"


@pytest.mark.parametrize("case", [
    Case(profile="tiny_TP2_PP2", settings=("vpp=2", "sequence_parallel=true", "recompute=true",
                                           "position_embedding=rope", *OVERLAP, *GATHER)),
    Case(profile="tiny_TP1_PP2", settings=("dtype=fp32", "tied_embeddings=false", "dropout=0.0")),
], ids=["interleaved_sequence_parallel_recompute_rope", "fp32_untied"])
def test_other_forms(harness: Harness, undisturbed: Undisturbed, case: Case) -> None:
    move_and_compare(harness, undisturbed, case, at=(3, 6, 9))
