"""What all tests share: one fork server for the whole session, and the option that writes results into a file.

A run of 8 processes pays for its imports once per session instead of eight times per run (1 s instead of 15 s on 2
cores). Must not import torch or MPI: the process that launches runs stays light.
"""
from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from recorder import pytest_addoption, pytest_configure  # noqa: F401 - the hooks of a plugin

from migration.forkserver import ForkServer

# torch's stores ask the name server about 127.0.0.1; one that loses a query costs 5 s, and a test its deadline
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(preload="migration.preload:preload", entry="harness:run_process") as server:
        yield server
