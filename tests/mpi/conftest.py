"""Tests whose every line runs in all ranks: `mpirun -n 4 python -m pytest --with-mpi tests/mpi`.

Owns what makes that bearable: rank 0 alone reports, a failed rank prints its failure and aborts all (the others would
wait for it in their next collective until the time limit), and every test here counts as an MPI test. The time limit
must be pytest-timeout's thread method: its signal method can't interrupt a wait inside MPI.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from migration.placement import has_gpu, take_gpu
from migration.preload import preload
from migration.mpich import leave_hydra


@pytest.hookimpl(trylast=True)  # after the terminal reporter has come
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--with-mpi"):
        return  # the tests are skipped, and a plain pytest process must not become an MPI process
    from mpi4py import MPI

    _take_device(MPI.COMM_WORLD)
    config.pluginmanager.register(_AbortOnFailure(MPI.COMM_WORLD), "abort-on-failure")
    if MPI.COMM_WORLD.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_make_silent_reporter(config), "terminalreporter")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.mpi)


def _take_device(world: object) -> None:
    """On a machine with GPUs, which the ranks share: what must stand before torch, which the test modules import.

    Where two ranks share a GPU, each is a host of its own to NCCL. Without a GPU the tests run on Gloo.
    """
    if not has_gpu():
        return
    for name, value in {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}.items():
        os.environ.setdefault(name, value)
    preload()
    from migration import device
    if not device.is_cpu():
        take_gpu([{"machine": "this one", "host": "h"}] * world.size, world.rank)


def _make_silent_reporter(config: pytest.Config) -> pytest.TerminalReporter:
    """A terminal reporter without a word; it must exist, because pytest-timeout prints its stacks through it."""
    def say_nothing(self: pytest.TerminalReporter) -> None:
        return None

    hooks = [name for name in dir(pytest.TerminalReporter) if name.startswith("pytest_")]
    return type("SilentReporter", (pytest.TerminalReporter,), dict.fromkeys(hooks, say_nothing))(config, sys.stdout)


class _AbortOnFailure:
    """Ends all ranks as soon as one has failed, after printing why."""

    def __init__(self, world: object) -> None:
        self._world = world

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._abort(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n"
                        + "".join(f"--- {title}\n{text}\n" for title, text in report.sections))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._abort(f"{report.nodeid} (collection)\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._abort(f"pytest itself\n{excrepr}")

    def pytest_keyboard_interrupt(self) -> None:
        self._abort("interrupted")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._exit_status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End without the interpreter's own end, in which destructors of torch's threads may call std::terminate."""
        from mpi4py import MPI
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            stream.flush()
        MPI.Finalize()
        leave_hydra()
        os._exit(self._exit_status)

    def _abort(self, why: str) -> NoReturn:
        sys.__stderr__.write(f"\nworld_rank {self._world.rank} of {self._world.size} FAILED: {why}\n")
        sys.__stderr__.flush()
        self._world.Abort(1)
        raise AssertionError("MPI_Abort returned")
