"""What a digest sums up, and how torch's operations do it: the same value on a CPU and on a GPU.

A group of tensors is one stream of 64-bit words, little-endian; each tensor begins at a word of its own, its tail
filled up with zeros. With odd m_i = FIRST + i * STEP, and all modulo 2^64,

    x = w_i * m_i;  x ^= x >> 32;  x *= MIX;  x ^= x >> 32;  two lanes: the sum of x, and the sum of x * m_i

Every step of x can be undone, so one changed word always changes the first lane. The shifts make x nonlinear, so that
changes of several words don't cancel as they would in a plain sum; what happens to cancel in the first lane is weighed
by its position in the second. Sums modulo 2^64 don't depend on their order, so the value depends neither on the chunks
nor on how a device adds.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

FIRST, STEP, MIX = 0xD1B54A32D192ED03, 0x6A09E667F3BCC908, 0xC2B2AE3D27D4EB4F  # odd, even, odd
WORD_BYTES = 8
CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 21}  # of torch's operations: such that the scratch stays in a cache


def scratch_bytes(device: torch.device) -> int:
    """What `sums_by_torch` takes of the device's memory at most while it runs."""
    return 3 * CHUNK_WORDS[device.type] * WORD_BYTES


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
        table = torch.arange(num, device=device).mul_(signed(STEP)).add_(signed(FIRST))
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
    torch.add(scratch.table[:num], signed(STEP * start), out=multipliers)
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    words.mul_(multipliers)
    low.bitwise_xor_(high)  # x ^= x >> 32, with no sign to mask away
    words.mul_(signed(MIX))
    low.bitwise_xor_(high)
    torch.sum(words, 0, out=scratch.sums[0])
    words.mul_(multipliers)
    torch.sum(words, 0, out=scratch.sums[1])
    lanes.add_(scratch.sums)


def signed(value: int) -> int:
    """The int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
