"""A Slurm of several nodes on this machine: up, down, status, and a node that dies and comes back.

Owns the cluster's folder: its slurm.conf, munge's key and socket, logs, state, and `cluster.json`, which says what was
started. Several clusters can be up at once, each in a folder of its own, on ports that are free. Must not know what is
submitted. Needs root and Debian's packages; the nodes are virtual: all see this machine's file system and devices.
"""
from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from migration.errors import UserError
from slurm import daemons
from slurm.daemons import Daemon
from slurm.local_conf import LocalConf

NODES = ("b0", "b1", "b2", "b3")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "scancel", "scontrol", "sbatch", "srun")
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_UP_TIMEOUT_S = 60.0
_JOBS_END_TIMEOUT_S = 30.0
_CLIENT_TIMEOUT_S = 30.0
_POLL_S = 0.05
_MAX_SOCKET_BYTES = 107  # the kernel's limit for the path of a Unix socket
_LOG_LINES = 5


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "lm-slurm"


def missing() -> str:
    """What this machine lacks for a local cluster, with what to do about it; empty if nothing."""
    absent = [name for name in _PROGRAMS if _find(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; on Debian or Ubuntu, as root: {INSTALL}"
    if os.geteuid() != 0:
        return "a local Slurm starts its daemons as root, and this is another user"
    return ""


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
        renewed = {**self.daemons, f"slurmd.{node}": _start_slurmd(self.folder, node, self.environment())}
        cluster = Cluster(folder=self.folder, nodes=self.nodes, daemons=renewed)
        _save(cluster)
        return cluster


def up(folder: Path, *, nodes: tuple[str, ...] = NODES, cpus: int = 8, gpus: int = 8) -> Cluster:
    """Start a cluster in `folder`, which is emptied of an earlier one's files; returns when every node is idle.

    Raises UserError if the machine lacks something, a cluster is up there, or it doesn't come up (with a log's end).
    """
    lacking = missing()
    if lacking:
        raise UserError(f"no local Slurm: {lacking}")
    folder = folder.absolute()
    if len(os.fsencode(folder / "munge.socket")) > _MAX_SOCKET_BYTES:
        raise UserError(f"--folder {folder}: too long for munge's socket; name one of at most "
                        f"{_MAX_SOCKET_BYTES - len('/munge.socket')} characters")
    before = find(folder)
    if before is not None and any(daemon.lives() for daemon in before.daemons.values()):
        raise UserError(f"--folder {folder}: a cluster is up there; end it first (python -m slurm down --folder "
                        f"{folder}) or name another folder")
    _make_folder(folder, had_cluster=before is not None)
    ports = _free_ports(1 + len(nodes))
    conf = LocalConf(folder=folder, machine=socket.gethostname(), controller_port=ports[0],
                     node_ports=dict(zip(nodes, ports[1:])), cpus=cpus, gpus=gpus)
    _write_files(conf)
    cluster = Cluster(folder=folder, nodes=nodes, daemons={})
    try:
        _start_all(cluster)
        _wait_idle(cluster)
    except BaseException:
        daemons.kill(list(cluster.daemons.values()))
        raise
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


# ---- up


def _make_folder(folder: Path, *, had_cluster: bool) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not had_cluster and not (folder / "slurm.conf").exists():
            raise UserError(f"--folder {folder}: there are files in it that are no cluster's; name another folder")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {folder}: can't be made: {error.strerror}") from None
    folder.chmod(0o755)  # munged wants others to get to its socket


def _free_ports(number: int) -> list[int]:
    """Ports nobody listens on. All are held until the last is found, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write_files(conf: LocalConf) -> None:
    (conf.folder / "slurm.conf").write_text(conf.slurm_conf())
    (conf.folder / "gres.conf").write_text(conf.gres_conf())
    for path in conf.gpu_files():
        path.touch()
    (conf.folder / "state").mkdir()
    for node in conf.node_ports:
        (conf.folder / f"spool.{node}").mkdir()
    key = conf.folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))


def _start_all(cluster: Cluster) -> None:
    """Fills cluster.daemons as each is started, so that a failure leaves nobody behind."""
    folder, environment = cluster.folder, cluster.environment()
    munge_socket = folder / "munge.socket"
    cluster.daemons["munged"] = daemons.start(
        "munged", [_need("munged"), "--foreground", "--force", f"--key-file={folder}/munge.key",
                   f"--socket={munge_socket}", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
                   f"--seed-file={folder}/munged.seed"],
        output=folder / "munged.out", environment=environment)
    _wait(cluster, munge_socket.exists, "munge's socket", "munged")
    cluster.daemons["slurmctld"] = daemons.start("slurmctld", [_need("slurmctld"), "-D"],
                                                 output=folder / "slurmctld.out", environment=environment)
    for node in cluster.nodes:
        cluster.daemons[f"slurmd.{node}"] = _start_slurmd(folder, node, environment)
    _save(cluster)


def _start_slurmd(folder: Path, node: str, environment: dict[str, str]) -> Daemon:
    # the step managers that it starts inherit its environment, and so can be told from other nodes'
    return daemons.start(f"slurmd.{node}", [_need("slurmd"), "-D", "-N", node], output=folder / f"slurmd.{node}.out",
                         environment={**environment, "SLURMD_NODENAME": node})


def _wait_idle(cluster: Cluster) -> None:
    def all_idle() -> bool:
        try:
            return cluster.node_states() == {node: "idle" for node in cluster.nodes}
        except RuntimeError:
            return False  # slurmctld doesn't listen yet

    _wait(cluster, all_idle, "every node idle", *cluster.daemons)


def _wait(cluster: Cluster, condition: Callable[[], bool], what: str, *names: str) -> None:
    deadline_s = time.monotonic() + _UP_TIMEOUT_S
    while not condition():
        dead = [name for name in names if not cluster.daemons[name].lives()]
        if dead:
            raise UserError(f"no local Slurm: {dead[0]} ended while it came up; {_last_words(cluster.folder, dead[0])}")
        if time.monotonic() > deadline_s:
            raise UserError(f"no local Slurm: waited {_UP_TIMEOUT_S:.0f} s for {what}; "
                            f"{_last_words(cluster.folder, names[-1])}")
        time.sleep(_POLL_S)


def _last_words(folder: Path, name: str) -> str:
    log, output = folder / f"{name}.log", folder / f"{name}.out"
    path = log if log.exists() and log.stat().st_size else output
    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"the end of {path}: " + (" / ".join(lines) or "empty")


def _save(cluster: Cluster) -> None:
    started = {name: asdict(daemon) for name, daemon in cluster.daemons.items()}
    (cluster.folder / "cluster.json").write_text(json.dumps({"nodes": cluster.nodes, "daemons": started}, indent=1))


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


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SYSTEM_PATH)


def _need(name: str) -> str:
    path = _find(name)
    assert path is not None, f"{name}: missing() should have said so"
    return path
