"""Samples are a function of their index, and the position of a slot in them is one number."""
from __future__ import annotations

import numpy as np
import pytest

from migration.data import DataCursor, Samples
from migration.errors import UserError

SEQ_LENGTH = 8


class CountingSource:
    """Token i is i: shows which window a sample is."""

    name = "counting"
    digest = "counting"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens
        return np.arange(start, start + length)


def cursor(samples: Samples, *, dp_rank: int = 0, dp: int = 3) -> DataCursor:
    return DataCursor(samples, micro_batch_size=2, num_microbatches=2, dp=dp, dp_rank=dp_rank)


def test_random_access_equals_sequential_access() -> None:
    sequential = [Samples(CountingSource(100), SEQ_LENGTH, seed=1)[i] for i in range(60)]
    samples = Samples(CountingSource(100), SEQ_LENGTH, seed=1)
    for i in np.random.Generator(np.random.PCG64(0)).permutation(60):
        assert np.array_equal(samples[i], sequential[i]), f"sample {i} depends on what was read before it"


def test_every_window_once_per_epoch_without_overlap() -> None:
    samples = Samples(CountingSource(100), SEQ_LENGTH, seed=1)
    assert samples.num_windows == 12
    for epoch in range(3):
        of_epoch = [samples[epoch * 12 + i] for i in range(12)]
        assert all(sample.dtype == np.int64 and sample.shape == (SEQ_LENGTH + 1,) for sample in of_epoch)
        assert sorted(sample[0] for sample in of_epoch) == list(range(0, 96, SEQ_LENGTH))
        assert all(np.array_equal(np.diff(sample), np.ones(SEQ_LENGTH)) for sample in of_epoch)


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        samples = Samples(CountingSource(1000), SEQ_LENGTH, seed=seed)
        return [int(samples[epoch * samples.num_windows + i][0]) for i in range(samples.num_windows)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(9, 1), (16, 1), (17, 2)])
def test_last_window_is_used_only_if_whole(num_tokens: int, num_windows: int) -> None:
    samples = Samples(CountingSource(num_tokens), SEQ_LENGTH, seed=1)
    assert samples.num_windows == num_windows
    assert max(samples[i][-1] for i in range(num_windows)) == num_windows * SEQ_LENGTH


def test_data_parallel_ranks_partition_the_batch() -> None:
    cursors = [cursor(Samples(CountingSource(500), SEQ_LENGTH, seed=1), dp_rank=rank) for rank in range(3)]
    seen = []
    for _ in range(4):
        seen += [i for c in cursors for i in c.iteration_sample_ids().ravel()]
        for c in cursors:
            c.advance()
    assert sorted(seen) == list(range(4 * 2 * 2 * 3))


def test_ids_by_hand() -> None:
    one = cursor(Samples(CountingSource(500), SEQ_LENGTH, seed=1), dp_rank=1)
    one.consumed_samples = 24
    assert one.iteration_sample_ids().tolist() == [[26, 27], [32, 33]]


def test_position_is_one_number() -> None:
    samples = Samples(CountingSource(500), SEQ_LENGTH, seed=1)
    leaver, joiner = cursor(samples), cursor(Samples(CountingSource(500), SEQ_LENGTH, seed=1))
    for _ in range(7):
        leaver.advance()
    joiner.consumed_samples = leaver.consumed_samples
    assert joiner.samples_digest() == leaver.samples_digest()
    assert all(np.array_equal(a, b) for a, b in zip(joiner.microbatches(), leaver.microbatches(), strict=True))


def test_each_model_chunk_reads_the_same_microbatches() -> None:
    chunks = cursor(Samples(CountingSource(500), SEQ_LENGTH, seed=1))
    first, second = chunks.microbatches(), chunks.microbatches()
    expected = [np.stack([chunks.samples[i] for i in row]) for row in chunks.iteration_sample_ids()]
    chunks.advance()  # what was handed out stays with its iteration
    for a, b, c in zip(first, second, expected, strict=True):
        assert a.shape == (2, SEQ_LENGTH + 1) and a.dtype == np.int64
        assert np.array_equal(a, c) and np.array_equal(b, c)


def test_samples_digest_tells_ids_apart() -> None:
    samples = Samples(CountingSource(500), SEQ_LENGTH, seed=1)
    cursors = [cursor(samples, dp_rank=rank) for rank in range(3)]
    digests = [c.samples_digest() for c in cursors]
    cursors[0].advance()
    digests.append(cursors[0].samples_digest())
    assert len(set(digests)) == 4 and all(len(digest) == 32 and int(digest, 16) >= 0 for digest in digests)


def test_shorter_than_a_sample() -> None:
    with pytest.raises(UserError, match="has 8 tokens, a sample needs 9"):
        Samples(CountingSource(8), SEQ_LENGTH, seed=1)


def test_negative_seed() -> None:
    with pytest.raises(UserError, match="seed=-1"):
        Samples(CountingSource(100), SEQ_LENGTH, seed=-1)
