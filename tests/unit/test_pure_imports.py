"""The pure files import the standard library and numpy only: they load where nothing else is installed."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PURE = ("errors", "config", "topology", "sizes", "profiles", "roster", "plan", "plan_report", "protocol",
        "move", "options", "schedule", "watch", "placement", "faults", "acceptance", "checkpoint_files",
        "checkpoint_writing",
        "slurm_nodes", "departures", "slurm_watch", "straggler", "experiments", "neighbours", "pacing",
        "deputy", "told", "sums")
BLOCKED = ("torch", "mpi4py", "h5py", "megatron", "psutil", "matplotlib")

PROGRAM = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # an import of it raises ImportError now
import importlib
importlib.import_module("migration.{module}")
"""


def import_with_blocked(module: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(blocked=blocked, module=module)], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", PURE)
def test_imports_without_the_heavy_packages(module: str) -> None:
    done = import_with_blocked(module, BLOCKED)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    done = import_with_blocked("topology", ("numpy",))
    assert done.returncode != 0 and "import of numpy halted" in done.stderr
