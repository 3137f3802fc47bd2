"""A plain save and restart of the whole job: what one does without a move, and what moves are compared with.

Each slot writes its state (state.py) to one file, RUN/checkpoint/slot0003.pt; another run with the same grid reads it
with --load, on whatever hosts. Bit for bit the job that was saved goes on. Knows nothing of moves.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from migration import state
from migration.config import Config
from migration.errors import StateMismatch, UserError

if TYPE_CHECKING:
    from migration.job import Job

# a resumed run may differ in these; every other field must be what it was
FREE_FIELDS = frozenset({"profile", "iterations", "data"})


def _path(folder: str, slot: int) -> Path:
    return Path(folder) / f"slot{slot:04d}.pt"


def save(job: Job, folder: str) -> int:
    """Write the slot's state, under another name first so that a reader never meets half a file. Returns bytes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    own = state.capture(job)
    path = _path(folder, job.slot)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"config": _comparable(job.config), "iteration": job.iteration, "manifest": own.manifest(),
                "tensors": own.tensors, "values": json.dumps(own.values)}, unfinished)
    os.replace(unfinished, path)
    return path.stat().st_size


def load(job: Job, folder: str) -> None:
    """Copy a saved slot's state into `job`, in place.

    Raises UserError if there is no such checkpoint or it is of another job, StateMismatch if it has other tensors.
    """
    path = _path(folder, job.slot)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--load {folder}: there is no {path.name} in it") from None
    except Exception as error:  # torch raises many kinds for a file that isn't whole
        raise UserError(f"--load {path}: can't be read: {type(error).__name__}: {error}".splitlines()[0]) from error
    different = {k for k, v in _comparable(job.config).items() if saved["config"].get(k) != v}
    if different:
        raise UserError(f"--load {folder}: saved by a job with other {', '.join(sorted(different))}")
    own = state.capture(job)
    if saved["manifest"] != own.manifest():
        raise StateMismatch(f"{path}: saved tensors differ in name, dtype or shape")
    with torch.no_grad():
        for kind, named in own.tensors.items():
            for name, tensor in named.items():
                tensor.copy_(saved["tensors"][kind][name])
    state.apply_values(job, json.loads(saved["values"]))
    job.iteration = saved["iteration"]


def _comparable(config: Config) -> dict[str, object]:
    from dataclasses import asdict
    return {k: v for k, v in asdict(config).items() if k not in FREE_FIELDS}
