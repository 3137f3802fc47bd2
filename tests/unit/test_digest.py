"""Digests of tensors: the formula in Python's integers, whatever the chunks and addresses; and what they notice."""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from migration import digest, digest_sums
from migration.digest import digest_tensors

M64 = (1 << 64) - 1


def lanes_in_python(data: bytes) -> list[int]:
    """Both sums, as the docstring of digest.py has them."""
    data += bytes(-len(data) % 8)
    first = second = 0
    for i in range(len(data) // 8):
        multiplier = (digest_sums.FIRST + i * digest_sums.STEP) & M64
        x = int.from_bytes(data[8 * i:8 * i + 8], "little") * multiplier & M64
        x ^= x >> 32
        x = x * digest_sums.MIX & M64
        x ^= x >> 32
        first, second = first + x & M64, second + x * multiplier & M64
    return [first, second]


def of(*tensors: torch.Tensor) -> str:
    return digest_tensors({"group": {str(i): t for i, t in enumerate(tensors)}})["group"]


def randoms(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(-2 ** 63, 2 ** 63 - 1, (num,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], list[int]]:
    """The lanes that a tensor's digest is made of, caught on their way into SHA-256."""
    def lanes(tensor: torch.Tensor) -> list[int]:
        caught: list[list[object]] = []
        with monkeypatch.context() as patch:
            patch.setattr(digest.json, "dumps", lambda value: caught.append(value) or "")
            of(tensor)
        return caught[0][1]
    return lanes


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("chunk_words", [1, 3, 8, 1 << 15])
def test_formula(summed: Callable[[torch.Tensor], list[int]], monkeypatch: pytest.MonkeyPatch, num_bytes: int,
                 chunk_words: int) -> None:
    monkeypatch.setitem(digest_sums.CHUNK_WORDS, "cpu", chunk_words)
    data = randoms(512).view(torch.uint8)[:num_bytes].clone()
    assert summed(data) == lanes_in_python(data.numpy().tobytes())


def test_constants() -> None:
    """What makes every step of a word one that can be undone."""
    assert digest_sums.FIRST % 2 == 1 and digest_sums.MIX % 2 == 1 and digest_sums.STEP % 2 == 0


@pytest.mark.parametrize("chunk_words", [1, 3, 8, 1 << 15])
def test_several_tensors_are_one_stream_of_whole_words(monkeypatch: pytest.MonkeyPatch, chunk_words: int) -> None:
    """Each begins at a word of its own."""
    monkeypatch.setitem(digest_sums.CHUNK_WORDS, "cpu", chunk_words)
    whole = randoms(100).view(torch.uint8)
    for cut in (0, 1, 8, 13, 795, 800):
        by_parts = digest_tensors({"": {"a": whole[:cut], "b": whole[cut:]}})[""]
        described = [["a", "torch.uint8", [cut]], ["b", "torch.uint8", [800 - cut]]]
        stream = whole[:cut].numpy().tobytes() + bytes(-cut % 8) + whole[cut:].numpy().tobytes()
        text = digest.json.dumps([described, lanes_in_python(stream)])
        assert by_parts == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.bool])
def test_odd_addresses(dtype: torch.dtype) -> None:
    """A view at any address has the digest of its copy."""
    values = torch.arange(200).remainder(2).to(dtype) if dtype is torch.bool else torch.arange(200).to(dtype)
    for offset in range(1, 8):
        view = values[offset:offset + 101]
        assert of(view) == of(view.clone())


def test_names_dtypes_and_shapes_count() -> None:
    values = randoms(24)
    same = [{"a": values}, {"b": values}, {"a": values.view(4, 6)}, {"a": values.view(torch.float64)},
            {"a": values[:12], "b": values[12:]}, {"a": values, "b": values[:0]}]
    assert len(set(digest_tensors({str(i): named for i, named in enumerate(same)}).values())) == len(same)


def test_groups_do_not_mix() -> None:
    """Each group has the digest that it has alone, also where one is empty."""
    groups = {"a": {"x": randoms(70000)}, "none": {}, "empty": {"x": torch.empty(0)}, "b": {"x": randoms(3, 2)}}
    together = digest_tensors(groups)
    assert together == {name: digest_tensors({name: named})[name] for name, named in groups.items()}
    assert len(set(together.values())) == 4
    assert digest_tensors({}) == {}


TOP_BIT = torch.tensor(-2 ** 63)


def changed_in(at: int, by: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return torch.cat([words[:at], words[at:at + 1] ^ by, words[at + 1:]])


def test_every_single_bit_counts() -> None:
    words = torch.cat([randoms(3), torch.zeros(2, dtype=torch.int64)])
    found = {of(words)}
    for at in range(5):
        for bit in range(64):
            found.add(of(changed_in(at, torch.tensor(1 << bit if bit < 63 else -2 ** 63), words)))
    assert len(found) == 1 + 5 * 64


@pytest.mark.parametrize("values", ["random", "zeros", "ones"])
@pytest.mark.parametrize("bits", [-2 ** 63, -0x7fffffff80000000, 1, 1 << 31, 1 << 32])
def test_equal_flips_in_two_words_do_not_cancel(summed: Callable[[torch.Tensor], list[int]], values: str,
                                                bits: int) -> None:
    """Sign bits of an int64, of two floats, and others; in neither lane."""
    words = {"random": randoms(40), "zeros": torch.zeros(40, dtype=torch.int64),
             "ones": torch.ones(80).view(torch.int64)}[values]
    before = summed(words)
    for i in range(0, 40, 3):
        for j in range(i + 1, 40, 5):
            after = summed(changed_in(i, torch.tensor(bits), changed_in(j, torch.tensor(bits), words)))
            assert after[0] != before[0] and after[1] != before[1], (i, j)


def test_order_counts(summed: Callable[[torch.Tensor], list[int]]) -> None:
    words = randoms(50)
    before = summed(words)
    for i in range(0, 49, 4):
        for j in range(i + 1, 50, 7):
            swapped = words.clone()
            swapped[[i, j]] = words[[j, i]]
            after = summed(swapped)
            assert after[0] != before[0] and after[1] != before[1], (i, j)


def test_moved_zeros_and_shifts_count() -> None:
    words, zero = randoms(9), torch.zeros(1, dtype=torch.int64)
    moved = [torch.cat([words[:i], zero, words[i:]]) for i in range(10)]
    assert len({of(w) for w in moved}) == 10
    data = torch.cat([torch.zeros(8, dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)])
    assert len({of(data.roll(by)) for by in range(9)}) == 9
    assert len({of(torch.zeros(num, dtype=torch.uint8)) for num in range(20)}) == 20


def test_random_changes_are_all_noticed() -> None:
    """Low bits of few words, as a wrong sum changes them: no two of 3000 states have one digest."""
    words, generator = torch.ones(512).view(torch.int64), torch.Generator().manual_seed(3)
    found = set()
    for _ in range(3000):
        words[torch.randint(256, (2,), generator=generator)] += torch.randint(1, 3, (2,), generator=generator)
        found.add(of(words))
    assert len(found) == 3000


def test_memory_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no digest of 0, whose shape is \(2, 3\): it is not contiguous"):
        of(torch.zeros(3, 2).t())


# ---- which way

@pytest.fixture
def choose() -> Iterator[Callable[[torch.device], digest.Way]]:
    """As in a fresh process."""
    digest._choose.cache_clear()
    yield digest._way
    digest._choose.cache_clear()


GPU = torch.device("cuda", 0)
CHECK = digest.check_sums


def test_torch_serves_a_gpu_where_the_kernel_cannot_be_had(
        choose: Callable[[torch.device], digest.Way], monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    def load() -> digest.Way:
        raise ImportError("No module named 'triton'\nand more")

    monkeypatch.setattr(digest, "_load_kernel", load)
    for _ in range(2):
        way = choose(GPU)
        assert way.sums is digest.sums_by_torch and way.scratch_bytes == digest.scratch_bytes(GPU) == 48 << 20
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    assert caplog.messages == [digest.warm_up(GPU)]
    assert caplog.messages[0].endswith("can't be used: ImportError: No module named 'triton'")
    assert "7 ms per GiB" in caplog.messages[0] and "pause" in caplog.messages[0]


def test_a_kernel_with_other_sums_is_not_used(choose: Callable[[torch.device], digest.Way],
                                              monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
                                              ) -> None:
    cpu = torch.device("cpu")
    digest.check_sums(digest.sums_by_torch, cpu)

    def wrong(groups: object, device: torch.device) -> torch.Tensor:
        sums = digest.sums_by_torch(groups, cpu)
        sums[2, 1] ^= 1
        return sums

    with pytest.raises(RuntimeError, match="its sums on cpu are"):
        digest.check_sums(wrong, cpu)
    way = digest.Way(sums=wrong, scratch_bytes=0, told="")
    monkeypatch.setattr(digest, "_load_kernel", lambda: way)
    monkeypatch.setattr(digest, "check_sums", lambda sums, device: CHECK(sums, cpu))
    assert choose(GPU).sums is digest.sums_by_torch and "its sums on cpu are" in caplog.text


def test_the_kernel_is_used_where_it_can_be_had(choose: Callable[[torch.device], digest.Way],
                                                monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
                                                ) -> None:
    way = digest.Way(sums=lambda groups, device: digest.sums_by_torch(groups, torch.device("cpu")), scratch_bytes=5,
                     told="by a kernel")
    monkeypatch.setattr(digest, "_load_kernel", lambda: way)
    monkeypatch.setattr(digest, "check_sums", lambda sums, device: CHECK(sums, torch.device("cpu")))
    assert choose(GPU) is way and digest.warm_up(GPU) == "by a kernel" and digest.scratch_bytes(GPU) == 5
    assert not caplog.records


def test_time_beside_sha256(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints; asserts nothing of it."""
    tensors = {str(i): t for i, t in enumerate(randoms(180_000).split(1500))}

    def best_ms(work: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            started_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - started_s)
        return min(times) * 1e3

    def sha() -> str:
        hasher = hashlib.sha256()
        for tensor in tensors.values():
            hasher.update(tensor.numpy())
        return hasher.hexdigest()

    with capsys.disabled():
        print(f"\n1.44 MB in 120 tensors: {best_ms(lambda: digest_tensors({'': tensors})):.2f} ms, SHA-256 of the same "
              f"{best_ms(sha):.2f} ms")
