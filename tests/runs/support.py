"""What the tests of whole jobs share: the jobs they run, their undisturbed twins, and what "equal" means.

Owns no test. Must not import torch or MPI. A twin is the same job without spares and without a move; it is run once for
the whole session.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest
from running import Finished

from analysis.compare import main as compare
from analysis.log import Run, read_run, text

JOB_SIZES = {"tiny_TP2_PP1": 6, "tiny_TP2_PP2": 4, "tiny_TP1_PP2": 4}
# Short enough that a move that is stuck aborts, and says what it waited for, before the test's own time limit.
DEADLINES = ("--prepare-deadline", "40", "--switch-deadline", "20")
_UNDISTURBED = pytest.StashKey[dict["Case", Path]]()

Harness = Callable[..., Finished]
Undisturbed = Callable[["Case"], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job: a profile on virtual hosts of two processes each, with settings. A pipeline stage has two layers."""

    profile: str = "tiny_TP2_PP1"
    settings: tuple[str, ...] = ()
    iterations: int = 12

    @property
    def job_size(self) -> int:
        return JOB_SIZES[self.profile]

    @property
    def changes(self) -> list[str]:
        """Arguments: what is different from the profile."""
        layers = ("num_layers=2",) if self.profile.endswith("PP1") else ()
        return [a for s in (f"iterations={self.iterations}", *layers, *self.settings) for a in ("--set", s)]

    def arguments(self, num_processes: int) -> list[str]:
        hosts = ",".join(f"b{i}" for i in range(num_processes // 2))
        return ["--profile", self.profile, "--hosts", hosts, *DEADLINES, *self.changes]


# A long job of short iterations, for what is asked for, or is under way, while it trains.
LONG = Case(iterations=120, settings=("num_microbatches=1",))


def vacate(*requests: str) -> list[str]:
    """Arguments for moves that take effect exactly at the iterations named."""
    return [*(a for request in requests for a in ("--vacate", request)), "--hold"]


@pytest.fixture
def undisturbed(harness: Harness, request: pytest.FixtureRequest,
                tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """undisturbed(case) -> run folder of the case's twin."""
    runs = request.session.stash.setdefault(_UNDISTURBED, {})

    def find(case: Case) -> Path:
        if case not in runs:
            run = tmp_path_factory.mktemp("undisturbed") / "run"
            finished = harness(*case.arguments(case.job_size), np=case.job_size, run=run)
            result = completed(finished)
            assert result["moves"] == [] and result["generation"] == 0
            runs[case] = run
        return runs[case]

    return find


# results


def completed(finished: Finished) -> dict[str, Any]:
    """The result of a run that must have come to its regular end."""
    assert finished.rc == 0, f"exit code {finished.rc}\n{finished.out[-3000:]}\n{finished.err[-3000:]}"
    result = json.loads((finished.run / "result.json").read_text())
    assert result["status"] == "completed" and result["error"] is None, result
    return result


def outcomes(result: dict[str, Any]) -> list[str]:
    return [move["outcome"] for move in result["moves"]]


def assert_moves(result: dict[str, Any], expected: list[tuple[int, list[list[int]]]]) -> None:
    """Every expected (iteration, assignments) was committed, in this order, each a generation of its own."""
    found = [(move["iteration"], move["assignments"]) for move in result["moves"]]
    assert outcomes(result) == ["COMMITTED"] * len(expected), result["moves"]
    assert found == expected
    assert [move["generation"] for move in result["moves"]] == list(range(1, len(expected) + 1))
    assert result["generation"] == len(expected)


def refused(finished: Finished, *words: str) -> None:
    """The command ended with an error, in one line for the user that holds all `words`, and no traceback."""
    output = finished.out + finished.err
    assert finished.rc == 2, f"exit code {finished.rc}\n{output}"
    assert "Traceback" not in output and "ended without a result" not in output, output
    lines = [line for line in output.splitlines() if all(word in line for word in words)]
    assert len(lines) == 1, f"{len(lines)} lines with {words}, not one:\n{output}"


# equality


def trace(run: Run) -> dict[tuple[int, int], tuple[object, ...]]:
    """What every slot computed in every iteration, bit for bit. Fails where a slot logged an iteration twice."""
    rows = run.iterations
    found = {(int(row["iteration"]), int(row["slot"])):
             (float(row["loss"]).hex(), float(row["grad_norm"]).hex(), int(row["skipped"]),
              int(row["consumed_samples"]), text(row["samples"])) for row in rows}
    assert len(found) == len(rows), "a slot logged an iteration twice"
    return found


def final_digests(run: Run) -> dict[tuple[int, str], str]:
    return {(int(row["slot"]), text(row["kind"])): text(row["digest"]) for row in run.digests}


def assert_equal(case: Case, twin: Path, run: Path) -> None:
    """Both runs did the same, bit for bit, by the tool for users and by a look of our own."""
    left, right = read_run(twin), read_run(run)
    complete = {(iteration, slot) for iteration in range(case.iterations) for slot in range(case.job_size)}
    assert trace(left).keys() == complete, "the undisturbed run isn't complete"
    differing = sorted(key for key in complete if trace(left)[key] != trace(right).get(key))
    assert not differing, f"(iteration, slot) {differing[0]} differs first"
    assert trace(right).keys() == complete
    assert {slot for slot, _ in final_digests(left)} == set(range(case.job_size))
    assert final_digests(left) == final_digests(right)
    assert compare([str(twin), str(run)]) == 0


# a job that runs


def last_iteration(run: Path) -> int:
    """The last iteration that some slot has finished; -1 before the first. Cheap, since it is asked again and again."""
    last = -1
    for path in run.glob("log/w*.h5"):
        try:
            with h5py.File(path, "r", libver="latest", swmr=True) as file:
                rows = file["iterations"]
                last = max(last, int(rows[-1]["iteration"])) if len(rows) else last
        except (OSError, KeyError):  # the file is only being made
            continue
    return last


def pid_of(run: Path, world_rank: int) -> int:
    return read_run(run).processes[world_rank].pid
