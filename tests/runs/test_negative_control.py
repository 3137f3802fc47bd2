"""Each kind of state, left out in turn, makes the comparison with the undisturbed run fail.

A joiner's state is NaN and wrong values before the transfer, so that what is left out can't be right by accident. A job
that this brings down has failed the comparison as well; the move itself must have been committed.
"""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import Case, Harness, Undisturbed, final_digests, undisturbed, vacate  # noqa: F401

from analysis.compare import main as compare
from analysis.log import read_run, text
from migration.options import AT_THE_CUT, STATE_KINDS

ROOT = Path(__file__).resolve().parents[2]
PROFILE, NUM_PROCESSES = "tiny_TP1_PP2", 6
CASE = Case(profile=PROFILE, iterations=8)
# kinds that only some jobs have
SETTINGS = {"grad_scaler": ("dtype=fp16",), "overlap_bookkeeping": ("overlap_grad_reduce=true", "bucket_size=20000")}
# kinds that no job has on the CPU or with some version of Megatron-Core
PERHAPS_NOWHERE = {"buffers", "norm_group_cache", "rng_cuda"}


def test_every_kind_has_its_control() -> None:
    """In a process of its own: the list of kinds needs torch."""
    program = "from migration.state_kinds import KINDS; from migration.gradients import KIND; print(*KINDS, KIND)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*STATE_KINDS, AT_THE_CUT]


def arm(kind: str) -> tuple[str, ...]:
    """At the cut parameters come with the optimizer's step, and the stream brings step counts and learning rates along.

    And a step that is replayed with moments that never came gives wrong main parameters: whether there is one depends
    on how fast the stream is, and then the digests end the move.
    """
    at_boundary = ("parameters", "optimizer_steps", "param_groups", "moments")
    return ("--arm", "two_stage+warmup") if kind in at_boundary else ()


def kind_case(kind: str) -> Case:
    return Case(profile=PROFILE, iterations=CASE.iterations, settings=SETTINGS.get(kind, ()))


@pytest.mark.parametrize("kind", (*STATE_KINDS, AT_THE_CUT))
def test_left_out(harness: Harness, undisturbed: Undisturbed, kind: str) -> None:
    case = kind_case(kind)
    twin = undisturbed(case)
    if kind != AT_THE_CUT and kind not in {name for _, name in final_digests(read_run(twin))}:
        assert kind in PERHAPS_NOWHERE, f"{kind} is in no undisturbed run: this control controls nothing"
        pytest.skip(f"this job has no {kind}")
    finished = harness(*case.arguments(NUM_PROCESSES), *vacate("b1->b2@4"), "--omit-state", kind, *arm(kind),
                       np=NUM_PROCESSES)
    moved = read_run(finished.run)
    found = [(text(move["outcome"]), text(move["reason"])) for move in moved.moves]
    assert found == [("COMMITTED", "")], finished.err[-2000:]
    assert compare([str(twin), str(finished.run)]) == 1


def test_nothing_left_out(harness: Harness, undisturbed: Undisturbed) -> None:
    """The control of the controls: the same run is equal when nothing is left out."""
    finished = harness(*CASE.arguments(NUM_PROCESSES), *vacate("b1->b2@4"), np=NUM_PROCESSES)
    assert finished.rc == 0, finished.err[-2000:]
    assert compare([str(undisturbed(CASE)), str(finished.run)]) == 0
