"""Digests of tensors, computed where they lie: the same value on a CPU and on a GPU, with one copy to the host.

For comparing memory that should be equal to the last bit; not against somebody who wants to deceive. What is summed up
says digest_sums.py; the sums are computed by torch's own operations, or on a GPU, where Triton works, by the kernel in
digest_triton.py. Must not know what the tensors are for.
"""
from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from migration.digest_sums import MIX, signed, sums_by_torch
from migration.digest_sums import scratch_bytes as torch_scratch_bytes

VERSION = 2  # of what a digest is, here and in digest_sums.py: digests of different ones can't be compared
_CHOOSING = threading.Lock()
_log = logging.getLogger(__name__)

Sums = Callable[[Sequence[Sequence[torch.Tensor]], torch.device], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the sums are computed. `sums`: groups of contiguous tensors on the device -> int64 (groups, 2) there."""

    sums: Sums
    scratch_bytes: int
    told: str


def scratch_bytes(device: torch.device) -> int:
    """What `digest_tensors` takes of the device's memory at most while it runs."""
    return _way(device).scratch_bytes


def warm_up(device: torch.device) -> str:
    """Pay for what the first digest on `device` would take: on a GPU a second or two of compiling, once per machine and
    user, later a fraction of one. Returns how digests are computed, for the log.
    """
    return _way(device).told


def digest_tensors(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    """Hex digest of each group: of the names, dtypes, shapes and bytes of its tensors.

    The tensors' addresses may be odd. Works on the GPU if one of them is there, on the current stream, and waits for
    it. Raises ValueError for a tensor that isn't contiguous.
    """
    device = next((t.device for named in groups.values() for t in named.values() if t.is_cuda), torch.device("cpu"))
    there = [[_bring(tensor, name, device) for name, tensor in named.items()] for named in groups.values()]
    sums = _way(device).sums(there, device).tolist()
    found = {}
    for (name, named), lanes in zip(groups.items(), sums):
        described = [[tensor, str(t.dtype), list(t.shape)] for tensor, t in named.items()]
        found[name] = hashlib.sha256(json.dumps([described, [lane % (1 << 64) for lane in lanes]]).encode()).hexdigest()
    return found


def _bring(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"no digest of {name}, whose shape is {tuple(tensor.shape)}: it is not contiguous")
    return tensor if tensor.device == device else tensor.detach().to(device)


# ---- which way

def _way(device: torch.device) -> Way:
    with _CHOOSING:  # a thread that comes while another one compiles waits for it
        return _choose(device)


@functools.cache
def _choose(device: torch.device) -> Way:
    """Once per process and device: the kernel where it can be had; else torch's operations, and why is said."""
    by_torch = Way(sums=sums_by_torch, scratch_bytes=torch_scratch_bytes(device),
                   told="digests are computed by torch's operations")
    if device.type == "cpu":
        return by_torch
    try:
        by_kernel = _load_kernel()
        check_sums(by_kernel.sums, device)
        return by_kernel
    except Exception as error:  # no Triton, no C compiler, a cache that can't be written, a GPU that it doesn't know
        reason = str(error).strip().partition("\n")[0]
        told = (f"digests are computed by torch's operations, about 7 ms per GiB in place of 0.4, which lengthens the "
                f"pause of a move: Triton's kernel can't be used: {type(error).__name__}: {reason}")
        _log.warning(told)
        return Way(sums=by_torch.sums, scratch_bytes=by_torch.scratch_bytes, told=told)


def _load_kernel() -> Way:
    from migration import digest_triton  # imports triton, which wheels of torch without CUDA don't bring
    return Way(sums=digest_triton.sums, scratch_bytes=digest_triton.SCRATCH_BYTES,
               told="digests are computed by a Triton kernel")


def check_sums(sums: Sums, device: torch.device) -> None:
    """Raises RuntimeError if `sums` on `device` are others than torch's on the CPU."""
    words = torch.arange(40_000).mul_(signed(MIX))
    memory = words.view(torch.uint8)
    tensors = [words, words[:0], memory[3:-2], words[1:2], memory[8:13]]
    cpu = torch.device("cpu")
    there = words.to(device).view(torch.uint8)
    moved = [there[t.storage_offset() * t.element_size():][:t.nbytes] for t in tensors]  # at the same addresses
    found, expected = sums([moved, [], moved[2:]], device).tolist(), sums_by_torch([tensors, [], tensors[2:]], cpu)
    if found != expected.tolist():
        raise RuntimeError(f"its sums on {device} are {found}, and {expected.tolist()} on the CPU")
