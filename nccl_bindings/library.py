"""Finds and loads libnccl.so.2, and says what it can do. Owns the table of features and their first versions.

There must be one copy of NCCL in a process: communicators of one copy mean nothing to another. So the copy that is
loaded already (torch's) comes first, by its soname; else the one of the `nvidia.nccl` wheel; else the system's.
"""
from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from nccl_bindings.errors import LibraryProblem, MissingFeature

SONAME = "libnccl.so.2"
FLOOR = 22203  # the first version that connects at first use, without which preparing isn't cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that not every version can do. It is there if the version is new enough and every symbol exists."""

    name: str
    first_version: int
    symbols: tuple[str, ...] = ()
    meaning: str


FEATURES = (
    Feature(name="init", first_version=FLOOR, symbols=("ncclCommInitRankConfig", "ncclCommAbort"),
            meaning="communicators with a configuration, connected at first use"),
    Feature(name="split", first_version=FLOOR, symbols=("ncclCommSplit",), meaning="children of an idle communicator"),
    Feature(name="scalable_init", first_version=22304, symbols=("ncclCommInitRankScalable",),
            meaning="bootstrap over several roots"),
    Feature(name="shrink", first_version=22703, symbols=("ncclCommShrink",), meaning="a child without some members"),
    Feature(name="names", first_version=22703, meaning="names of communicators in NCCL's own messages"),
    Feature(name="revoke", first_version=22807, symbols=("ncclCommRevoke",),
            meaning="ends what is under way, keeps the communicator"),
    Feature(name="grow", first_version=22902, symbols=("ncclCommGrow",), meaning="a child with more members"),
    Feature(name="memory_stats", first_version=22907, symbols=("ncclCommMemStats",),
            meaning="device memory per communicator"),
    Feature(name="suspend", first_version=22907, symbols=("ncclCommSuspend", "ncclCommResume"),
            meaning="gives an idle communicator's memory back"),
    Feature(name="park", first_version=23003, symbols=("ncclCommSuspend", "ncclCommResume"),
            meaning="... its channel arrays too, which is nearly all"),
    Feature(name="multi_rank_gpu", first_version=23003, meaning="several ranks of one host on one GPU"),
    Feature(name="algorithm_per_call", first_version=23102, meaning="algorithm and protocol chosen per call"),
)
_BY_NAME = {feature.name: feature for feature in FEATURES}


def version_text(version: int) -> str:
    """22809 -> "2.28.9"."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def first_version(name: str) -> str:
    """Of the versions that have this feature, as text."""
    return version_text(_BY_NAME[name].first_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A loaded NCCL. `handle` gives its symbols as ctypes functions."""

    handle: ctypes.CDLL
    path: str
    version: int

    def has(self, name: str) -> bool:
        feature = _BY_NAME[name]
        return self.version >= feature.first_version and all(hasattr(self.handle, s) for s in feature.symbols)

    def require(self, name: str) -> None:
        """Raises MissingFeature with the version that has it."""
        if not self.has(name):
            raise MissingFeature(f"NCCL {version_text(self.version)} ({self.path}) can't do {name}: it comes with "
                                 f"{first_version(name)}")


def load(path: str | None = None) -> Library:
    """The NCCL of this process, or the one at `path`. Raises LibraryProblem when there is none, or it is too old.

    Its symbols stay local: an overlay that is loaded globally isn't bypassed, and doesn't catch these calls.
    """
    handle = ctypes.CDLL(path, mode=os.RTLD_NOW) if path else _find()
    number = ctypes.c_int()
    code = handle.ncclGetVersion(ctypes.byref(number))
    if code != 0:
        raise LibraryProblem(f"{path or SONAME} doesn't tell its version (code {code}): install another NCCL")
    loaded_from = _path_of(handle)
    if number.value < FLOOR:
        raise LibraryProblem(f"NCCL {version_text(number.value)} ({loaded_from}) is too old: {version_text(FLOOR)} or "
                             "newer is needed")
    return Library(handle=handle, path=loaded_from, version=number.value)


def _find() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass  # not loaded yet
    tried = []
    for candidate in (_in_wheel(), SONAME):
        if candidate is None:
            continue
        try:
            return ctypes.CDLL(candidate, mode=os.RTLD_NOW)
        except OSError as error:
            tried.append(str(error))
    raise LibraryProblem(f"no NCCL found ({'; '.join(tried)}): install the wheel nvidia-nccl-cu13, or torch with CUDA")


def _in_wheel() -> str | None:
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / SONAME
        if path.exists():
            return str(path)
    return None


class _SymbolInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]


def _path_of(handle: ctypes.CDLL) -> str:
    """The file that a loaded library came from, asked from the dynamic linker."""
    info = _SymbolInfo()
    address = ctypes.cast(handle.ncclGetVersion, ctypes.c_void_p)
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return os.fsdecode(info.file) if found and info.file else SONAME
