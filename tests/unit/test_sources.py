"""Token sources: text and Megatron's indexed dataset read back what was written; every wrong input has its one line."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from migration import data
from migration.data import IndexedSource, TextSource, open_source
from migration.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
UNPRIVILEGED_UID = 65534
DOCUMENTS = ([3, 1, 4, 1, 5], [], [9, 2, 6], [5], list(range(100, 160)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Die Prüfung läuft. " * 20, encoding="utf-8")
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """An indexed dataset of DOCUMENTS, written by Megatron's own builder."""
    from migration import device
    device.install()
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path / "corpus_text_document")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(prefix + ".idx")
    return prefix


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may read everything; permissions are tested as somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(UNPRIVILEGED_UID)
    try:
        yield
    finally:
        os.seteuid(0)


# text


def test_byte_tokens_are_a_permutation_that_ascii_spreads() -> None:
    assert sorted(TextSource.BYTE_TO_TOKEN) == list(range(256))
    assert all(TextSource.BYTE_TO_TOKEN[byte] == (97 * byte + 13) % 256 for byte in range(256))
    printable = TextSource.BYTE_TO_TOKEN[32:127]
    for shard in range(8):  # as many tensor-parallel shards as anyone uses
        assert ((printable >= shard * 32) & (printable < (shard + 1) * 32)).any()


def test_text_file(text: Path) -> None:
    source = open_source(str(text), 256)
    raw = text.read_bytes()
    assert source.num_tokens == len(raw)
    assert source.tokens(3, 30).tolist() == [(97 * byte + 13) % 256 for byte in raw[3:33]]
    assert source.digest == TextSource(text).digest


def test_folder_takes_visible_texts_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, raw in (("c.txt", b"third"), ("a.md", b"first"), ("b/x.rst", b"second"), (".secret", b"no"),
                      (".hidden/y.txt", b"no"), ("picture.png", b"\x89PNG\xff")):
        (tmp_path / name).write_bytes(raw)
    source = open_source(str(tmp_path), 256)
    assert source.tokens(0, source.num_tokens).tolist() == TextSource.BYTE_TO_TOKEN[list(b"firstsecondthird")].tolist()
    assert source.num_skipped_files == 1


def test_default_text_needs_nothing_and_imports_nothing() -> None:
    source = open_source("", 256)
    assert source.num_tokens > 100_000
    assert "pydoc_data.topics" not in sys.modules


def test_module_needs_no_torch() -> None:
    program = ("import sys\nsys.modules['torch'] = sys.modules['megatron'] = None\n"
               "from migration import data\ndata.open_source('', 256)\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Megatron's indexed dataset


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_indexed_dataset_reads_back_what_was_written(prefix: str, ending: str) -> None:
    source = open_source(prefix + ending, 256)
    expected = [token for document in DOCUMENTS for token in document]
    assert isinstance(source, IndexedSource) and source.num_tokens == len(expected)
    for start in range(len(expected) + 1):
        for length in range(len(expected) - start + 1):
            window = source.tokens(start, length)
            assert window.dtype == np.int64 and window.tolist() == expected[start:start + length]


def test_indexed_digest_tells_datasets_apart(prefix: str) -> None:
    first = open_source(prefix, 256).digest
    assert open_source(prefix, 256).digest == first
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\0\0")
    assert open_source(prefix, 256).digest != first


# bad input, one line each


def refused(source: str, *words: str, vocab_size: int = 256) -> None:
    with pytest.raises(UserError) as caught:
        open_source(source, vocab_size)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_missing(tmp_path: Path) -> None:
    refused(str(tmp_path / "nowhere"), "nowhere", "no such file")


def test_unreadable_file(text: Path, unprivileged: None) -> None:
    if os.geteuid() != UNPRIVILEGED_UID:
        text.chmod(0)
    refused(str(text), str(text), "can't be read", "Permission denied")


def test_unreadable_folder_inside_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "readable.txt").write_text("some")
    (tmp_path / "closed").mkdir()
    stock_scandir = os.scandir

    def scandir_as_if_closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return stock_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_as_if_closed)
    refused(str(tmp_path), "closed", "can't be read")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    refused(str(tmp_path / "empty.txt"), "empty.txt", "no text")


def test_empty_folder(tmp_path: Path) -> None:
    refused(str(tmp_path), str(tmp_path), "no text")


def test_not_utf8_names_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("gut ".encode() + "Prüfung".encode("latin-1"))
    refused(str(tmp_path / "latin.txt"), "latin.txt", "byte 6", "UTF-8")
    refused(str(tmp_path), "latin.txt", "byte 6", "UTF-8")  # a folder with nothing else


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(str(tmp_path / "pipe"), "pipe", "neither a file nor a folder")


@pytest.mark.parametrize("source", ["", "text"])
def test_vocabulary_too_small_for_bytes(source: str, text: Path) -> None:
    refused(source and str(text), "vocab_size=128", "256", vocab_size=128)


def test_default_text_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    refused("", "pydoc_data", "--data")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_an_indexed_dataset(prefix: str, suffix: str) -> None:
    os.remove(prefix + suffix)
    refused(prefix, prefix + suffix, "is missing")
    refused(prefix + ".bin", prefix + suffix, "is missing")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_empty_half(prefix: str, suffix: str) -> None:
    os.truncate(prefix + suffix, 0)
    refused(prefix, prefix + suffix, "is empty")


@pytest.mark.parametrize("size", [4, 12, 17, 25, 33, 40, 60, 90])
def test_truncated_index(prefix: str, size: int) -> None:
    os.truncate(prefix + ".idx", size)
    refused(prefix, prefix + ".idx", "write the dataset again")


@pytest.mark.parametrize(("offset", "raw"), [(0, b"NOTMEGA"), (9, b"\x07"), (17, b"\x63"), (17, b"\x07"),
                                             (18, b"\xff" * 8), (34, b"\xff\xff\xff\x7f"), (34, b"\xff\xff\xff\xff"),
                                             (54, b"\xff" * 8)])
def test_corrupt_index(prefix: str, offset: int, raw: bytes) -> None:
    with open(prefix + ".idx", "r+b") as file:
        file.seek(offset)
        file.write(raw)
    refused(prefix, prefix + ".idx", "write the dataset again")


def test_data_shorter_than_its_index(prefix: str) -> None:
    os.truncate(prefix + ".bin", 20)
    refused(prefix, prefix + ".idx", "20")


def test_token_outside_the_vocabulary(prefix: str) -> None:
    source = open_source(prefix, 128)
    assert source.tokens(0, 9).max() < 128
    with pytest.raises(UserError, match="token 37 is 128, but vocab_size is 128"):
        source.tokens(30, 20)
