"""What all tests share: one fork server for the whole session.

A run of 8 processes pays for its imports once per session instead of eight times per run (1 s instead of 15 s on 2
cores). Must not import torch or MPI: the process that launches runs stays light.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from migration.forkserver import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(preload="migration.preload:preload", entry="harness:run_process") as server:
        yield server
