"""Token sources, and the position of a slot in them.

Owns where tokens come from (text, Megatron's indexed dataset) and which samples a slot sees in an iteration. Must not
know torch, processes or moves; megatron.core is imported only when an indexed dataset is opened, after
`device.install()`.

A sample is a function of its index alone, so that the position of the whole job is one number, `consumed_samples`,
and a joiner continues exactly where its leaver stood.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from migration.errors import UserError

NUM_BYTE_TOKENS = 256
INDEXED_SUFFIXES = (".bin", ".idx")


class TokenSource(Protocol):
    """A fixed sequence of `num_tokens` token ids; equal digests mean equal tokens."""

    name: str
    num_tokens: int
    digest: str
    num_skipped_files: int  # left out, since they aren't text

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens start to start+length-1 as int64, (length,)."""


class TextSource:
    """UTF-8 text, a token for each byte, held in memory. `path` is a file, or a folder: all its files in the order of
    their paths, but for hidden ones and those that aren't UTF-8 (`num_skipped_files`). Raises UserError."""

    # ASCII has no byte above 127. Were tokens the bytes themselves, the upper half of the vocabulary would never occur
    # and half of the tensor-parallel shards would have nothing to do, which hides errors in them. 97 is odd, hence
    # this is a permutation of the bytes.
    BYTE_TO_TOKEN = ((97 * np.arange(NUM_BYTE_TOKENS) + 13) % NUM_BYTE_TOKENS).astype(np.uint8)

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.num_skipped_files = 0
        text = self._read_folder(path) if path.is_dir() else _read_text(path)
        if not text:
            raise UserError(f"--data {path}: there is no text in it; name a UTF-8 file or folder that holds some")
        self.num_tokens = len(text)
        self.digest = hashlib.sha256(text).hexdigest()
        self._tokens = self.BYTE_TO_TOKEN[np.frombuffer(text, np.uint8)]

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens
        return self._tokens[start:start + length].astype(np.int64)

    def _read_folder(self, folder: Path) -> bytes:
        texts, failures = [], []
        for path in sorted(_visible_files(folder)):
            try:
                texts.append(_read_text(path))
            except _NotText as error:
                failures.append(error)
        if failures and not texts:
            raise failures[0]
        self.num_skipped_files = len(failures)
        return b"".join(texts)


class IndexedSource:
    """Megatron's indexed dataset `prefix.bin` and `prefix.idx`, its sequences one after the other. Tokens are read
    from the disk when asked for; an id outside the vocabulary is found then. Raises UserError."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.name = prefix
        self.num_skipped_files = 0
        self._vocab_size = vocab_size
        paths = [Path(prefix + suffix) for suffix in INDEXED_SUFFIXES]
        for path, other in (paths, paths[::-1]):
            if not path.is_file():
                raise UserError(f"--data {prefix}: {path} is missing; an indexed dataset is that file and {other}")
            if not path.stat().st_size:
                raise UserError(f"--data {prefix}: {path} is empty; write the dataset again")
        try:
            self._dataset = IndexedDataset(prefix)
            lengths = np.asarray(self._dataset.sequence_lengths, dtype=np.int64)
            _check_index(self._dataset.index, lengths, num_bytes=paths[0].stat().st_size)
        except (AssertionError, ValueError, IndexError, OverflowError, struct.error) as error:
            raise UserError(f"--data {prefix}: {paths[1]} is not the index of an intact dataset "
                            f"({error or type(error).__name__}); write the dataset again") from error
        self._ends = np.cumsum(lengths)
        self.num_tokens = int(self._ends[-1]) if len(lengths) else 0
        # Reading terabytes to compare hosts would take longer than training a while: the index stands for them.
        sizes = [path.stat().st_size for path in paths]
        self.digest = hashlib.sha256(paths[1].read_bytes() + repr(sizes).encode()).hexdigest()

    def tokens(self, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.num_tokens
        sequence = int(np.searchsorted(self._ends, start, side="right"))
        pieces, position, end = [np.empty(0, np.int64)], start, start + length
        while position < end:
            sequence_end = int(self._ends[sequence])
            num_taken = min(end, sequence_end) - position
            if num_taken:  # a sequence may be empty
                offset = position - (sequence_end - int(self._dataset.sequence_lengths[sequence]))
                pieces.append(self._dataset.get(sequence, offset, num_taken).astype(np.int64))
            position, sequence = position + num_taken, sequence + 1
        tokens = np.concatenate(pieces)
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if len(wrong):
            raise UserError(f"--data {self.name}: token {start + wrong[0]} is {tokens[wrong[0]]}, but vocab_size is "
                            f"{self._vocab_size}; set vocab_size to that of the dataset's tokenizer")
        return tokens


class _NotText(UserError):
    """A file isn't UTF-8; in a folder it is left out, named alone it is an error."""


def open_source(data: str, vocab_size: int) -> TokenSource:
    """The source that `--data` names: "" (text of Python's own help), a text file or folder, or an indexed dataset
    by its prefix or one of its two files. Raises UserError."""
    if not data:
        return _text_source(_default_text(), vocab_size)
    path = Path(data)
    try:
        if path.suffix in INDEXED_SUFFIXES:
            return IndexedSource(str(path.with_suffix("")), vocab_size)
        if path.exists():
            return _text_source(path, vocab_size)
        if any(Path(data + suffix).exists() for suffix in INDEXED_SUFFIXES):
            return IndexedSource(data, vocab_size)
    except OSError as error:
        raise UserError(f"--data {data}: {error.filename or path} can't be read ({error.strerror}); "
                        "name something that every process may read") from error
    raise UserError(f"--data {data}: there is no such file or folder, nor {data}.bin and {data}.idx; check the path")


def _text_source(path: Path, vocab_size: int) -> TextSource:
    if vocab_size < NUM_BYTE_TOKENS:
        raise UserError(f"vocab_size={vocab_size}: text is read byte by byte and needs at least {NUM_BYTE_TOKENS}; "
                        f"set vocab_size={NUM_BYTE_TOKENS} or name an indexed dataset with --data")
    return TextSource(path)


def _default_text() -> Path:
    spec = importlib.util.find_spec("pydoc_data.topics")  # found, not imported: only its text is wanted
    if spec is None or not spec.origin:
        raise UserError("this Python comes without pydoc_data, the default text; name a text with --data")
    return Path(spec.origin)


def _visible_files(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error  # walk would silently leave out a folder that it can't read

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in files if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read_text(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"--data {path}: is neither a file nor a folder; name a UTF-8 text")
    raw = path.read_bytes()
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _NotText(f"--data {path}: byte {error.start} is not UTF-8 ({error.reason}); "
                       "name a UTF-8 text, or a folder that holds some") from error
    return raw


def _check_index(index: object, lengths: np.ndarray, num_bytes: int) -> None:
    """Raises ValueError where an index that Megatron could read doesn't fit its data."""
    dtype = np.dtype(index.dtype)
    if dtype.kind not in "iu":
        raise ValueError(f"its tokens are of type {dtype}, not integers")
    ends = np.asarray(index.sequence_pointers) + lengths * dtype.itemsize
    if len(lengths) and (lengths.min() < 0 or index.sequence_pointers.min() < 0 or ends.max() > num_bytes):
        raise ValueError(f"it speaks of {ends.max()} bytes, the data has {num_bytes}")


class Samples:
    """Sample i is a window of seq_length+1 tokens. Windows start every seq_length tokens; each epoch visits every
    window once, in an order that depends on the seed and the number of the epoch alone. Endless.
    Raises UserError for a source shorter than a sample."""

    def __init__(self, source: TokenSource, seq_length: int, seed: int) -> None:
        if source.num_tokens < seq_length + 1:
            raise UserError(f"--data {source.name}: has {source.num_tokens} tokens, a sample needs {seq_length + 1}; "
                            "name a longer text or set a smaller seq_length")
        if seed < 0:
            raise UserError(f"seed={seed}: must be at least 0")
        self.source = source
        self.seq_length = seq_length
        self.num_windows = (source.num_tokens - 1) // seq_length
        self._seed = seed
        # Two, since an iteration may end one epoch and begin the next, and is read once for each model chunk.
        self._order = functools.lru_cache(maxsize=2)(self._compute_order)

    def __getitem__(self, index: int) -> np.ndarray:
        assert index >= 0
        epoch, position = divmod(int(index), self.num_windows)
        window = int(self._order(epoch)[position])
        return self.source.tokens(window * self.seq_length, self.seq_length + 1)

    def _compute_order(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self.num_windows)


class DataCursor:
    """Which samples a slot's data-parallel rank sees in the coming iteration. `consumed_samples`, those that the whole
    job has used before it, is all its state."""

    def __init__(self, samples: Samples, *, micro_batch_size: int, num_microbatches: int, dp: int,
                 dp_rank: int) -> None:
        assert 0 <= dp_rank < dp
        self.samples = samples
        self.consumed_samples = 0
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._dp = dp
        self._dp_rank = dp_rank

    def iteration_sample_ids(self) -> np.ndarray:
        """Indices of this slot's samples, int64, (num_microbatches, micro_batch_size)."""
        microbatch = np.arange(self._num_microbatches, dtype=np.int64)[:, None]
        within = np.arange(self._micro_batch_size, dtype=np.int64)[None, :]
        return self.consumed_samples + (microbatch * self._dp + self._dp_rank) * self._micro_batch_size + within

    def microbatches(self) -> Iterator[np.ndarray]:
        """The iteration's micro-batches in order, int64, (micro_batch_size, seq_length+1) each. Every call gives an
        iterator of its own, one for each model chunk, which stays with this iteration if the cursor advances."""
        ids = self.iteration_sample_ids()
        return (np.stack([self.samples[i] for i in row]) for row in ids)

    def samples_digest(self) -> str:
        """32 hexadecimal characters that stand for `iteration_sample_ids`."""
        return hashlib.sha256(self.iteration_sample_ids().astype("<i8").tobytes()).hexdigest()[:32]

    def advance(self) -> None:
        """Moves on by the whole job's batch."""
        self.consumed_samples += self._micro_batch_size * self._num_microbatches * self._dp
