"""The heavy imports of a process, once and in the order that they need. Imports nothing itself.

First what must stand before torch (the environment of CUDA and NCCL, the NCCL overlay where there is a GPU), then the
device shim where there is none, then megatron, then what a process of a run is made of. 2.7 s on a quiet machine;
forkserver.py pays for it once per run. All but MPI, which belongs to one process.
"""
from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from migration.placement import DEFAULTS, has_gpu


@contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Imports ask for GPUs (megatron's, for the FP8 tensors of checkpoints; torch's, for a log line), and NVML, which
    answers, leaves a thread behind: a process with several can't be copied. Inside they find none.

    A process that uses CUDA already is no such one, and torch would go on saying that there is no GPU."""
    import torch
    if torch.cuda.is_initialized():
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def preload() -> None:
    """Import torch, megatron-core, and the migrator's own files. The first thing in a process that imports torch."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch)\..*")
    # 0.19 reads a checkpoint's common part in a way that torch warns of, on every rank
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint\..*")
    for name in ("megatron.core.rerun_state_machine", "megatron.core.models.gpt.gpt_model",
                 "megatron.core.distributed.distributed_data_parallel", "torch.utils.cpp_extension"):
        # say that they exist, that they are old, that buckets are laid out as ever, that there is no GPU
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if has_gpu():
        from third_party.nccl import overlay
        os.environ.update(overlay.ENVIRONMENT)
        overlay.load(os.environ.get("LM_NCCL"))  # before torch, which binds NCCL's names when it is imported
    from migration import device
    if device.install():
        import torch
        torch.set_num_threads(1)
    with _hidden_gpus():
        import megatron.core.pipeline_parallel  # noqa: F401
        import migration.arguments  # noqa: F401 - these take a process 0.2 s of a core
        import migration.bringup  # noqa: F401
        import migration.model  # noqa: F401
        import migration.process  # noqa: F401
        import migration.standby  # noqa: F401
