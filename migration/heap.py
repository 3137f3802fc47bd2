"""Gives the system back what this process has freed.

glibc keeps freed memory in the arena of the thread that took it, up to eight arenas a core. Building a communicator
takes some MB on threads of NCCL's and ours, which come and go: on 32 cores 30 MB a move and process stayed resident,
although what was in use didn't grow (microbenchmark.md).
"""
from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; elsewhere nothing is done


def give_back() -> None:
    """Some 15 ms for each 100 MB, and an allocation of another thread may wait for a millisecond or two of it."""
    if _trim is not None:
        _trim(ctypes.c_size_t(0))
