"""Imports find no GPU, whatever the machine has, so that a process with them can be copied."""
from __future__ import annotations

import os

import pytest
import torch

from migration import preload


@pytest.mark.parametrize("visible", [None, "", "1,3"])
def test_gpus_are_hidden_and_shown_again(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ImportError), preload._hidden_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        raise ImportError
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_a_process_that_uses_cuda_keeps_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with preload._hidden_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
