"""Digests on a GPU are those of the CPU, take the memory that they say, and go at about the rate of its memory."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from migration import digest
from migration.digest import digest_tensors, scratch_bytes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

LONG_BYTES = (1 << 31) + 12_345  # more than 31 bits count


def values(num: int) -> torch.Tensor:
    return torch.randint(-2 ** 63, 2 ** 63 - 1, (num,), generator=torch.Generator().manual_seed(1))


def tensors(num: int) -> dict[str, torch.Tensor]:
    """About 4 `num` bytes, some at odd addresses."""
    words = values(num // 4)
    halves = words.view(torch.bfloat16)
    return {"words": words[:num // 8], "odd": halves[1:num // 2 - 2], "bytes": halves.view(torch.uint8)[7:1030],
            "scalar": words[0], "nothing": words[:0]}


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two; torch's serves where Triton can't be used, so here Triton must be."""
    device = torch.device("cuda", torch.cuda.current_device())
    told = digest.warm_up(device)
    assert told == "digests are computed by a Triton kernel", told
    if request.param == "torch":
        by_torch = digest.Way(sums=digest.sums_by_torch, scratch_bytes=48 << 20, told="")
        kept = digest._way
        monkeypatch.setattr(digest, "_way", lambda where: by_torch if where.type == "cuda" else kept(where))
    return str(request.param)


@pytest.mark.parametrize("num", [64, 5000, 40 << 20])
def test_same_value_as_on_the_cpu(way: str, num: int) -> None:
    here = tensors(num)
    there = {name: t.cuda() for name, t in here.items()}
    # a copy begins at an even address: views on the GPU as well
    there["odd"] = torch.cat([there["odd"][:1], there["odd"]])[1:]
    assert digest_tensors({"": there}) == digest_tensors({"": here})
    assert digest_tensors({"": {**there, "words": here["words"]}}) == digest_tensors({"": here}), "one is on the host"


def test_sizes_addresses_and_dtypes(way: str) -> None:
    """Every small size at every address, and groups that are empty."""
    memory = values(3000).view(torch.uint8)
    moved = memory.cuda()
    spans = [(offset, num) for offset in range(17) for num in (*range(20), 4095, 4096, 4097, 4104, 16389)]

    def groups(of: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        kinds = {str(d): of[8:8 + 24 * 101].view(d)[1:] for d in (torch.bfloat16, torch.float32, torch.float64)}
        bits = of.remainder(2).to(torch.bool)
        return {"none": {}, "empty": {"": of[:0]}, "bits": {"": bits[3:]}, "kinds": kinds,
                "all": {f"{offset} {num}": of[offset:offset + num] for offset, num in spans}}

    assert digest_tensors(groups(moved)) == digest_tensors(groups(memory))


@pytest.mark.parametrize("offset", [0, 3])
def test_more_than_31_bits(offset: int) -> None:
    memory = values((LONG_BYTES + 16) // 8).view(torch.uint8)
    here = memory[offset:offset + LONG_BYTES]
    there = memory.cuda()[offset:offset + LONG_BYTES]
    expected = digest_tensors({"": {"long": here, "after": memory[:9]}})
    assert digest_tensors({"": {"long": there, "after": memory[:9]}}) == expected
    there[-1] ^= 1
    assert digest_tensors({"": {"long": there, "after": memory[:9]}}) != expected, "its last byte doesn't count"


def test_another_thread_device_and_stream(way: str) -> None:
    """A fresh thread's current device is the first one; the digest is of what its stream has written."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    found = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            ones = torch.ones(4096, 4096, device=device)
            for _ in range(30):
                ones = ones @ ones / 4096  # some milliseconds
            with torch.cuda.device(0):
                found.append(digest_tensors({"": {"ones": ones[:33].view(-1)[1:]}}))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "no digest within 60 s"
    assert found == [digest_tensors({"": {"ones": torch.ones(33 * 4096 - 1)}})]


def split(memory: torch.Tensor, num: int) -> dict[str, torch.Tensor]:
    return {str(i): part for i, part in enumerate(memory.split(-(-len(memory) // num)))}


def best_ms(work: Callable[[], object], num: int = 5) -> float:
    times = []
    for _ in range(num):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times) * 1e3


def test_memory_and_time(way: str, record_property: Callable[[str, object], None]) -> None:
    """Prints the times; asserts nothing of them."""
    figures = {}
    num_gib = 4
    memory = torch.ones((num_gib << 28) + 8, device="cuda").view(torch.uint8)
    one = {"": {"": memory[:num_gib << 30]}}
    digest_tensors(one)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    digest_tensors(one)
    taken_bytes = torch.cuda.max_memory_allocated() - before_bytes
    print(f"\nby {way}, {taken_bytes} bytes of scratch:")
    assert taken_bytes <= scratch_bytes(memory.device) + (1 << 20)
    for name, groups in {
            f"{num_gib} GiB in one tensor": one,
            f"{num_gib} GiB at an odd address": {"": {"": memory[3:3 + (num_gib << 30)]}},
            f"{num_gib} GiB in 900 tensors": {"": split(memory, 900)},
            "23 MB in 900 tensors": {"": split(memory[:900 * 25_600], 900)}}.items():
        num_bytes = sum(t.nbytes for t in groups[""].values())
        ms = best_ms(lambda: digest_tensors(groups))
        print(f"  digest of {name}: {ms:.2f} ms, {ms / num_bytes * (1 << 30):.2f} ms per GiB, "
              f"{num_bytes / ms / 1e6:.0f} GB/s")
        figures[f"{name}, ms"] = ms
    record_property("figures", figures)
