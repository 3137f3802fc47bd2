"""Stock NCCL through ctypes, in two layers. Needs no torch, no CUDA headers and, up to `init`, no GPU.

types.py (enums, unique id, configuration), errors.py, library.py (finds the one copy in the process, says what it can
do), raw.py (one row per C function), operations.py (collectives, queries, groups, with checks), communicator.py (an
object that owns a communicator), __main__.py (the table of what the loaded library can do: `python -m nccl_bindings`).

Knows nothing of torch, process groups or moves. Nothing happens at import.
"""
