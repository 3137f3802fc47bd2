"""Writes what came out of each test into a file, a JSON line a test, as soon as it is known: `--results FILE`.

A test adds figures with pytest's `record_property("figures", {...})`. Under MPI rank 0 alone writes. A pytest plugin,
which tests/conftest.py passes on.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import own_rank


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", default="", metavar="FILE", help="add a JSON line to FILE for each test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path and own_rank() == 0:
        config.pluginmanager.register(Recorder(Path(path)), "results-file")


class Recorder:
    """A pytest plugin. A test that passed has one line; one that was skipped or failed too, with the reason."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(tryfirst=True)  # before a failure aborts all ranks
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3),
                   "why": _reason(report), "figures": dict(report.user_properties).get("figures", {})}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            row = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": "couldn't be collected",
                   "figures": {}}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).strip().splitlines()[0][:300]
