"""How a checkpoint comes to be in a folder of them: begun, written, named when all is there; and how many are kept.

    DIR/iteration00000040.1f0c9a7e-2.unfinished/   being written: by which run, after how many recoveries of it
    DIR/iteration00000040.1f0c9a7e-1.left.unfinished/   given up: whoever hung over it can't finish it any more
    DIR/iteration00000020.removed.unfinished/      being removed

A process that hung may wake up anywhere in here, long after the job has gone on without it. So each generation that
begins anew writes into folders of its own, `give_up_unfinished` comes before it, and nobody removes what another one
may be writing. Pure, like checkpoint_files.py, which says what makes a checkpoint whole.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from migration.checkpoint_files import (FORMAT_VERSION, MANIFEST, UNFINISHED, Manifest, children, comparable,
                                        damage_of, list_complete)
from migration.config import Config

LATEST = "latest"
_LEFT = ".left" + UNFINISHED
_REMOVED = ".removed" + UNFINISHED


def unfinished_path(root: str, iteration: int, run: str, num_recoveries: int) -> Path:
    """Where the job of the run folder `run` (absolute) writes, the same on every slot."""
    writer = hashlib.sha256(run.encode()).hexdigest()[:8]
    return Path(root) / f"iteration{iteration:08d}.{writer}-{num_recoveries}{UNFINISHED}"


def give_up_unfinished(root: str) -> None:
    """Before a generation begins anew, when nobody in it writes: what isn't finished never will be.

    One rename each: a process that wakes up later has either finished before, or finds its folder gone.
    """
    for path in children(Path(root)):
        if path.name.endswith(UNFINISHED) and not path.name.endswith((_LEFT, _REMOVED)):
            with contextlib.suppress(FileNotFoundError):  # finished just now
                os.replace(path, _free_name(path, path.name.removesuffix(UNFINISHED)))


def _free_name(path: Path, stem: str) -> Path:
    """A run folder that is used again gives its checkpoints the same names again."""
    left, number = path.with_name(stem + _LEFT), 1
    while left.exists():
        left, number = path.with_name(f"{stem}-{number}{_LEFT}"), number + 1
    return left


def begin(path: Path) -> None:
    """Make an empty folder, of `unfinished_path`, to write the checkpoint into; `finish` gives it its name."""
    path.mkdir(parents=True)


def finish(path: Path, *, iteration: int, config: Config, data: str, versions: dict[str, str], keep: int) -> Path:
    """Everybody has written into `path`: complete it, name it, and remove what isn't kept. Returns the new folder.

    Kept are the last `keep` that are whole, this one, and what is newer. Raises FileNotFoundError if it has been given
    up.
    """
    files = {p.relative_to(path).as_posix(): p.stat().st_size for p in sorted(path.rglob("*")) if p.is_file()}
    manifest = Manifest(iteration=iteration, config=comparable(config), data=data, versions=versions, files=files)
    _write(path / MANIFEST, json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}, indent=1))
    _sync_folder(path)
    final = path.with_name(f"iteration{iteration:08d}")
    _put_in_place(path, final)
    complete = list_complete(final.parent)
    whole = [(number, folder) for number, folder in complete if not damage_of(folder)]
    _point_latest_to(whole[-1][1])
    _sync_folder(final.parent)
    oldest = min(iteration, *(number for number, _ in whole[-keep:]))
    for number, old in complete:
        if number < oldest:
            _remove(old)
    for left in children(final.parent):
        if left.name.endswith((_LEFT, _REMOVED)):
            shutil.rmtree(left)
    return final


def _put_in_place(path: Path, final: Path) -> None:
    """The new one in the place of an older one, if there is one: of an earlier run that came as far."""
    if not final.exists():
        os.replace(path, final)
        return
    doomed = _set_aside(final)
    try:
        os.replace(path, final)
    except FileNotFoundError:  # given up meanwhile: what was there stays, but for what others have put there since
        with contextlib.suppress(OSError):
            os.replace(doomed, final)
        raise
    shutil.rmtree(doomed)


def _remove(folder: Path) -> None:
    """A removal that is cut short leaves nothing that looks complete."""
    shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(folder.name + _REMOVED)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.replace(folder, doomed)
    return doomed


def _point_latest_to(folder: Path) -> None:
    link = folder.parent / (LATEST + UNFINISHED)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, folder.parent / LATEST)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """New names reach the disk with their folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
