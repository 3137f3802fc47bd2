"""The controller's clocks."""
from __future__ import annotations

import time

import pytest

from migration.watch import FIRST_WORD_S, Watch

TIMEOUT_S = 15.0


@pytest.mark.parametrize("first_word_s", [0.0, FIRST_WORD_S])
def test_who_has_not_said_a_word_yet_may_still_import(first_word_s: float) -> None:
    """World rank 0 speaks at once, 1 later; 2 never does."""
    begun_s = time.monotonic()
    watch = Watch(3, beat_s=5.0, heartbeat_timeout_s=TIMEOUT_S, first_word_s=first_word_s)
    watch.heard(0)
    late_s = begun_s + TIMEOUT_S + 5.0
    assert [rank for rank, _ in watch.silent(late_s)] == ([0] if first_word_s else [0, 1, 2])
    watch.heard(1)
    assert {rank for rank, _ in watch.silent_for(late_s, 1.0)} >= {0, 1}, "from its first word on it counts like others"
    assert 2 in {rank for rank, _ in watch.silent(begun_s + FIRST_WORD_S + 1.0)}
