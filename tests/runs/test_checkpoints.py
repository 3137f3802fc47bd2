"""A job that is stopped, killed in the middle of a save, and started again elsewhere, equals one that never was."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Finished, Running
from support import (Case, Harness, Undisturbed, completed, final_digests, last_iteration, refused,  # noqa: F401
                     trace, undisturbed, vacate)

from analysis.log import read_run

CASE = Case(iterations=60, settings=("num_microbatches=1", "overlap_grad_reduce=true", "overlap_param_gather=true",
                                     "bucket_size=20000"))


def result_of(finished: Finished) -> dict[str, Any]:
    return json.loads((finished.run / "result.json").read_text())


def assert_part_of(twin: Path, run: Path, first: int) -> int:
    """Every iteration of `run`, from `first` on, is that of the undisturbed twin bit for bit. Returns the last one."""
    left, right = trace(read_run(twin)), trace(read_run(run))
    iterations = {iteration for iteration, _ in right}
    assert min(iterations) == first and iterations == set(range(first, max(iterations) + 1))
    assert {key: left[key] for key in right} == right
    return max(iterations)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.mark.timeout(800)  # three runs
def test_stopped_killed_and_started_again(harness: Harness, start_harness: Callable[..., Running],
                                          undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Three runs of one training: stopped after a move, killed while it saves, and gone on with to the end."""
    twin, checkpoints = undisturbed(CASE), tmp_path / "checkpoints"
    common = ("--checkpoints", checkpoints, "--checkpoint-digests")

    # a move has been made and training will be held for another one, which is dropped, when the stop is asked for
    job = start_harness(*CASE.arguments(8), *common, "--checkpoint-every", "4", *vacate("b1->b3@3", "b0->b1@58"))
    job.wait_for(lambda: last_iteration(job.run) >= 5, "iteration 5 to end", timeout_s=200)
    asked = harness("stop", "--run", job.run, "--requeue", "--wait", np=None)
    assert asked.rc == 0 and str(checkpoints) in asked.out, asked.err
    first = job.wait(200)
    result = result_of(first)
    assert (first.rc, result["status"], result["requeue"]) == (75, "stopped", True), first.err
    assert [(m["request"], m["outcome"]) for m in result["moves"]] == [("b1->b3@3", "COMMITTED"),
                                                                      ("b0->b1@58", "REFUSED")]
    stopped = assert_part_of(twin, first.run, 0) + 1
    assert 7 < stopped < 58
    assert result["checkpoints"][-1]["iteration"] == stopped
    assert [row["iteration"] for row in result["checkpoints"][:-1]] == list(range(4, stopped, 4))
    assert len(names(checkpoints)) == 3 and f"iteration{stopped:08d}" in names(checkpoints)

    # on other hosts, and killed between the last file and the name
    due = 4 * (stopped // 4 + 1)
    job = start_harness(*CASE.arguments(8), "--hosts", "b3,b2,b1,b0", *common, "--checkpoint-every", "4",
                        "--slow-checkpoint", "60")
    job.wait_for(lambda: list(checkpoints.glob(f"iteration{due:08d}.*/metadata.json")), "the next one to be written",
                 timeout_s=200)
    unfinished, = checkpoints.glob(f"iteration{due:08d}.*unfinished")
    job.kill()
    assert assert_part_of(twin, job.run, stopped) == due - 1
    assert f"goes on at iteration {stopped} from" in job.out
    assert unfinished.name in names(checkpoints)

    # a newer one is there that isn't whole, beside the unfinished one
    newest = checkpoints / f"iteration{due + 4:08d}"
    os.rename(unfinished, newest)
    (newest / "checkpoint.json").write_bytes((checkpoints / "latest" / "checkpoint.json").read_bytes())
    os.truncate(newest / "__3_0.distcp", 100)
    (checkpoints / "iteration99999999.unfinished").mkdir()
    third = harness(*CASE.arguments(8), *common, "--vacate", "b2->b3@50", timeout=200)
    assert completed(third)["checkpoints"][-1]["iteration"] == CASE.iterations
    for words in ((newest.name, "isn't whole"), ("iteration99999999.unfinished", "never finished")):
        assert [line for line in third.out.splitlines() if all(word in line for word in words)], third.out
    assert assert_part_of(twin, third.run, stopped) == CASE.iterations - 1
    assert final_digests(read_run(twin)) == final_digests(read_run(third.run))
    assert not [name for name in names(checkpoints) if name.endswith(".unfinished")]


def test_what_can_not_be_gone_on_from(harness: Harness, tmp_path: Path) -> None:
    """Each is refused in one line, with exit code 2."""
    case = Case(iterations=3)
    saved = harness(*case.arguments(6), "--save-at", "2", np=6)
    assert completed(saved)["checkpoints"][0]["iteration"] == 2
    checkpoints = saved.run / "checkpoints"
    folder = checkpoints / "iteration00000002"

    def is_refused(*arguments: object, words: tuple[str, ...]) -> None:
        finished = harness(*case.arguments(8), *arguments)
        refused(finished, *words)
        assert finished.rc == 2

    is_refused("--load", checkpoints, "--set", "tp=1", words=(str(folder), "tp (2, here 1)"))
    is_refused("--load", folder, "--set", "iterations=2", words=("iteration 2", "--set iterations"))
    is_refused("--load", tmp_path / "nowhere", words=("nowhere", "no such folder"))
    is_refused("--load", tmp_path, words=(str(tmp_path), "no checkpoint"))
    is_refused("--save-at", "3", words=("--save-at 3", "1 and 2"))
    (folder / "__1_0.distcp").write_bytes(bytes((folder / "__1_0.distcp").stat().st_size))
    is_refused("--load", folder, words=(str(folder), "can't be read"))  # found only by reading: by a process of the job
    os.truncate(folder / "__1_0.distcp", 100)
    is_refused("--load", folder, words=("__1_0.distcp", "has 100 bytes"))
    (folder / "__1_0.distcp").unlink()
    is_refused("--load", checkpoints, words=("none of its 1 checkpoints", "__1_0.distcp is missing"))
