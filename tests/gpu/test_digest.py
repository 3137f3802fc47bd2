"""Digests on a GPU are those of the CPU, take the memory that they say, and are fast beside a copy to the host."""
from __future__ import annotations

import time

import pytest
import torch

from migration.digest import digest_tensors, scratch_bytes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


def tensors(num: int) -> dict[str, torch.Tensor]:
    """About 4 `num` bytes, some at odd addresses."""
    values = torch.randint(-2 ** 63, 2 ** 63 - 1, (num // 4,), generator=torch.Generator().manual_seed(1))
    halves = values.view(torch.bfloat16)
    return {"words": values[:num // 8], "odd": halves[1:num // 2 - 2], "bytes": halves.view(torch.uint8)[7:1030],
            "scalar": values[0], "nothing": values[:0]}


@pytest.mark.parametrize("num", [64, 5000, 40 << 20])
def test_same_value_as_on_the_cpu(num: int) -> None:
    here = tensors(num)
    there = {name: t.cuda() for name, t in here.items()}
    # a copy begins at an even address: views on the GPU as well
    there["odd"] = torch.cat([there["odd"][:1], there["odd"]])[1:]
    assert digest_tensors({"": there}) == digest_tensors({"": here})
    assert digest_tensors({"": {**there, "words": here["words"]}}) == digest_tensors({"": here}), "one is on the host"


def test_memory_and_time() -> None:
    values = torch.ones(1 << 28, device="cuda")  # 1 GiB
    groups = {"": {"values": values}}
    digest_tensors(groups)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    started_s = time.perf_counter()
    digest_tensors(groups)
    seconds = time.perf_counter() - started_s
    print(f"\ndigest of 1 GiB: {seconds * 1e3:.2f} ms, {values.nbytes / seconds / 1e9:.0f} GB/s")
    assert torch.cuda.max_memory_allocated() - before_bytes <= scratch_bytes(values.device) + (1 << 20)
