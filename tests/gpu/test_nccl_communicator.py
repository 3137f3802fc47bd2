"""The NCCL communicator on real GPUs, one or several: ranks that share a GPU are hosts of their own to NCCL.

`python -m pytest -s tests/gpu/test_nccl_communicator.py`; LM_NCCL names another libnccl.so.2 than torch's. The figures
are printed, never judged, unless they mean the same on every machine.
"""
from __future__ import annotations

import json
import os

import pytest
import torch
from ranks import run_ranks

from nccl_bindings.library import load

WORLD = 2
NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU"), pytest.mark.timeout(400)]
# ranks of one host can't share a GPU
HOSTS = ["each", "one"] if NUM_GPUS >= WORLD else ["each"]


def can_park() -> bool:
    return load(os.environ.get("LM_NCCL")).has("park")


def run(body: str, hosts: str, world: int = WORLD) -> list[dict]:
    results = run_ranks(body, world=world, hosts=hosts)
    print(f"\n{body}, {world} ranks, hosts {hosts}: {json.dumps(results[0])}")
    return results


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("body", ["adoption", "background", "lazy_and_rebuild", "abort_half_built", "abort_prepared",
                                  "discard_rounds", "pair"])
def test_body(body: str, hosts: str) -> None:
    run(body, hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_park_and_resume(hosts: str) -> None:
    if not can_park():
        pytest.skip("parking comes with NCCL 2.30.3; name one with LM_NCCL")
    sharing = -(-WORLD // NUM_GPUS)
    for result in run("park_and_resume", hosts):
        # 6 MiB on an H200, in steps of 2; the aim is 4. An unparked one holds about 100 and connected it holds 280
        assert result["parked_mib"] <= 8 * sharing, "what a parked communicator leaves behind, per rank on the GPU"


@pytest.mark.parametrize("hosts", HOSTS)
def test_parked_memory(hosts: str) -> None:
    """Figures of each step, in steps of 2 MiB; the aim of 4 MiB a group is judged by the mean of those in a row."""
    if not can_park():
        pytest.skip("parking comes with NCCL 2.30.3; name one with LM_NCCL")
    sharing = -(-WORLD // NUM_GPUS)
    for result in run("parked_memory", hosts):
        prepared_mib = result["prepared_mib"]
        assert sum(prepared_mib) / len(prepared_mib) <= 4 * sharing, prepared_mib


def test_four_ranks() -> None:
    run("adoption", "each", world=4)
