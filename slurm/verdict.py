"""How a run ended, as an exit code for a batch script: 0 completed, 75 requeue it, 1 neither. Says why in one line.

A launcher's own exit code can't say it: processes leave, and a node may be gone. A run that came to an end left
RUN/result.json; one whose controller and its deputy were lost left none; one that was refused has no RUN/log either
(bringup.py), and would be refused again.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from migration.checkpoint_files import list_complete
from migration.options import REQUEUE_CODE


def judge(run: Path, checkpoints: Path | None) -> tuple[int, str]:
    """(exit code, why) of the run in `run`, which has ended. checkpoints: the job's folder of them, if it has one."""
    result = _read_result(run)
    if result is None:
        if not (run / "log").is_dir():
            return 1, f"{run}: never began, so it isn't to be requeued; what was wrong is said above"
        if checkpoints is not None and list_complete(checkpoints):
            return REQUEUE_CODE, f"{run}: ended without a result; there is a checkpoint to go on from"
        return 1, f"{run}: ended without a result, and there is no checkpoint; its logs are in {run / 'log'}"
    if result.get("requeue"):
        return REQUEUE_CODE, f"{run}: {result['error'] or 'stopped'}; it is to be requeued"
    if result["status"] == "completed":
        return 0, f"{run}: completed"
    return 1, f"{run}: {result['status']}: {result['error']}"


def _read_result(run: Path) -> dict[str, Any] | None:
    path = run / "result.json"
    if not path.exists():
        return None
    return json.loads(path.read_text())  # written under another name first, so it is whole
