"""The slurm.conf of a Slurm with several nodes on one machine: no systemd, no cgroups, no database. Pure.

Every node is a slurmd of its own on a port of its own; they all have the machine's host name, and SLURMD_NODENAME tells
a process which one it is on. Written for Slurm 22.05 (Debian 12).
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MADE_BY = "# Made by python -m slurm up: "  # the first words of each
_TEMPLATE = MADE_BY + """\
{num_nodes} virtual nodes on this machine.
ClusterName=local
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials have expired: {requeue_delay_s} s here, 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_delay_s}
CredType=cred/munge
# MPICH names its shared memory after the job's number, and all nodes of all clusters here share one /dev/shm: with jobs
# of one number in two clusters, both hang in MPI_Init.
FirstJobId={first_job_id}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MailProg=/bin/true
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout={node_timeout_s}
InactiveLimit=0
KillWait={kill_wait_s}
MinJobAge=3600
Waittime=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConf:
    """A local cluster. node_ports: node name -> port of its slurmd. Times in seconds."""

    folder: Path
    machine: str  # the machine's host name, as slurmctld and slurmd see it
    controller_port: int
    node_ports: dict[str, int]
    cpus: int = 8
    gpus: int = 8  # declared only: files stand for them
    memory_mb: int = 4000
    node_timeout_s: int = 10  # a node that doesn't answer for so long is down
    kill_wait_s: int = 5  # from SIGTERM to SIGKILL
    requeue_delay_s: int = 5

    def slurm_conf(self) -> str:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={self.machine} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
            f"RealMemory={self.memory_mb}{f' Gres=gpu:{self.gpus}' if self.gpus else ''} State=UNKNOWN"
            for name, port in self.node_ports.items())
        return _TEMPLATE.format(
            folder=self.folder, machine=self.machine, controller_port=self.controller_port, nodes=nodes,
            num_nodes=len(self.node_ports), node_timeout_s=self.node_timeout_s, kill_wait_s=self.kill_wait_s,
            requeue_delay_s=self.requeue_delay_s, first_job_id=1000 * self.controller_port)

    def gres_conf(self) -> str:
        """The GPUs of the nodes: `gpu_files` must exist, or slurmd refuses them."""
        if not self.gpus:
            return ""
        return "".join(f"NodeName={name} Name=gpu File={self.folder}/gpu[0-{self.gpus - 1}]\n" if self.gpus > 1 else
                       f"NodeName={name} Name=gpu File={self.folder}/gpu0\n" for name in self.node_ports)

    def gpu_files(self) -> list[Path]:
        return [self.folder / f"gpu{index}" for index in range(self.gpus)]
