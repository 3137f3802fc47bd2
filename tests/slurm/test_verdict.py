"""What a run left behind, as the batch script hears it."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm.verdict import judge

COMPLETED = {"status": "completed", "error": None}
FAILED = {"status": "failed", "error": "process of slot 3 is gone"}


@pytest.mark.parametrize(("result", "checkpoint", "code", "words"), [
    (COMPLETED, "", 0, "completed"),
    (COMPLETED | {"requeue": False}, "iteration00000020", 0, "completed"),
    (COMPLETED | {"status": "stopped", "requeue": True}, "iteration00000020", 75, "requeued"),
    (FAILED | {"requeue": True}, "iteration00000020", 75, "slot 3 is gone"),
    (FAILED | {"requeue": False}, "", 1, "failed: process of slot 3 is gone"),
    (None, "iteration00000020", 75, "without a result"),
    (None, "iteration00000020.unfinished", 1, "no checkpoint"),
    (None, "", 1, "without a result"),
])
def test_verdicts(result: dict | None, checkpoint: str, code: int, words: str, tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    (run / "log").mkdir(parents=True)
    if result is not None:
        (run / "result.json").write_text(json.dumps(result))
    if checkpoint:
        (checkpoints / checkpoint).mkdir(parents=True)
    found, why = judge(run, checkpoints)
    assert found == code and words in why and "\n" not in why
    assert judge(run, None)[0] == (code if result is not None else 1)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_run_that_was_refused_is_not_requeued(has_folder: bool, tmp_path: Path) -> None:
    """It would be refused again. Its folder may be there, but bring_up takes the one for logs away."""
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    (checkpoints / "iteration00000020").mkdir(parents=True)
    if has_folder:
        run.mkdir()
    code, why = judge(run, checkpoints)
    assert code == 1 and "never began" in why and "\n" not in why
