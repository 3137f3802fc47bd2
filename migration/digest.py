"""Digests of tensors, computed where they lie: the same value on a CPU and on a GPU, with one copy to the host.

For comparing memory that should be equal to the last bit; not against somebody who wants to deceive. A group of tensors
is one stream of 64-bit words, little-endian; each tensor begins at a word of its own, its tail filled up with zeros.
With odd m_i = FIRST + i * STEP, and all modulo 2^64,

    x = w_i * m_i;  x ^= x >> 32;  x *= MIX;  x ^= x >> 32;  two lanes: the sum of x, and the sum of x * m_i

Every step of x can be undone, so one changed word always changes the first lane. The shifts make x nonlinear, so that
changes of several words don't cancel as they would in a plain sum; what happens to cancel in the first lane is weighed
by its position in the second. Sums modulo 2^64 don't depend on their order, so the value depends neither on the chunks
nor on how a device adds.

The sums are computed by torch's own operations, or on a GPU, where Triton works, by the kernel in digest_triton.py.
Must not know what the tensors are for.
"""
from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

VERSION = 2  # of the definition above: digests of different ones can't be compared
FIRST, STEP, MIX = 0xD1B54A32D192ED03, 0x6A09E667F3BCC908, 0xC2B2AE3D27D4EB4F  # odd, even, odd
WORD_BYTES = 8
CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 21}  # of torch's operations: such that the scratch stays in a cache
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
    by_torch = Way(sums=sums_by_torch, scratch_bytes=3 * CHUNK_WORDS[device.type] * WORD_BYTES,
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
    words = torch.arange(40_000).mul_(_signed(MIX))
    memory = words.view(torch.uint8)
    tensors = [words, words[:0], memory[3:-2], words[1:2], memory[8:13]]
    cpu = torch.device("cpu")
    there = words.to(device).view(torch.uint8)
    moved = [there[t.storage_offset() * t.element_size():][:t.nbytes] for t in tensors]  # at the same addresses
    found, expected = sums([moved, [], moved[2:]], device).tolist(), sums_by_torch([tensors, [], tensors[2:]], cpu)
    if found != expected.tolist():
        raise RuntimeError(f"its sums on {device} are {found}, and {expected.tolist()} on the CPU")


# ---- by torch's operations

def sums_by_torch(groups: Sequence[Sequence[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Both lanes of each group: int64 (groups, 2) on `device`."""
    streams = [[t.detach().view(-1).view(torch.uint8) for t in tensors] for tensors in groups]
    longest = max((sum(-(-t.numel() // WORD_BYTES) for t in flats) for flats in streams), default=0)
    scratch = _Scratch.make(device, min(CHUNK_WORDS[device.type], longest))
    lanes = torch.zeros((len(groups), 2), dtype=torch.int64, device=device)
    for row, flats in zip(lanes, streams):
        for start, num in _chunks(scratch, flats):
            _add_up(scratch, start, num, row)
    return lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """`table`: m_0, m_1, ... of one chunk. `multipliers`: those of the chunk at hand. `words`: the chunk."""

    table: torch.Tensor
    multipliers: torch.Tensor
    words: torch.Tensor
    zeros: list[torch.Tensor]  # what fills up a tail of so many bytes
    sums: torch.Tensor  # of the chunk

    @classmethod
    def make(cls, device: torch.device, num: int) -> _Scratch:
        table = torch.arange(num, device=device).mul_(_signed(STEP)).add_(_signed(FIRST))
        zeros = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=device)
        return cls(table=table, multipliers=torch.empty_like(table), words=torch.empty_like(table),
                   zeros=[zeros[tail:] for tail in range(WORD_BYTES)],
                   sums=torch.empty(2, dtype=torch.int64, device=device))


def _chunks(scratch: _Scratch, flats: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Put a stream into `scratch.words`, chunk by chunk. Yields each chunk's first word's index and number of words."""
    memory = scratch.words.view(torch.uint8)
    start, filled = 0, 0
    pieces: list[torch.Tensor] = []
    for flat in flats:
        at = 0
        while at < flat.numel():
            num = min(flat.numel() - at, memory.numel() - filled)
            pieces.append(flat if num == flat.numel() else flat[at:at + num])
            at, filled = at + num, filled + num
            if tail := filled % WORD_BYTES:
                pieces.append(scratch.zeros[tail])
                filled += WORD_BYTES - tail
            if filled == memory.numel():
                torch.cat(pieces, out=memory)  # one kernel for many small tensors
                yield start, len(scratch.words)
                start, filled = start + len(scratch.words), 0
                pieces.clear()
    if filled:
        torch.cat(pieces, out=memory[:filled])
        yield start, filled // WORD_BYTES


def _add_up(scratch: _Scratch, start: int, num: int, lanes: torch.Tensor) -> None:
    """Both sums of the chunk, which is used up, on top of `lanes`."""
    words, multipliers = scratch.words[:num], scratch.multipliers[:num]
    torch.add(scratch.table[:num], _signed(STEP * start), out=multipliers)
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    words.mul_(multipliers)
    low.bitwise_xor_(high)  # x ^= x >> 32, with no sign to mask away
    words.mul_(_signed(MIX))
    low.bitwise_xor_(high)
    torch.sum(words, 0, out=scratch.sums[0])
    words.mul_(multipliers)
    torch.sum(words, 0, out=scratch.sums[1])
    lanes.add_(scratch.sums)


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
