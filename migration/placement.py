"""Which GPU a process takes and which host NCCL believes it is on. `place` is pure; `take_gpu` carries it out.

Several virtual hosts may share a machine, and several processes a GPU. Processes of one machine take its GPUs in turn.
NCCL tells hosts apart by NCCL_HOSTID: with one id per virtual host, traffic between them really leaves the fast path.
NCCL refuses two ranks of one host id on one GPU, so where a host's processes share a GPU each gets an id of its own.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICES = Path("/dev")
# what else NCCL and CUDA are told, unless the user says otherwise
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",  # its set-up blocks where it can't be aborted, and parking doesn't free it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of kernels under tensor parallelism
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch asks NVML for GPUs: CUDA, once started, doesn't survive a fork
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # equal bits from run to run
}


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that this process may use, by its device files alone: CUDA isn't asked,
    since a process that forks later must not start it.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(DEVICES.glob("nvidia[0-9]*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`device` is an index on the machine; `host_id` is None where NCCL's own idea of a host is right."""

    device: int
    host_id: str | None
    shares_gpu: bool  # with another process of its host


def place(machines: Sequence[str], hosts: Sequence[str], rank: int, num_gpus: int) -> Placement:
    """The placement of `rank`. `machines` and `hosts` are per world rank, `num_gpus` are those of its machine."""
    on_machine = [r for r, machine in enumerate(machines) if machine == machines[rank]]
    devices = {r: i % num_gpus for i, r in enumerate(on_machine)}
    same_host = [r for r in on_machine if hosts[r] == hosts[rank]]
    shares = len({devices[r] for r in same_host}) < len(same_host)
    is_virtual = len({hosts[r] for r in on_machine}) > 1
    host_id = f"{hosts[rank]}-{same_host.index(rank)}" if shares else hosts[rank] if is_virtual else None
    return Placement(device=devices[rank], host_id=host_id, shares_gpu=shares)


def take_gpu(hellos: Sequence[Mapping[str, str]], rank: int) -> Placement:
    """Take this process's GPU and tell NCCL which host it is on. Before CUDA or NCCL is started in this process.

    `hellos` are what every world rank said at the start (bringup.py): its machine and its host.
    """
    import torch  # not above: `place` is pure
    placed = place([h["machine"] for h in hellos], [h["host"] for h in hellos], rank, torch.cuda.device_count())
    if placed.host_id is not None:
        os.environ.setdefault("NCCL_HOSTID", placed.host_id)  # the user's own choice counts
    torch.cuda.set_device(placed.device)
    return placed
