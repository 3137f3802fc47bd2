"""A Slurm of several nodes on this machine, once cluster_up.py has started it: commands, a node that dies, its end.

Owns the cluster's folder: its slurm.conf, munge's key and socket, logs, state, and `cluster.json`, which says what was
started. Several clusters can be up at once, each in a folder of its own, on ports that are free. Must not know what is
submitted. Needs root and Debian's packages; the nodes are virtual: all see this machine's file system and devices.
"""
from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from migration.errors import UserError
from slurm import daemons
from slurm.daemons import Daemon

_JOBS_END_TIMEOUT_S = 30.0
_CLIENT_TIMEOUT_S = 30.0
_POLL_S = 0.05


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "lm-slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that was started in `folder`. Daemons by name: munged, slurmctld, and slurmd.NODE for each node."""

    folder: Path
    nodes: tuple[str, ...]
    daemons: dict[str, Daemon]

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def environment(self) -> dict[str, str]:
        """This process's environment for a command that is to use this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def command(self, *words: str) -> str:
        """What a client command (`sinfo`, `scontrol`, ...) prints. Raises RuntimeError if it fails or takes long."""
        try:
            done = subprocess.run(words, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, timeout=_CLIENT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(words)}: no answer in {_CLIENT_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout

    def node_states(self) -> dict[str, str]:
        """Node -> state as sinfo says it (idle, mixed, draining, drained, down*, ...)."""
        rows = self.command("sinfo", "-h", "-N", "-o", "%N|%T").split()
        return dict(row.split("|") for row in rows)

    def kill_node(self, node: str) -> None:
        """The node dies: SIGKILL to its slurmd and to everything that Slurm started there."""
        daemons.kill([self.daemons[f"slurmd.{node}"]])
        while left := daemons.find_tasks(self.conf, node):  # one may just have started another
            daemons.kill(left)

    def start_node(self, node: str) -> Cluster:
        """The node's slurmd again, after `kill_node`; the cluster as it is then. The node is idle some time later."""
        renewed = {**self.daemons, f"slurmd.{node}": daemons.start_slurmd(self.folder, node, self.environment())}
        cluster = Cluster(folder=self.folder, nodes=self.nodes, daemons=renewed)
        save(cluster)
        return cluster


def down(cluster: Cluster) -> None:
    """Cancel every job, end the daemons, and kill what is left of jobs; no process of the cluster lives afterwards.

    The folder and its logs stay, but for `cluster.json`. Raises TimeoutError for a process that can't be ended.
    """
    if cluster.daemons["slurmctld"].lives() and cluster.daemons["munged"].lives():
        _cancel_jobs(cluster)
    daemons.end([daemon for name, daemon in cluster.daemons.items() if name.startswith("slurmd.")])
    while left := daemons.find_tasks(cluster.conf):
        daemons.kill(left)
    daemons.end([cluster.daemons["slurmctld"]])
    daemons.end([cluster.daemons["munged"]])
    (cluster.folder / "cluster.json").unlink(missing_ok=True)


def save(cluster: Cluster) -> None:
    """For `find`."""
    started = {name: asdict(daemon) for name, daemon in cluster.daemons.items()}
    (cluster.folder / "cluster.json").write_text(json.dumps({"nodes": cluster.nodes, "daemons": started}, indent=1))


def find(folder: Path) -> Cluster | None:
    """The cluster that was started in `folder` and not ended by `down`; its daemons may be gone all the same."""
    path = folder.absolute() / "cluster.json"
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text())
        return Cluster(folder=path.parent, nodes=tuple(saved["nodes"]),
                       daemons={name: Daemon(**fields) for name, fields in saved["daemons"].items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: can't be read ({error}); end what runs there and remove the folder") from None


# ---- down


def _cancel_jobs(cluster: Cluster) -> None:
    """Whatever doesn't end in time is killed by `down`."""
    deadline_s = time.monotonic() + _JOBS_END_TIMEOUT_S
    cancelled: set[str] = set()
    while time.monotonic() < deadline_s:
        jobs = set(cluster.command("squeue", "-h", "-o", "%A").split())
        if not jobs:
            return
        if jobs - cancelled:
            cluster.command("scancel", *sorted(jobs - cancelled))
            cancelled |= jobs
        time.sleep(_POLL_S)
