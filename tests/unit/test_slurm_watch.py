"""How often Slurm is looked at."""
from __future__ import annotations

import threading

import pytest

from migration.slurm_watch import choose_pause


@pytest.mark.parametrize(("poll_s", "num_failed", "took_s", "pause_s"), [
    (5, 0, 0.1, 5), (5, 0, 4, 12), (5, 0, 40, 60),  # slow
    (5, 1, 0.1, 10), (5, 3, 0.1, 40), (5, 99, 0.1, 60),  # failing
    (300, 0, 0.1, 300), (300, 4, 40, 300), (1e300, 0, 0.1, threading.TIMEOUT_MAX)])  # rarer, as the user asked for
def test_pause_between_looks(poll_s: float, num_failed: int, took_s: float, pause_s: float) -> None:
    assert choose_pause(poll_s, num_failed, took_s) == pause_s
