"""A local Slurm comes up: what the machine must have, the cluster's folder, free ports, its daemons in order.

What can be done with one afterwards is in cluster.py.
"""
from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from migration.errors import UserError
from slurm import daemons
from slurm.cluster import Cluster, find, save
from slurm.local_conf import MADE_BY, LocalConf

NODES = ("b0", "b1", "b2", "b3")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "scancel", "scontrol", "sbatch", "srun")
_UP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_MAX_SOCKET_BYTES = 107  # the kernel's limit for the path of a Unix socket
_LOG_LINES = 5


def missing() -> str:
    """What this machine lacks for a local cluster, with what to do about it; empty if nothing."""
    absent = [name for name in _PROGRAMS if daemons.find_program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; on Debian or Ubuntu, as root: {INSTALL}"
    if os.geteuid() != 0:
        return "a local Slurm starts its daemons as root, and this is another user"
    return ""


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


def _make_folder(folder: Path, *, had_cluster: bool) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not had_cluster and not _has_own_conf(folder):
            raise UserError(f"--folder {folder}: there are files in it that are no cluster's of this command; name "
                            "another folder")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {folder}: can't be made: {error.strerror}") from None
    folder.chmod(0o755)  # munged wants others to get to its socket


def _has_own_conf(folder: Path) -> bool:
    """A slurm.conf alone says nothing: a real cluster's /etc/slurm has one."""
    try:
        return (folder / "slurm.conf").read_text(errors="replace").startswith(MADE_BY)
    except OSError:
        return False


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
        "munged", [daemons.need_program("munged"), "--foreground", "--force", f"--key-file={folder}/munge.key",
                   f"--socket={munge_socket}", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
                   f"--seed-file={folder}/munged.seed"],
        output=folder / "munged.out", environment=environment)
    _wait(cluster, munge_socket.exists, "munge's socket", "munged")
    cluster.daemons["slurmctld"] = daemons.start("slurmctld", [daemons.need_program("slurmctld"), "-D"],
                                                 output=folder / "slurmctld.out", environment=environment)
    for node in cluster.nodes:
        cluster.daemons[f"slurmd.{node}"] = daemons.start_slurmd(folder, node, environment)
    save(cluster)


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
