"""Where runs share their imports, and that a machine's GPU is seen without starting a thread."""
from __future__ import annotations

from pathlib import Path

import pytest

from migration import launch, placement
from migration.forkserver import ADDRESS_VARIABLE


def test_a_server_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "/somewhere")
    with launch.serve_imports() as shared:
        assert shared == {}


@pytest.mark.parametrize(("files", "visible", "found"), [
    (["nvidia0", "nvidiactl"], None, True), (["nvidia11"], "3", True), (["nvidia0"], "", False),
    (["nvidia0"], "-1", False), (["nvidiactl", "nvidia-uvm"], None, False)])
def test_a_gpu_is_told_by_its_device_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str],
                                          visible: str | None, found: bool) -> None:
    """A fake /dev."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(placement, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert placement.has_gpu() is found
