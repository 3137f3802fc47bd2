"""The arm that moves are compared with, where it can't be measured; its parts are checked in test_experiments.py."""
from __future__ import annotations

from pathlib import Path

import pytest

from analysis.restart_arm import measure_restart
from migration.errors import UserError


def test_a_run_that_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        measure_restart(["--profile", "nowhere"], 3, "b0", "b0", tmp_path, num_processes=2)
