"""The log of one process: spans, iterations, moves, digests and events in one HDF5 file, schema version 3.

Owns the schema (names, types, units) and the one open file of this process. Must not know torch, MPI, or what a span
means: callers name it. Readers (analysis/log.py) import the schema from here, so that it is written down once.

The file is written in HDF5's single-writer-multiple-readers mode and every row is flushed when it is added. It can be
read while it grows, and what was flushed outlives a SIGKILL of the writer (it is in the page cache, not on disk).
"""
from __future__ import annotations

import bisect
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from migration.errors import UserError

SCHEMA_VERSION = 3
MIN_UNDISTURBED = 3  # iterations before there is a median to measure a stall against
CHUNK_BYTES = 8192  # each flush writes a whole chunk: small ones keep an append cheap

Column = tuple[str, str, str]  # name, NumPy type, unit
Schema = tuple[Column, ...]

ITERATIONS: Schema = (
    ("iteration", "i4", "index"), ("generation", "i4", "index"), ("slot", "i4", "index"),
    ("start_s", "f8", "unix s"), ("time_s", "f8", "s"), ("boundary_s", "f8", "s"), ("stall_s", "f8", "s"),
    ("loss", "f8", "nats per token, NaN: not on the last stage"), ("grad_norm", "f8", "1, NaN: none"),
    ("skipped", "i1", "0 or 1"), ("consumed_samples", "i8", "samples before the iteration"),
    ("samples", "S32", "hex digest"), ("rss_bytes", "i8", "bytes"), ("device_bytes", "i8", "bytes, 0 on CPU"),
    ("num_groups", "i4", "communicators"), ("num_fds", "i4", "count"), ("num_threads", "i4", "count"),
    ("disturbed", "i1", "0 or 1: 1 is left out of the median of stall_s"),
    ("own_s", "f8", "s not spent waiting for others, NaN: not measured"),
)
SPANS: Schema = (
    ("move", "i4", "index, -1: none"), ("phase", "S16", "text"), ("name", "S32", "text"),
    ("start_s", "f8", "unix s"), ("end_s", "f8", "unix s"), ("bytes", "i8", "bytes"),
    ("slot", "i4", "index, -1: none"), ("iteration", "i4", "index, -1: none"), ("generation", "i4", "index"),
    ("rss_bytes", "i8", "bytes at end_s"),
)
MOVES: Schema = (
    ("move", "i4", "index"), ("request", "S128", "text"), ("arm", "S24", "text"),
    ("outcome", "S16", "COMMITTED, ABORTED or REFUSED"),
    ("reason", "S256", "text"), ("iteration", "i4", "index, -1: none"), ("generation", "i4", "index after the move"),
    ("term", "i4", "index"), ("requested_s", "f8", "unix s"), ("setup_s", "f8", "s, NaN: never ready"),
    ("downtime_s", "f8", "s, NaN: none"), ("total_s", "f8", "s, NaN: not committed"),
    ("bytes", "i8", "bytes inside the pause, all pairs"), ("num_groups_rebuilt", "i4", "groups"),
    ("num_groups_kept", "i4", "groups"), ("assignments", "S1024", "JSON [[slot, leaver, joiner], ...], world ranks"),
)
COMMUNICATORS: Schema = (
    ("move", "i4", "index, -1: at the start"), ("slot", "i4", "index"), ("communicator", "S64", "generation/name"),
    ("group", "S64", "text"), ("num_members", "i4", "slots"), ("switch", "S16", "connected, parked or lazy"),
    ("stage", "S16", "text"), ("time_s", "f8", "s"), ("device_bytes", "i8", "bytes the device lost meanwhile"),
)
DIGESTS: Schema = (("slot", "i4", "index"), ("kind", "S32", "text"), ("digest", "S64", "hex digest"))
EVENTS: Schema = (
    ("time_s", "f8", "unix s"), ("kind", "S24", "text"), ("move", "i4", "index, -1: none"), ("text", "S512", "text"),
)
DATASETS: dict[str, Schema] = {
    "iterations": ITERATIONS, "spans": SPANS, "moves": MOVES, "communicators": COMMUNICATORS, "digests": DIGESTS,
    "events": EVENTS,
}


class Clock:
    """Unix seconds that never jump: the wall time at the start plus the monotonic time since."""

    def __init__(self) -> None:
        self.started_s = time.time()
        self._origin_s = time.monotonic()

    def __call__(self) -> float:
        return self.started_s + (time.monotonic() - self._origin_s)


class OpenSpan:
    """A span being recorded; its body may set `bytes`, `slot`, `iteration` or `generation` once it knows them."""

    __slots__ = ("bytes", "slot", "iteration", "generation")

    def __init__(self, *, bytes: int = 0, slot: int = -1, iteration: int = -1, generation: int = 0) -> None:
        self.bytes, self.slot, self.iteration, self.generation = bytes, slot, iteration, generation


class Timeline:
    """Writes the log of this process. Every method may be called from any thread."""

    def __init__(self, path: str | os.PathLike[str], *, world_rank: int, host: str, config: dict[str, Any],
                 options: dict[str, Any], versions: dict[str, str], hosts: list[str],
                 clock: Clock | None = None) -> None:
        """Creates `path` (and its folder). `clock`: one started earlier, so that spans before now can be added.

        Raises UserError where there is such a file already, OSError where it can't be made.
        """
        self.clock = clock or Clock()
        self._lock = threading.Lock()
        self._undisturbed_s: list[float] = []  # sorted
        path = Path(path)
        if path.exists():
            raise UserError(f"{path}: a log of another run is there already; name a new run folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made under another name, so that a reader never meets a file that isn't in SWMR mode yet.
        unfinished = path.with_suffix(".unfinished")
        self._file = h5py.File(unfinished, "w", libver="latest")
        attributes = {"schema_version": SCHEMA_VERSION, "world_rank": world_rank, "host": host, "pid": os.getpid(),
                      "started_s": self.clock.started_s, "config": json.dumps(config),
                      "options": json.dumps(options), "versions": json.dumps(versions), "hosts": json.dumps(hosts)}
        for name, value in attributes.items():
            self._file.attrs[name] = value
        self._datasets = {name: _create_dataset(self._file, name, schema) for name, schema in DATASETS.items()}
        self._file.swmr_mode = True
        os.rename(unfinished, path)

    def add_iteration(self, *, disturbed: bool, **columns: float | int | str | None) -> None:
        """Adds a row of ITERATIONS. `disturbed`: a move went on beside it, so it says nothing about the usual time.

        `stall_s` is computed here. `rss_bytes`, `num_fds`, `num_threads` are measured, `device_bytes` is 0 and `own_s`
        None unless given; None stands for NaN.
        """
        rss_bytes, num_fds, num_threads = process_counts()
        row = {"rss_bytes": rss_bytes, "num_fds": num_fds, "num_threads": num_threads, "device_bytes": 0,
               "own_s": None, **columns}
        whole_s = row["time_s"] + row["boundary_s"]
        with self._lock:
            row["stall_s"], row["disturbed"] = self._compute_stall_s(whole_s), int(disturbed)
            if not disturbed:
                bisect.insort(self._undisturbed_s, whole_s)
            self._append("iterations", row)

    def add_span(self, name: str, phase: str, start_s: float, end_s: float, *, move: int = -1, bytes: int = 0,
                 slot: int = -1, iteration: int = -1, generation: int = 0) -> None:
        """Adds a row of SPANS that began at `start_s` and ended at `end_s` of this timeline's clock."""
        row = {"move": move, "phase": phase, "name": name, "start_s": start_s, "end_s": end_s, "bytes": bytes,
               "slot": slot, "iteration": iteration, "generation": generation, "rss_bytes": _rss_bytes()}
        with self._lock:
            self._append("spans", row)

    @contextmanager
    def span(self, name: str, phase: str, *, move: int = -1, bytes: int = 0, slot: int = -1, iteration: int = -1,
             generation: int = 0) -> Iterator[OpenSpan]:
        """Records the body as a span, also when it raises."""
        opened = OpenSpan(bytes=bytes, slot=slot, iteration=iteration, generation=generation)
        start_s = self.clock()
        try:
            yield opened
        finally:
            self.add_span(name, phase, start_s, self.clock(), move=move, bytes=opened.bytes, slot=opened.slot,
                          iteration=opened.iteration, generation=opened.generation)

    def add_move(self, *, assignments: list[list[int]] | list[tuple[int, int, int]],
                 **columns: float | int | str | None) -> None:
        """Adds a row of MOVES, all columns given. `assignments`: [slot, leaver world_rank, joiner world_rank] each."""
        with self._lock:
            self._append("moves", {**columns, "assignments": _encode_assignments(assignments)})

    def add_communicator(self, **columns: float | int | str) -> None:
        """Adds a row of COMMUNICATORS, all columns given: what one stage of one communicator took."""
        with self._lock:
            self._append("communicators", columns)

    def add_digest(self, slot: int, kind: str, digest: str) -> None:
        """Adds the final digest of one kind of state of one slot."""
        with self._lock:
            self._append("digests", {"slot": slot, "kind": kind, "digest": digest})

    def add_event(self, kind: str, text: str, move: int = -1) -> None:
        """Adds a row of EVENTS, now."""
        with self._lock:
            self._append("events", {"time_s": self.clock(), "kind": kind, "move": move, "text": text})

    def close(self) -> None:
        """Closes the file; a second time does nothing. Adding a row afterwards is a ValueError."""
        with self._lock:
            self._file.close()

    def _compute_stall_s(self, whole_s: float) -> float:
        if len(self._undisturbed_s) < MIN_UNDISTURBED:
            return 0.0
        middle = len(self._undisturbed_s) // 2
        median_s = (self._undisturbed_s[middle] + self._undisturbed_s[~middle]) / 2
        return max(0.0, whole_s - median_s)

    def _append(self, name: str, columns: dict[str, Any]) -> None:
        if not self._file:
            raise ValueError(f"the timeline is closed; a row of {name} came too late: {columns}")
        dataset, dtype, stored_type = self._datasets[name]
        unknown = set(columns).symmetric_difference(dtype.names)
        assert not unknown, f"{name}: columns missing or unknown: {sorted(unknown)}"
        row = np.zeros(1, dtype)
        for column, value in columns.items():
            kind = dtype[column]
            row[column] = cut_utf8(value, kind.itemsize) if kind.kind == "S" else math.nan if value is None else value
        # h5py's low level: dataset[-1] = row takes three times as long, and some rows are added within a pause
        num_rows, = dataset.shape
        dataset.set_extent((num_rows + 1,))
        place = dataset.get_space()
        place.select_hyperslab((num_rows,), (1,))
        dataset.write(h5py.h5s.create_simple((1,)), place, row, stored_type)
        dataset.flush()


def cut_utf8(text: str, max_bytes: int) -> bytes:
    """`text` in UTF-8, cut to `max_bytes` between two characters."""
    encoded = text.encode()
    return encoded if len(encoded) <= max_bytes else encoded[:max_bytes].decode(errors="ignore").encode()


def process_counts() -> tuple[int, int, int]:
    """(resident bytes, open file descriptors, threads) of this process, from /proc."""
    # the listing of fd holds a descriptor itself
    return _rss_bytes(), len(os.listdir("/proc/self/fd")) - 1, len(os.listdir("/proc/self/task"))


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build_dtype(schema: Schema) -> np.dtype:
    """The NumPy type of a row; texts are fixed-length UTF-8."""
    return np.dtype([(name, h5py.string_dtype("utf-8", int(kind[1:])) if kind[0] == "S" else f"<{kind}")
                     for name, kind, _ in schema])


def _create_dataset(file: h5py.File, name: str, schema: Schema) -> tuple[h5py.h5d.DatasetID, np.dtype, Any]:
    """(the dataset, the type of its rows, the same as HDF5's)."""
    dtype = build_dtype(schema)
    dataset = file.create_dataset(name, shape=(0,), maxshape=(None,), dtype=dtype,
                                  chunks=(max(1, CHUNK_BYTES // dtype.itemsize),))
    dataset.attrs["units"] = json.dumps({column: unit for column, _, unit in schema})
    return dataset.id, dtype, h5py.h5t.py_create(dtype)


def _encode_assignments(assignments: list[list[int]] | list[tuple[int, int, int]]) -> str:
    """JSON that fits its column; where it can't, it ends early, whole, rather than in the middle of a number."""
    size = dict((name, kind) for name, kind, _ in MOVES)["assignments"]
    rows = [list(row) for row in assignments]
    while len(text := json.dumps(rows, separators=(",", ":"))) > int(size[1:]):
        rows.pop()
    return text
