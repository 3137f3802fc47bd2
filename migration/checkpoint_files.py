"""A folder of checkpoints: names, what makes one complete, which one a run starts from, and how many are kept.

    DIR/iteration00000020/              complete: the name says so, for it is given last
        checkpoint.json                 what it holds: iteration, config, data, versions, every file with its size
        .metadata, common.pt, *.distcp  Megatron's
    DIR/iteration00000040.*unfinished/  being written, or left behind (checkpoint_writing.py)
    DIR/latest -> iteration00000020

Files and names only: checkpoint.py puts the state into them. Pure: no torch, no MPI, so that a wrong folder is refused
before anything heavy is imported.
"""
from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from migration.config import Config
from migration.errors import UserError

MANIFEST = "checkpoint.json"
UNFINISHED = ".unfinished"
FORMAT_VERSION = 1
# a resumed run may differ in these; every other field must be what it was
FREE_FIELDS = frozenset({"profile", "iterations", "data"})
_MAKE_BITS = ("torch", "megatron_core")  # of what versions.py lists
_NAME = re.compile(r"iteration(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself. `iteration`: the first one that isn't done. `files`: bytes by name."""

    iteration: int
    config: dict[str, Any]
    data: str  # digest of the samples' source
    versions: dict[str, str]
    files: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts: from the beginning, or from `folder`. `notes`: lines that the user should see."""

    folder: str = ""
    iteration: int = 0
    notes: tuple[str, ...] = ()


# ---- reading

def find_start(load: str, checkpoints: str, config: Config, *, ends_at: int | None = None, data: str = "",
               versions: dict[str, str] | None = None) -> Start:
    """Where a run with `--load LOAD` and `--checkpoints CHECKPOINTS` starts; `load`: a checkpoint or a folder of them.

    `ends_at`: the iteration before which it ends, where that isn't the config's last one. `data` and `versions` are
    compared where they are given. Raises UserError if what was named can't be used, or if there are checkpoints and
    none of them is whole.
    """
    newest = _find_newest(checkpoints, must_exist=False) if checkpoints else None
    if load:
        folder = Path(load)
        if not folder.is_dir():
            raise UserError(f"--load {load}: there is no such folder")
        if _NAME.fullmatch(folder.resolve().name):
            found = Start(folder=str(folder.resolve()), iteration=_read_whole(folder, f"--load {load}").iteration)
        else:
            found = _find_newest(load, must_exist=True)
        if newest is not None and newest.iteration > found.iteration:
            raise UserError(f"--checkpoints {checkpoints}: holds a checkpoint of iteration {newest.iteration}, newer "
                            f"than the one to load (iteration {found.iteration}): name a new folder")
    else:
        found = newest or Start()
    if not found.folder:
        return found
    manifest = read_manifest(Path(found.folder))
    notes = _compare(manifest, found.folder, config, data, versions or {})
    if manifest.iteration >= (end := config.iterations if ends_at is None else ends_at):
        raise UserError(f"{found.folder}: saved at iteration {manifest.iteration}, and this run ends at {end}; to go "
                        "on, --set iterations to more than that"
                        f"{'' if end == config.iterations else ', and --save-at, or leave that out'}")
    return dataclasses.replace(found, notes=(*found.notes, *notes,
                                             f"goes on at iteration {found.iteration} from {found.folder}"))


def find_restart(start: Start, checkpoints: str) -> Start:
    """Where a run that began at `start` goes on when processes of it were lost: from the newest whole checkpoint that
    it has saved since, else from `start` once more.
    """
    try:
        newest = _find_newest(checkpoints, must_exist=False) if checkpoints else Start()
    except (UserError, OSError) as error:  # none of them is whole, or the folder can't be read
        return dataclasses.replace(start, notes=(str(error),))
    return newest if newest.iteration > start.iteration else dataclasses.replace(start, notes=newest.notes)


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError if the folder holds no checkpoint of this program."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text())
        if value.pop("format_version") != FORMAT_VERSION:
            raise UserError(f"{path}: written by another version of this program")
        return Manifest(**value)
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no {MANIFEST} in it, so it is no checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: can't be read: {type(error).__name__}: {error}") from None


def find_damage(folder: Path, manifest: Manifest) -> str:
    """The first file that is missing or has another size than when it was written; empty if there is none."""
    for name, size in sorted(manifest.files.items()):
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return ""


def damage_of(folder: Path) -> str:
    """Why a checkpoint can't be used; empty if it is whole."""
    try:
        return find_damage(folder, read_manifest(folder))
    except UserError as error:
        return str(error)


def _read_whole(folder: Path, named: str) -> Manifest:
    manifest = read_manifest(folder)
    if damage := find_damage(folder, manifest):
        raise UserError(f"{named}: the checkpoint isn't whole: {damage}; take an older one")
    return manifest


def _find_newest(text: str, *, must_exist: bool) -> Start:
    """The newest whole checkpoint in a folder of them; what is passed over is noted."""
    root = Path(text)
    if not root.is_dir() and (must_exist or root.exists()):
        raise UserError(f"{text}: there is no such folder of checkpoints")
    notes = [f"{p}: passed over, it was never finished" for p in children(root) if p.name.endswith(UNFINISHED)]
    complete = list_complete(root)
    damaged = []
    for iteration, folder in reversed(complete):
        if not (damage := damage_of(folder)):
            return Start(folder=str(folder.resolve()), iteration=iteration, notes=(*notes, *damaged))
        damaged.append(f"{folder}: passed over, it isn't whole: {damage}")
    if damaged:
        raise UserError(f"{text}: none of its {len(complete)} checkpoints is whole (the newest: "
                        f"{damaged[0].partition('whole: ')[2]}); move them away to start anew")
    if must_exist:
        raise UserError(f"--load {text}: there is no checkpoint in it (a folder named iteration...)")
    return Start(notes=tuple(notes))


def list_complete(root: Path) -> list[tuple[int, Path]]:
    """(iteration, folder) of each checkpoint whose name says that it is complete, oldest first."""
    named = ((_NAME.fullmatch(path.name), path) for path in children(root))
    return sorted((int(match[1]), path) for match, path in named if match)


def children(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()) if root.is_dir() else []


def _compare(manifest: Manifest, folder: str, config: Config, data: str, versions: dict[str, str]) -> list[str]:
    """Raises UserError if the checkpoint is of another job. Returns what may cost equality, but is allowed."""
    own = comparable(config)
    saved = {**comparable(Config(profile="")), **manifest.config}  # a field that came later was at its default
    different = [f"{name} ({saved.get(name)}, here {own.get(name)})"
                 for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]
    if different:
        raise UserError(f"{folder}: saved by a job with another {', '.join(different)}; give the same --profile, --set")
    notes = [f"{folder}: saved with {name} {manifest.versions.get(name)}, this run has {version}: bits may differ"
             for name, version in versions.items() if name in _MAKE_BITS and manifest.versions.get(name) != version]
    if data and data != manifest.data:
        notes.append(f"{folder}: saved by a job that read other data; it goes on at the same position in these")
    return notes


def comparable(config: Config) -> dict[str, Any]:
    """The fields in which a resumed run must be what it was, as JSON gives them back."""
    return json.loads(json.dumps({k: v for k, v in asdict(config).items() if k not in FREE_FIELDS}))
