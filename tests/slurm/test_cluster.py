"""The local Slurm: several at once, a node that dies and comes back, and nothing left when it goes down."""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import ROOT

from migration.errors import UserError
from slurm import cluster as local
from slurm import cluster_up, daemons
from slurm.cluster import Cluster

DEADLINE_S = 90.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:.0f} s for: {what}"
        time.sleep(0.05)


def slurm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurm", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


def test_the_commands_bring_a_second_cluster_up_and_down(cluster: Cluster, cluster_folder: Callable[[], Path],
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(cluster_folder())
    up = slurm("up", "--folder", folder, "--nodes", "c0,c1")
    assert up.returncode == 0, up.stderr
    assert up.stdout.splitlines()[-1] == f"export SLURM_CONF={folder}/slurm.conf"
    with capsys.disabled():
        print("\n" + up.stdout.splitlines()[0].lstrip("# "))
    second = local.find(Path(folder))
    assert second is not None and second.node_states() == {"c0": "idle", "c1": "idle"}
    assert cluster.node_states() == dict.fromkeys(cluster_up.NODES, "idle")
    again = slurm("up", "--folder", folder)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "a cluster is up there" in again.stderr
    assert "c1 idle" in slurm("status", "--folder", folder).stdout
    # a job that ignores SIGTERM, on both nodes
    second.command("sbatch", "-N2", f"--output={folder}/job.out", "--wrap",
                   "trap '' TERM; srun bash -c 'trap \"\" TERM; touch $SLURM_JOB_ID.$SLURMD_NODENAME; sleep 600'",
                   f"--chdir={folder}")
    wait_until(lambda: len(list(Path(folder).glob("*.c[01]"))) == 2, "both tasks")
    assert daemons.find_tasks(second.conf, "c0") and daemons.find_tasks(second.conf, "c1")
    down = slurm("down", "--folder", folder)
    assert down.returncode == 0, down.stderr
    assert not any(daemon.lives() for daemon in second.daemons.values())
    assert daemons.find_tasks(second.conf) == []
    assert slurm("status", "--folder", folder).returncode == 1


def test_a_node_dies_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    cluster.command("sbatch", "-N4", "--no-kill", "--output=/dev/null", f"--chdir={tmp_path}", "--wrap",
                    "srun --no-kill --kill-on-bad-exit=0 bash -c 'touch $SLURMD_NODENAME; sleep 600'")
    wait_until(lambda: len(list(tmp_path.glob("b?"))) == 4, "four tasks")
    cluster.kill_node("b2")
    assert daemons.find_tasks(cluster.conf, "b2") == []
    assert daemons.find_tasks(cluster.conf, "b1")
    wait_until(lambda: cluster.node_states()["b2"] not in ("allocated", "mixed"), "Slurm to miss the node")
    cluster.start_node("b2")
    cluster.command("scancel", "--name", "wrap")
    wait_until(lambda: cluster.node_states() == dict.fromkeys(cluster_up.NODES, "idle"), "the node to be idle again")


def test_a_folder_of_somebody_else_is_left_alone(need_slurm: None, cluster_folder: Callable[[], Path]) -> None:
    folder = cluster_folder()
    (folder / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match="no cluster's"):
        cluster_up.up(folder)
    assert (folder / "thesis.tex").read_text() == "all of it"


def test_a_real_clusters_folder_is_left_alone(cluster_folder: Callable[[], Path],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a folder counts before anything is started, so this needs no Slurm."""
    monkeypatch.setattr(cluster_up, "missing", lambda: "")
    folder = cluster_folder()
    (folder / "slurm.conf").write_text("ClusterName=production\n")
    with pytest.raises(UserError, match="no cluster's") as caught:
        cluster_up.up(folder)
    assert "\n" not in str(caught.value) and (folder / "slurm.conf").read_text() == "ClusterName=production\n"


def test_the_folder_of_an_earlier_cluster_is_emptied(cluster_folder: Callable[[], Path],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_up, "missing", lambda: "")
    monkeypatch.setattr(cluster_up, "_start_all", lambda cluster: None)
    monkeypatch.setattr(cluster_up, "_wait_idle", lambda cluster: None)
    folder = cluster_folder()
    cluster_up.up(folder)
    (folder / "slurmctld.log").touch()
    assert cluster_up.up(folder).conf.exists() and not (folder / "slurmctld.log").exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, cluster_folder: Callable[[], Path]) -> None:
    monkeypatch.setattr(daemons, "_SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", str(cluster_folder()))
    with pytest.raises(UserError, match="not installed: munged, slurmctld.*apt-get install .*slurmctld"):
        cluster_up.up(cluster_folder())


def test_a_daemon_that_ends_at_once_is_reported_with_its_last_words(
        need_slurm: None, cluster_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_up.LocalConf, "slurm_conf", lambda self: "ClusterName=local\nNoSuchKey=1\n")
    folder = cluster_folder()
    with pytest.raises(UserError, match=r"slurm(ctld|d\.b\d) ended while it came up; .*NoSuchKey"):
        cluster_up.up(folder)
    assert daemons.find_tasks(folder / "slurm.conf") == []
