"""The sums of digest_sums.py on a GPU, at about the rate of its memory: one launch, however many tensors.

Tensors are cut into pieces, and each program of the kernel adds up one. Imports triton, which compiles the kernel at
its first launch in a process (with a C compiler), or finds it in its cache on the disk. Only digest.py imports this.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from migration.digest_sums import FIRST, MIX, STEP, WORD_BYTES

SCRATCH_BYTES = 1 << 20  # of the table of pieces: enough for 20,000 tensors, 32 bytes more for each one beyond
# what a program takes at a time: 4 words a thread; with 8, its registers leave room for fewer programs at once
BLOCK_WORDS, NUM_WARPS = 512, 4
MIN_PIECE_BYTES = 32 * BLOCK_WORDS * WORD_BYTES  # 128 KiB: less would be mostly the adding up of the threads' sums
NUM_PIECES = 8192  # of everything: some for each multiprocessor, so that they end at about the same time

_FIRST, _STEP, _MIX = tl.constexpr(FIRST), tl.constexpr(STEP), tl.constexpr(MIX)


def sums(groups: Sequence[Sequence[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Both lanes of each group: int64 (groups, 2) on `device`, on the current stream.

    The tensors are contiguous, on `device`, and must live until the sums are there.
    """
    lanes = torch.zeros((len(groups), 2), dtype=torch.int64, device=device)
    pieces = torch.from_numpy(cut_into_pieces(groups)).to(device)
    if len(pieces):
        with torch.cuda.device_of(lanes):  # Triton launches on the current one, which is a matter of the thread
            _add_up[(len(pieces),)](pieces, lanes, BLOCK=BLOCK_WORDS, num_warps=NUM_WARPS)
    return lanes


def cut_into_pieces(groups: Sequence[Sequence[torch.Tensor]], num_pieces: int = NUM_PIECES) -> np.ndarray:
    """int64 (pieces, 4): address, bytes, index of the first word in the group's stream, group.

    About `num_pieces` or fewer, and one for each tensor. Each but a tensor's last one has a whole number of blocks.
    """
    rows = []
    for group, tensors in enumerate(groups):
        start = 0
        for tensor in tensors:
            rows.append((tensor.data_ptr(), tensor.nbytes, start, group))
            start += -(-tensor.nbytes // WORD_BYTES)
    whole = np.array(rows, np.int64).reshape(-1, 4)
    block_bytes = BLOCK_WORDS * WORD_BYTES
    size = max(MIN_PIECE_BYTES, -(-int(whole[:, 1].sum()) // num_pieces // block_bytes) * block_bytes)
    assert size < 1 << 30, "an index within a piece has 32 bits"
    counts = -(-whole[:, 1] // size)
    pieces = np.repeat(whole, counts, axis=0)
    skipped = size * (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts))
    pieces[:, 0] += skipped
    pieces[:, 1] = np.minimum(pieces[:, 1] - skipped, size)
    pieces[:, 2] += skipped // WORD_BYTES
    return pieces


@triton.jit
def _add_up(pieces, lanes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = pieces + 4 * tl.program_id(0).to(tl.int64)
    address, num_bytes = tl.load(piece), tl.load(piece + 1).to(tl.int32)
    start, group = tl.load(piece + 2).to(tl.uint64), tl.load(piece + 3)
    offset = (address & 7).to(tl.int32)
    memory = (address - offset).to(tl.pointer_type(tl.uint64))
    num_words = (num_bytes + 7) // 8
    # words that lie in memory as they are; the others follow
    num_aligned = tl.where(offset == 0, num_bytes // 8, 0)

    index = tl.arange(0, BLOCK)
    table = _FIRST + index.to(tl.uint64) * _STEP
    first = tl.zeros([BLOCK], tl.uint64)
    second = tl.zeros([BLOCK], tl.uint64)
    for at in range(0, num_aligned, BLOCK):
        word = tl.load(memory + at + index, mask=at + index < num_aligned, other=0)
        multiplier = table + (start + at) * _STEP
        x = _mix(word, multiplier)
        first += x
        second += x * multiplier
    for at in range(num_aligned, num_words, BLOCK):
        word = _gather(memory, at + index, offset, num_bytes)
        multiplier = table + (start + at) * _STEP
        x = _mix(word, multiplier)
        first += x
        second += x * multiplier
    # a sum modulo 2^64 doesn't depend on the order
    tl.atomic_add(lanes + 2 * group, tl.sum(first, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(lanes + 2 * group + 1, tl.sum(second, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _mix(word, multiplier):  # type: ignore[no-untyped-def]
    x = word * multiplier
    x ^= x >> 32  # unsigned: zeros come in
    x *= _MIX
    return x ^ (x >> 32)


@triton.jit
def _gather(memory, index, offset, num_bytes):  # type: ignore[no-untyped-def]
    """Words from `offset` bytes after `memory` on, each of two aligned ones; zeros behind `num_bytes`.

    Aligned words with no byte of the tensor in them are not read: memory may end there.
    """
    low = tl.load(memory + index, mask=8 * index < num_bytes, other=0)
    high = tl.load(memory + index + 1, mask=8 * index + 8 < offset + num_bytes, other=0)
    shift = (8 * offset).to(tl.uint64)
    word = (low >> shift) | (high << 1 << (63 - shift))  # not 64 - shift, which may be 64
    left = num_bytes - 8 * index
    kept = tl.minimum(tl.maximum(left, 0), 7).to(tl.uint64) * 8
    ones = tl.full([1], 1, tl.uint64)
    return tl.where(left < 8, word & ((ones << kept) - ones), word)
