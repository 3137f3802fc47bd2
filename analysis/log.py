"""Reads a run folder: the log files of all processes, merged, and the result.

Owns the way from files to arrays, and what is said about a file that can't be read. Must not know what the figures
mean. Works on a run that is going on, and on one that was killed.
"""
from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from migration.errors import UserError
from migration.timeline import DATASETS, SCHEMA_VERSION, build_dtype

# A row is made visible by growing the dataset, then filled. Of a process that was killed, or is being read, one row
# at the end can be still empty; more than one means that the file lost data.
MAX_UNFINISHED_ROWS = 1
# HDF5 reads metadata again while its checksum is wrong, and doubles the pause each time from 1 ns: its default of 100
# times never ends on a file that is cut short. 25 times take 30 ms, and a writer's update far less.
MAX_METADATA_READS = 25
CONSISTENCY_FLAGS_OFFSET = 11  # in the superblock of an HDF5 file; 0 when it was closed
RESTORE = "restore it, or take it out of the folder to read the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who wrote one log file."""

    path: Path
    world_rank: int
    host: str
    pid: int
    started_s: float  # unix

    @property
    def label(self) -> str:
        return f"w{self.world_rank} {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder. The arrays have the columns of the schema (migration/timeline.py) and `world_rank`."""

    path: Path
    processes: dict[int, Process]  # by world rank
    config: dict[str, Any]
    options: dict[str, Any]
    versions: dict[str, str]
    hosts: list[str]  # of each world rank
    iterations: np.ndarray  # sorted by iteration, slot; those that count
    redone: np.ndarray  # likewise: iterations behind which a recovery went back, to do them again
    recoveries: dict[int, int]  # generations in which every slot was built anew: the iteration from which each went on
    spans: np.ndarray  # sorted by start_s
    moves: np.ndarray  # sorted by requested_s; one row a move, that of the highest term
    communicators: np.ndarray  # as each process logged them
    digests: np.ndarray  # sorted by slot, kind
    events: np.ndarray  # sorted by time_s
    result: dict[str, Any] | None  # None: the run goes on, or was killed

    @property
    def all_iterations(self) -> np.ndarray:
        """Those that count, then those behind which a recovery went back."""
        return np.concatenate((self.iterations, self.redone))

    @property
    def slots(self) -> list[int]:
        """Slots that logged an iteration."""
        return sorted(set(self.all_iterations["slot"].tolist()))

    def series(self, slot: int) -> np.ndarray:
        """The iterations of one slot in order, whichever processes held it."""
        return self.iterations[self.iterations["slot"] == slot]

    def label(self, world_rank: int) -> str:
        """Such as 'w3 b1'."""
        host = self.hosts[world_rank] if 0 <= world_rank < len(self.hosts) else "?"
        return f"w{world_rank} {host}"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Reads the run folder `path`.

    Raises UserError, one line that names the file, where there is no run folder, no log file in it, or a file that is
    cut short, is of another schema, or can't be read. No result.json is no error.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder; name the one a run printed, such as runs/<time>-<profile>")
    files = sorted((path / "log").glob("w*.h5"))
    if not files:
        raise UserError(f"{path}: no log files (log/w*.h5) in this folder; is it a run folder, and has the run begun?")
    read = [_read_file(file) for file in files]
    first = read[0].attributes
    arrays = {name: np.concatenate([file.arrays[name] for file in read]) for name in DATASETS}
    recoveries = _find_recoveries(arrays["spans"])
    iterations, redone = _split_redone(arrays["iterations"], recoveries)
    digests = np.sort(arrays["digests"], order=("slot", "kind", "digest", "world_rank"))
    return Run(
        path=path, processes={file.process.world_rank: file.process for file in read},
        config=first["config"], options=first["options"], versions=first["versions"], hosts=first["hosts"],
        iterations=iterations, redone=redone, recoveries=recoveries,
        spans=arrays["spans"][np.argsort(arrays["spans"]["start_s"], kind="stable")],
        moves=_last_terms(arrays["moves"]), communicators=arrays["communicators"],
        digests=_drop_repeated(digests) if recoveries else digests,
        events=arrays["events"][np.argsort(arrays["events"]["time_s"], kind="stable")],
        result=_read_result(path / "result.json"))


def text(value: bytes) -> str:
    """A text column's value."""
    return bytes(value).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    process: Process
    attributes: dict[str, Any]  # the JSON ones
    arrays: dict[str, np.ndarray]


def _read_file(path: Path) -> _File:
    try:
        with _open(path) as file:
            version = int(file.attrs["schema_version"])
            if version != SCHEMA_VERSION:
                raise UserError(f"{path}: a log of schema version {version}, and this code reads version "
                                f"{SCHEMA_VERSION}; use the code that wrote it")
            process = Process(path=path, world_rank=int(file.attrs["world_rank"]), host=str(file.attrs["host"]),
                              pid=int(file.attrs["pid"]), started_s=float(file.attrs["started_s"]))
            attributes = {name: json.loads(file.attrs[name]) for name in ("config", "options", "versions", "hosts")}
            arrays = {name: _read_dataset(path, file[name], name, process.world_rank) for name in DATASETS}
    except UserError:
        raise
    except PermissionError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except (OSError, KeyError, RuntimeError, ValueError) as error:  # what h5py raises for a file that lost its tail
        reason = str(error).strip("'\"").splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a whole log file: cut short, or no log at all ({reason}); {RESTORE}") from error
    return _File(process=process, attributes=attributes, arrays=arrays)


def _open(path: Path) -> h5py.File:
    """Opens a log for reading: one that was closed, that is being written, or whose writer was killed."""
    with path.open("rb") as raw:
        closed = raw.read(CONSISTENCY_FLAGS_OFFSET + 1)[-1:] == b"\0"
    if closed:  # HDF5 then checks the length itself
        return h5py.File(path, "r", libver="latest")
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # h5py has no name for this property; a look-up in one of its modules finds the HDF5 library that h5py uses.
    set_reads = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts
    set_reads.argtypes, set_reads.restype = (ctypes.c_int64, ctypes.c_uint), ctypes.c_int
    if set_reads(access.id, MAX_METADATA_READS) < 0:
        raise RuntimeError("H5Pset_metadata_read_attempts failed")
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ, access))


def _read_dataset(path: Path, dataset: h5py.Dataset, name: str, world_rank: int) -> np.ndarray:
    dtype = build_dtype(DATASETS[name])
    if dataset.dtype != dtype:
        raise UserError(f"{path}: the columns of {name} are not those of schema version {SCHEMA_VERSION}; use the "
                        "code that wrote it")
    rows = dataset[:]
    chunk_ends = [0]
    dataset.id.chunk_iter(lambda chunk: chunk_ends.append(chunk.byte_offset + chunk.size))
    if max(chunk_ends) > path.stat().st_size:
        raise UserError(f"{path}: cut short: the file ends before the rows of {name} do; {RESTORE}")
    filled = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), dtype.itemsize).any(axis=1)
    num_filled = int(np.flatnonzero(filled)[-1]) + 1 if filled.any() else 0
    # HDF5 reads zeros beyond the end of a file, so that a lost tail shows as empty rows. No row we write is empty.
    if len(rows) - num_filled > MAX_UNFINISHED_ROWS or not filled[:num_filled].all():
        raise UserError(f"{path}: cut short: {int((~filled).sum())} of {len(rows)} rows of {name} are gone; {RESTORE}")
    merged = np.zeros(num_filled, [*[(column, dtype[column]) for column in dtype.names], ("world_rank", "<i4")])
    for column in dtype.names:
        merged[column] = rows[column][:num_filled]
    merged["world_rank"] = world_rank
    return merged


def _find_recoveries(spans: np.ndarray) -> dict[int, int]:
    begun = spans[(spans["phase"] == b"RECOVERING") & (spans["name"] == b"connect")]
    return {int(span["generation"]): int(span["iteration"]) for span in begun}


def _split_redone(rows: np.ndarray, recoveries: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(iterations that count, those behind which a recovery went back, to do them again), each in order.

    What a slot logged twice for another reason stays where it is: it is a fault that comparisons find.
    """
    rows = np.sort(rows, order=("iteration", "slot", "generation", "world_rank"))
    is_redone = np.zeros(len(rows), bool)
    for generation, iteration in recoveries.items():
        is_redone |= (rows["generation"] < generation) & (rows["iteration"] >= iteration)
    return rows[~is_redone], rows[is_redone]


def _drop_repeated(digests: np.ndarray) -> np.ndarray:
    """Final digests that were found once more after a recovery, with the same bits."""
    columns = digests[["slot", "kind", "digest"]]
    return digests[np.append(True, columns[1:] != columns[:-1])] if len(digests) else digests


def _last_terms(moves: np.ndarray) -> np.ndarray:
    """One row a move: a controller that took over logs a move again, under its higher term.

    A request that was refused has no number, -1, and stays as it is.
    """
    by_term = np.sort(moves, order=("move", "term"))
    superseded = np.append((by_term["move"][1:] == by_term["move"][:-1]) & (by_term["move"][1:] >= 0), False)
    return np.sort(by_term[~superseded[:len(by_term)]], order=("requested_s", "move"))


def _read_result(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a whole result file ({error}); restore it, or remove it") from error
    if not isinstance(result, dict):
        raise UserError(f"{path}: not a result file; restore it, or remove it")
    return result
