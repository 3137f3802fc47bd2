"""The commands beside a run, without one: how `request --wait` ends, and what the progress line counts to."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from migration import commands
from migration.errors import UserError
from migration.profiles import get_profile
from migration.record import RunRecord
from migration.requests import NoJob

MOVE = {"request": "b1", "reason": "", "iteration": 4, "downtime_s": 0.01, "setup_s": 0.5, "bytes": 5}


def move(request_id: int, outcome: str) -> dict[str, Any]:
    return MOVE | {"request_id": request_id, "outcome": outcome}


class Job:
    """Answers as often as it has answers, then is gone."""

    def __init__(self, *statuses: list[dict[str, Any]]) -> None:
        self._statuses = list(statuses)

    def __call__(self, run: str, request: dict[str, Any], is_patient: bool = False) -> dict[str, Any]:
        assert is_patient == (request["do"] == "status"), "who waits for a move waits out a takeover"
        if request["do"] == "vacate":
            return {"id": 7, "phase": "TRAINING"}
        if not self._statuses:
            raise NoJob("no job answers there")
        return {"moves": self._statuses.pop(0)}


def wait(monkeypatch: pytest.MonkeyPatch, run: Path, job: Job) -> int:
    monkeypatch.setattr(commands, "send_request", job)
    monkeypatch.setattr(commands, "_LOOK_S", 0.0)
    return commands.run(["request", "--run", str(run), "--vacate", "b1", "--wait"])


def leave_result(run: Path, moves: list[dict[str, Any]], error: str | None = None) -> None:
    result = {"status": "failed" if error else "completed", "error": error, "moves": moves}
    (run / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize("outcome, code", [("COMMITTED", 0), ("ABORTED", 1), ("REFUSED", 1)])
def test_wait_is_for_this_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, code: int) -> None:
    """Another request of the same text, before it or after it, isn't it."""
    other = "ABORTED" if code == 0 else "COMMITTED"
    job = Job([], [move(6, other)], [move(6, other), move(8, other), move(7, outcome)])
    assert wait(monkeypatch, tmp_path, job) == code


@pytest.mark.parametrize("outcome, code", [("COMMITTED", 0), ("ABORTED", 1)])
def test_the_run_ends_between_two_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, code: int,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    leave_result(tmp_path, [move(6, "ABORTED"), move(7, outcome)])
    assert wait(monkeypatch, tmp_path, Job([], [])) == code
    assert outcome.lower() in capsys.readouterr().out


def test_the_run_ends_before_the_move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_result(tmp_path, [move(6, "COMMITTED")], "slot 3 died")
    with pytest.raises(UserError, match=r"request 7: the run ended \(slot 3 died\) before the move came about"):
        wait(monkeypatch, tmp_path, Job([]))


def test_the_run_leaves_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="left no result"):
        wait(monkeypatch, tmp_path, Job([]))


def test_progress_counts_to_the_iterations_of_this_run(capsys: pytest.CaptureFixture[str]) -> None:
    """With --save-at they are fewer than the config's, and the last of them is shown in any case."""
    config = get_profile("tiny_TP2_PP1")
    nothing: Any = None
    record = RunRecord(config=config, num_iterations=12, run="", timeline=nothing, progress_s=1e9)
    for iteration in (1, 2, 11, 12):
        record.progress({"iteration": iteration, "loss": 1.0, "time_s": 0.1}, 0, "")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["iteration 12/12"]
