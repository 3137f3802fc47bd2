"""Digests of tensors, computed where they lie: the same value on a CPU and on a GPU, with one copy to the host.

For comparing memory that should be equal to the last bit; not against somebody who wants to deceive. A group of tensors
is one stream of 64-bit words, little-endian, its tail filled up with zeros. With odd m_i = FIRST + i * STEP, and all
modulo 2^64,

    x = w_i * m_i;  x ^= x >> 32;  x *= MIX;  x ^= x >> 32;  two lanes: the sum of x, and the sum of x * m_i

Every step of x can be undone, so one changed word always changes the first lane. The shifts make x nonlinear, so that
changes of several words don't cancel as they would in a plain sum; what happens to cancel in the first lane is weighed
by its position in the second. Sums modulo 2^64 don't depend on their order, so the value depends neither on the chunks
nor on how a device adds.

Must not know what the tensors are for.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

FIRST, STEP, MIX = 0xD1B54A32D192ED03, 0x6A09E667F3BCC908, 0xC2B2AE3D27D4EB4F  # odd, even, odd
CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 21}  # such that the scratch stays in a cache
_WORD_BYTES = 8


def scratch_bytes(device: torch.device) -> int:
    """What `digest_tensors` takes of the device's memory while it runs, beside 16 bytes a chunk: 48 MiB on a GPU."""
    return 3 * CHUNK_WORDS[device.type] * _WORD_BYTES


def digest_tensors(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    """Hex digest of each group: of the names, dtypes, shapes and bytes of its tensors.

    The tensors must be contiguous; their addresses may be odd. Works on the GPU if one of them is there, on the current
    stream, and waits for it once.
    """
    device = next((t.device for named in groups.values() for t in named.values() if t.is_cuda), torch.device("cpu"))
    streams = {name: [t.detach().view(-1).view(torch.uint8).to(device) for t in named.values()]
               for name, named in groups.items()}
    num_words = {name: -(-sum(t.numel() for t in flats) // _WORD_BYTES) for name, flats in streams.items()}
    scratch = _Scratch.make(device, min(CHUNK_WORDS[device.type], max(num_words.values(), default=0)))
    num_chunks = {name: -(-num // len(scratch.words)) if num else 0 for name, num in num_words.items()}
    lanes = torch.empty((sum(num_chunks.values()), 2), dtype=torch.int64, device=device)
    row = 0
    for flats in streams.values():
        for start, num in _chunks(scratch, flats):
            _add_up(scratch, start, num, lanes[row])
            row += 1
    sums = iter(lanes.tolist())
    found = {}
    for name, named in groups.items():
        chunks = [next(sums) for _ in range(num_chunks[name])]
        totals = [sum(lane) % (1 << 64) for lane in zip(*chunks)]
        described = [[tensor, str(t.dtype), list(t.shape)] for tensor, t in named.items()]
        found[name] = hashlib.sha256(json.dumps([described, totals]).encode()).hexdigest()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    """`table`: m_0, m_1, ... of one chunk. `multipliers`: those of the chunk at hand. `words`: the chunk."""

    table: torch.Tensor
    multipliers: torch.Tensor
    words: torch.Tensor
    zeros: torch.Tensor  # bytes that fill up a tail

    @classmethod
    def make(cls, device: torch.device, num: int) -> _Scratch:
        table = torch.arange(num, device=device).mul_(_signed(STEP)).add_(_signed(FIRST))
        return cls(table=table, multipliers=torch.empty_like(table), words=torch.empty_like(table),
                   zeros=torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=device))


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
            if filled == memory.numel():
                torch.cat(pieces, out=memory)  # one kernel for many small tensors
                yield start, len(scratch.words)
                start, filled = start + len(scratch.words), 0
                pieces.clear()
    if filled:
        num = -(-filled // _WORD_BYTES)
        torch.cat([*pieces, scratch.zeros[:num * _WORD_BYTES - filled]], out=memory[:num * _WORD_BYTES])
        yield start, num


def _add_up(scratch: _Scratch, start: int, num: int, lanes: torch.Tensor) -> None:
    """Both sums of the chunk, which is used up, into `lanes`."""
    words, multipliers = scratch.words[:num], scratch.multipliers[:num]
    torch.add(scratch.table[:num], _signed(STEP * start), out=multipliers)
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    words.mul_(multipliers)
    low.bitwise_xor_(high)  # x ^= x >> 32, with no sign to mask away
    words.mul_(_signed(MIX))
    low.bitwise_xor_(high)
    torch.sum(words, 0, out=lanes[0])
    words.mul_(multipliers)
    torch.sum(words, 0, out=lanes[1])


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
