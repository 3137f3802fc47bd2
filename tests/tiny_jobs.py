"""Jobs small enough for a test, built for one slot in this process. In a sandbox, so no other process is needed.

For tests that run in one process (unit) and in several (mpi). torch keeps a backend's creator for ever, so that a
process has one Groups object, which all its tests share; whoever opens a slot closes it again.
"""
from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from migration.config import Config, validate
from migration.data import Samples
from migration.groups import Groups
from migration.job import Job, close_job, open_groups
from migration.preload import preload

TINY = {"profile": "test", "dp": 1, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8,
        "vocab_size": 32, "micro_batch_size": 1, "initial_loss_scale": 1024.0, "loss_scale_window": 2}


class CountingSource:
    """Token i is i, modulo the vocabulary."""

    name = digest = "counting"

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self.num_tokens, self._vocab_size = num_tokens, vocab_size

    def tokens(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length) % self._vocab_size


def tiny_config(**changes: object) -> Config:
    config = Config(**{**TINY, **changes})
    validate(config)
    return config


@functools.cache
def shared_groups() -> Groups:
    """This process's one Groups object, with the communicators of its device; Megatron is loaded with it."""
    preload()
    gc.freeze()  # closing a slot collects garbage, and Megatron's modules would take most of a test's time then
    from migration import device
    from migration.communicators.makers import build_maker
    own = device.current_device()
    return Groups(own, build_maker(own, "auto", connect_in_background=False), close_pause_s=0.0)  # tests wait for it


@contextmanager
def open_job(config: Config, slot: int = 0) -> Iterator[Job]:
    """The job of `slot`, with its groups in the sandbox."""
    groups = shared_groups()
    open_groups(config, slot, groups)
    try:
        source = CountingSource(1000, config.vocab_size)
        yield Job(config, slot, groups, Samples(source, config.seq_length, config.seed))
    finally:
        close_job(groups)
