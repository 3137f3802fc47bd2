"""Builds and loads adopt.c, through which stock ProcessGroupNCCL adopts a communicator that was prepared elsewhere.

Owns the built library, its place in the process (global, before torch), and the environment NCCL and torch must find.
Imports neither torch nor the migrator. `python -m third_party.nccl.overlay` builds it and prints where it is.

The dynamic linker takes a name from the first global library that has it. So the order is: this overlay, then another
libnccl.so.2 if one is wanted, then torch.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("adopt.c")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 60.0

ENVIRONMENT = {
    "NCCL_RUNTIME_CONNECT": "1",  # init connects nothing; the first use does
    "NCCL_NVLS_ENABLE": "0",      # its set-up blocks where it can't be aborted, and suspending doesn't free it
    # whether a peer is lost is for the control plane to say; torch's own threads would end the process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # after a failed collective torch's watchdog sleeps four times as long, dump or not, and a group can't be freed
    # before: by default a recovery took a minute more
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # one id for a communicator of any size: beyond 128 ranks torch would wait for those of other roots, which for one
    # that is adopted nobody makes
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",
}


class OverlayError(RuntimeError):
    """The overlay can't be built or loaded. One line that says what to do."""


def environment(host_id: str | None = None) -> dict[str, str]:
    """What must be set before torch is imported and NCCL starts.

    `host_id` names the host as NCCL is to see it: ranks of different names talk through the network, and two ranks may
    share a GPU only if their names differ.
    """
    found = dict(ENVIRONMENT)
    if host_id is not None:
        found["NCCL_HOSTID"] = host_id
    return found


class Overlay:
    """The loaded overlay. What is handed over waits for the next init on the calling thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.lm_nccl_hand_over.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._library.lm_nccl_hand_over.restype = None
        self._library.lm_nccl_take_back.restype = ctypes.c_void_p
        self._library.lm_nccl_problem.restype = ctypes.c_char_p

    def hand_over(self, communicator: int, group_size: int, group_rank: int) -> None:
        """The next init on this thread gets `communicator`, if it asks for this size and rank.

        Raises OverlayError if another one still waits on this thread.
        """
        if left := self.take_back():
            raise OverlayError(f"communicator {left:#x} was handed over on this thread and nobody adopted it")
        self._library.lm_nccl_hand_over(communicator, group_size, group_rank)

    def take_back(self) -> int:
        """What still waits on this thread; 0 if it was adopted."""
        return self._library.lm_nccl_take_back() or 0

    @property
    def num_adopted(self) -> int:
        """Communicators adopted in this process."""
        return self._library.lm_nccl_num_adopted()

    @property
    def num_calls(self) -> int:
        """Inits that came through the overlay, adopted ones included."""
        return self._library.lm_nccl_num_calls()

    @property
    def problem(self) -> str:
        """Why the overlay itself refused the last call on this thread; empty if it refused none."""
        return (self._library.lm_nccl_problem() or b"").decode()


def build() -> Path:
    """Compile adopt.c unless it has been; returns the library's path. Raises OverlayError."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + platform.machine().encode()).hexdigest()[:12]
    path = _cache_folder() / f"libadopt-{key}.so"
    if path.exists():
        return path
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise OverlayError(f"no gcc found to build {SOURCE.name}: install gcc, or put it on PATH")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")  # several processes may build at once; the rename is atomic
    done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished), "-ldl"], capture_output=True,
                          text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode != 0:
        raise OverlayError(f"{compiler} couldn't build {SOURCE}: {' '.join(done.stderr.split())[:400]}")
    unfinished.replace(path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "live-migrator" if base else SOURCE.parents[2] / "build"


def load(nccl: str | None = None) -> Overlay:
    """Build and load the overlay, then the libnccl.so.2 at `nccl` if given, both for all to see. Once, before torch.

    A second call returns the loaded one. Raises OverlayError when torch has bound NCCL's names already.
    """
    path = build()
    if not _is_loaded(str(path)):
        if "torch" in sys.modules:
            raise OverlayError("torch is imported already and has bound NCCL's functions: load the overlay before")
        if _is_loaded("libnccl.so.2"):
            raise OverlayError("libnccl.so.2 is loaded already and may hide the overlay: load the overlay before")
    overlay = Overlay(path)
    if nccl is not None:
        try:
            ctypes.CDLL(nccl, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise OverlayError(f"can't load NCCL from {nccl}: {error}") from error
        if not _is_loaded("libnccl.so.2"):
            raise OverlayError(f"{nccl} isn't known as libnccl.so.2 to the linker: torch would load its own copy")
    return overlay


def loaded() -> Overlay:
    """The overlay of this process. Raises OverlayError if `load` wasn't called in time."""
    path = build()
    if not _is_loaded(str(path)):
        raise OverlayError("the NCCL overlay isn't loaded: call third_party.nccl.overlay.load() before importing torch")
    return Overlay(path)


def _is_loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def main() -> int:
    try:
        print(build())
    except OverlayError as error:
        print(f"overlay: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
