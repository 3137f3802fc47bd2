"""Puts an archive of the code in place on one node and says what is there then. Standard library only.

Runs on each node without the package (sync.py sends this file's text to `python -c`), so it must stand alone.
Arguments: archive, folder, the archive's digest, and the digest that the code in it must have. Prints one line of JSON.
"""
from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

MARKER = ".synced"  # holds the archive's digest: a folder without it isn't ours to replace


def extract(archive: Path, folder: Path) -> None:
    """The archive's files. Python before 3.11.4 doesn't filter them, and needn't: they are our own."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def unpack(archive: Path, folder: Path, identity: str, digest: str) -> str:
    """What was done. The new code is complete before it takes the folder's name.

    What else lies in the folder by now, such as runs or an environment, stays. Raises FileExistsError for a folder that
    isn't from here.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise FileExistsError(f"{folder} holds something that sync didn't put there; name another folder")
    marker = folder / MARKER
    if marker.exists() and marker.read_text() == identity and digest_in(folder) == digest:
        return "was there"
    new = folder.with_name(f"{folder.name}.{socket.gethostname()}.{os.getpid()}.unfinished")
    new.mkdir(parents=True)
    extract(archive, new)
    (new / MARKER).write_text(identity)
    if not folder.exists():
        new.rename(folder)
        return "unpacked"
    old = new.with_suffix(".old")
    folder.rename(old)
    new.rename(folder)
    for entry in list(old.iterdir()):
        if not (folder / entry.name).exists():
            entry.rename(folder / entry.name)
    shutil.rmtree(old)
    return "replaced"


def digest_in(folder: Path) -> str:
    """The digest of the code in `folder`, by that code itself. Raises OSError if it doesn't run there."""
    done = subprocess.run([sys.executable, "-m", "migration.versions"], cwd=folder, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)})
    if done.returncode:
        raise OSError((done.stderr.strip() or f"python ended with {done.returncode}").splitlines()[-1])
    return done.stdout.strip()


def main(archive: str, folder: str, identity: str, digest: str) -> int:
    answer = {"machine": socket.gethostname(), "done": "", "digest": "", "problem": ""}
    try:
        answer["done"] = unpack(Path(archive), Path(folder), identity, digest)
        answer["digest"] = digest_in(Path(folder))
    except (OSError, tarfile.TarError, subprocess.TimeoutExpired) as error:
        answer["problem"] = str(error)
    print(json.dumps(answer))
    return int(answer["digest"] != digest)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
