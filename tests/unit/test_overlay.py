"""The overlay before the real NCCL, with a caller that is linked as torch is. No GPU: pointers are never followed.

Every test runs in a process of its own, since what the dynamic linker has bound stays bound.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_bindings.library import load as load_nccl
from third_party.nccl import overlay

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = ("ncclGetUniqueId", "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable")

CALLER = """
typedef struct { char internal[128]; } id_t128;
int ncclGetUniqueId(id_t128 *);
int ncclCommInitRankConfig(void **, int, id_t128, int, void *);
int ncclCommInitRankScalable(void **, int, int, int, id_t128 *, void *);
int caller_id(id_t128 *id) { return ncclGetUniqueId(id); }
int caller_init(void **comm, int size, id_t128 *id, int rank, void *config) {
    return ncclCommInitRankConfig(comm, size, *id, rank, config);
}
int caller_init_scalable(void **comm, int size, id_t128 *id, int rank, void *config) {
    return ncclCommInitRankScalable(comm, size, rank, 1, id, config);
}
"""

PROLOGUE = """
import ctypes, sys, threading
from third_party.nccl import overlay
loaded = overlay.load()
caller = ctypes.CDLL({caller!r})
id_bytes = ctypes.create_string_buffer(128)

def init(size=2, rank=1, config=None, function="caller_init"):
    comm = ctypes.c_void_p()
    code = getattr(caller, function)(ctypes.byref(comm), size, id_bytes, rank, config)
    return code, comm.value
"""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that needs libnccl.so.2 and calls it, as libtorch_cuda.so does."""
    folder, nccl = tmp_path_factory.mktemp("caller"), Path(load_nccl().path)
    (folder / "caller.c").write_text(CALLER)
    subprocess.run(["gcc", "-shared", "-fPIC", "caller.c", "-o", "libcaller.so", f"-L{nccl.parent}", f"-l:{nccl.name}",
                    f"-Wl,-rpath,{nccl.parent}"], cwd=folder, check=True, timeout=60)
    return str(folder / "libcaller.so")


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment})


def succeeds(program: str, caller: str) -> None:
    done = run(PROLOGUE.format(caller=caller) + program)
    assert done.returncode == 0, done.stderr


def test_builds_once_and_exports_what_torch_calls() -> None:
    path = overlay.build()
    built = path.stat().st_mtime_ns
    assert overlay.build() == path and path.stat().st_mtime_ns == built
    exported = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert all(f" T {name}\n" in exported for name in ENTRY_POINTS)


def test_the_command_prints_where_it_is() -> None:
    done = subprocess.run([sys.executable, "-m", "third_party.nccl.overlay"], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.strip() == str(overlay.build())


def test_passes_on_what_nobody_handed_over(caller: str) -> None:
    succeeds("""
from nccl_bindings.communicator import Communicator
from nccl_bindings.errors import NcclError
from nccl_bindings.library import load
assert caller.caller_id(id_bytes) == 0 and any(id_bytes.raw), "a real id"
own = Communicator(load(), 0, 1)
config = own.config(blocking=1)
code, comm = init(1, 0, ctypes.byref(config))
try:
    own.init(id_bytes.raw)
    expected = 0
except NcclError as error:
    expected = error.code
assert code == expected, (code, expected)
assert loaded.num_adopted == 0 and loaded.num_calls == 1, "the bindings don't go through the overlay"
assert loaded.problem == ""
""", caller)


@pytest.mark.parametrize("function", ["caller_init", "caller_init_scalable"])
def test_hands_over_once(caller: str, function: str) -> None:
    succeeds(f"""
loaded.hand_over(0xABC0, 2, 1)
assert caller.caller_id(id_bytes) == 0 and not any(id_bytes.raw), "no bootstrap is started for an adopted one"
assert init(function={function!r}) == (0, 0xABC0)
assert loaded.num_adopted == 1 and loaded.take_back() == 0
code, comm = init(function={function!r})
assert code != 0 and comm != 0xABC0, "the second call is NCCL's, which can't"
assert loaded.num_adopted == 1 and loaded.num_calls == 2
""", caller)


def test_hands_over_to_this_thread_only(caller: str) -> None:
    succeeds("""
loaded.hand_over(0xABC0, 2, 1)
seen = []
thread = threading.Thread(target=lambda: seen.append(init()))
thread.start(); thread.join()
assert seen[0][0] != 0 and seen[0][1] != 0xABC0 and loaded.num_adopted == 0
assert init() == (0, 0xABC0)
""", caller)


@pytest.mark.parametrize("size, rank", [(3, 1), (2, 0)])
def test_another_size_or_rank_isnt_served(caller: str, size: int, rank: int) -> None:
    succeeds(f"""
loaded.hand_over(0xABC0, 2, 1)
assert init({size}, {rank})[0] == 4
assert "size or rank differ" in loaded.problem and loaded.num_adopted == 0
assert loaded.take_back() == 0xABC0
""", caller)


def test_two_in_a_row_are_an_error(caller: str) -> None:
    succeeds("""
loaded.hand_over(0xABC0, 2, 1)
try:
    loaded.hand_over(0xDEF0, 2, 1)
except overlay.OverlayError as error:
    assert "0xabc0 was handed over on this thread and nobody adopted it" in str(error)
else:
    raise AssertionError("no error")
""", caller)


def test_loading_twice_gives_the_same(caller: str) -> None:
    succeeds("""
loaded.hand_over(0xABC0, 2, 1)
sys.modules["torch"] = object()  # too late for a first load, not for a second
assert overlay.load().take_back() == 0xABC0 and overlay.loaded().num_calls == 0
""", caller)


# ---- one line each


def refused(program: str, *words: str, **environment: str) -> None:
    done = run("from third_party.nccl import overlay\ntry:\n" + "".join(f"    {line}\n" for line in program.split("\n"))
               + "except overlay.OverlayError as error:\n    print(error)", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and all(word in done.stdout for word in words), done.stdout


def test_without_a_compiler(tmp_path: Path) -> None:
    refused("overlay.build()", "no gcc found", "install gcc", XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path))


def test_with_a_broken_compiler(tmp_path: Path) -> None:
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    broken.chmod(0o755)
    refused("overlay.build()", "couldn't build", "no space left", XDG_CACHE_HOME=str(tmp_path),
            PATH=f"{tmp_path}:{os.environ['PATH']}")


def test_after_torch() -> None:
    refused("import sys; sys.modules['torch'] = object(); overlay.load()", "torch is imported already")


def test_after_nccl() -> None:
    refused("from nccl_bindings.library import load; load(); overlay.load()", "libnccl.so.2 is loaded already")


def test_not_loaded_at_all() -> None:
    refused("overlay.loaded()", "isn't loaded", "before importing torch")


def test_another_nccl_that_isnt_there(tmp_path: Path) -> None:
    refused(f"overlay.load({str(tmp_path / 'libnccl.so.2')!r})", "can't load NCCL from", "cannot open")


def test_another_nccl_that_is_something_else() -> None:
    libc = next(Path(line.split()[-1]) for line in open("/proc/self/maps") if "/libc.so" in line)
    refused(f"overlay.load({str(libc)!r})", "isn't known as libnccl.so.2")


def test_without_any_nccl_the_call_fails(tmp_path: Path) -> None:
    assert shutil.which("gcc")
    program = PROLOGUE.replace("caller = ctypes.CDLL({caller!r})", "caller = ctypes.CDLL(str(loaded.path))") + """
code = caller.ncclGetUniqueId(id_bytes)
assert code == 2 and loaded.problem == "no libnccl.so.2 is loaded", (code, loaded.problem)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


# ---- the stock wheel


def test_torchs_own_calls_come_through_it() -> None:
    """A CUDA build of torch is needed for its calls, but no GPU."""
    import torch
    if torch.version.cuda is None:
        pytest.skip("a CPU build of torch has no NCCL")
    done = run("""
from third_party.nccl import overlay
loaded = overlay.load()
import torch
assert any(torch._C._nccl_unique_id())
loaded.hand_over(0xABC0, 2, 1)
assert not any(torch._C._nccl_unique_id()), "torch's call came to the overlay"
assert loaded.take_back() == 0xABC0
""")
    assert done.returncode == 0, done.stderr
