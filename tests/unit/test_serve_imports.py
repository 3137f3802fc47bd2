"""Where runs share their imports, and where each does its own."""
from __future__ import annotations

import pytest

from migration import launch
from migration.forkserver import ADDRESS_VARIABLE


def test_no_server_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU: a process that has loaded CUDA's libraries has threads, and can't fork."""
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr("migration.preload.has_gpu", lambda: True)
    with launch.serve_imports() as shared:
        assert shared == {}


def test_a_server_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "/somewhere")
    with launch.serve_imports() as shared:
        assert shared == {}
