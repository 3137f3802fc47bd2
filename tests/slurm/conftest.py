"""Fixtures for Slurm: a real one of four nodes for the session, and jobs in it.

Skipped only where this machine can't have one (not root, or Debian's packages are missing): the reason is shown. At
the end of each test no process of its jobs may be left, and at the end of the session none of Slurm's.
"""
from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import ROOT, SlurmJob, Submit
from running import Finished, Running, assert_nothing_left
from support import undisturbed  # noqa: F401  a fixture

from migration.forkserver import ADDRESS_VARIABLE, ForkServer
from slurm import cluster as local
from slurm import cluster_up, daemons
from slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster_folder() -> Iterator[Callable[[], Path]]:
    """cluster_folder() -> a folder for a cluster. Not one of pytest's, whose paths are too long for munge's socket."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="lm-slurm-", dir="/tmp")))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def need_slurm() -> None:
    if cluster_up.missing():
        pytest.skip(cluster_up.missing())


@pytest.fixture(scope="session")
def cluster(need_slurm: None, cluster_folder: Callable[[], Path]) -> Iterator[Cluster]:
    """The cluster of the session. A test that kills a node starts it again."""
    made = cluster_up.up(cluster_folder())
    yield made
    last = local.find(made.folder)
    assert last is not None
    local.down(last)
    assert not any(daemon.lives() for daemon in last.daemons.values())
    assert not daemons.find_tasks(made.conf)


@pytest.fixture
def harness(fork_server: ForkServer) -> Callable[..., Finished]:
    """harness(*args, np, run) -> Finished: `harness.py --np N`, without Slurm, for the undisturbed twins."""

    def run_to_end(*args: str, np: int, run: Path) -> Finished:
        command = [sys.executable, str(ROOT / "harness.py"), "--np", str(np), *args, "--run", str(run)]
        finished = Running(command, run=run, env=os.environ | {ADDRESS_VARIABLE: fork_server.address}).wait(240)
        assert_nothing_left(run)
        return finished

    return run_to_end


@pytest.fixture
def submit(cluster: Cluster, fork_server: ForkServer, tmp_path: Path) -> Iterator[Submit]:
    """submit(*arguments of harness.py, options=(), site="") -> SlurmJob: `python -m slurm submit`, not waited for.

    options: of the command itself. site: further lines of the TOML. The job's processes share the session's imports:
    each is started by Slurm, hands its arguments over, and its copy ends with it.
    """
    jobs: list[SlurmJob] = []
    environment = {**cluster.environment(), ADDRESS_VARIABLE: fork_server.address,
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def start(*arguments: str, options: tuple[str, ...] = (), site: str = "") -> SlurmJob:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        (folder / "site.toml").write_text(f'runs = "{folder}/runs"\nsbatch = ["--output={folder}/%x-%j.out"]\n'
                                          f'time = "1:00:00"\ngpus_per_node = 2\n{site}')
        jobs.append(SlurmJob(cluster, folder, [*options, "--", *arguments], environment=environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
    for job in jobs:
        for run in job.runs():
            assert_nothing_left(run)
