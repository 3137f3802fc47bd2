"""`python -m analysis.machine`: what figures were taken on, as JSON: date, GPUs, driver and versions.

Asks torch and NCCL in a process of its own, so that whoever starts ranks needs neither. Knows nothing of figures.
"""
from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass

from analysis.device_memory import ask_smi
from migration.versions import CODE_ROOT

_TIMEOUT_S = 120.0  # the first import of torch from a cold disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`gpus`: a name each, empty on a machine without; `driver` and `nccl` are "none" there if there are none."""

    date: str
    gpus: tuple[str, ...]
    driver: str
    torch: str
    nccl: str
    megatron_core: str
    python: str
    cores: int
    code: str  # digest of this repository's sources
    can_park: bool = False  # GPUs with an NCCL that has it

    def describe(self) -> str:
        """One line for a table of results."""
        names = [f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)]
        devices = f"{', '.join(names)}, driver {self.driver}, NCCL {self.nccl}" if names else "no GPU, Gloo"
        return (f"{self.date}; {devices}; {self.cores} cores; torch {self.torch}, megatron-core {self.megatron_core}, "
                f"Python {self.python}; code {self.code[:12]}")


def ask_machine() -> Machine:
    """What ranks started in this environment will find. Raises RuntimeError with what went wrong."""
    done = subprocess.run([sys.executable, "-m", "analysis.machine"], cwd=CODE_ROOT, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"python -m analysis.machine ended with {done.returncode}: {done.stderr[-1500:]}")
    found = json.loads(done.stdout)
    return Machine(**{**found, "gpus": tuple(found["gpus"])})


def _look() -> Machine:
    import torch

    from migration.versions import collect_versions
    from nccl_bindings.library import load, version_text
    versions = collect_versions()
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    library = load(os.environ.get("LM_NCCL")) if gpus else None
    return Machine(date=datetime.date.today().isoformat(), gpus=gpus, driver=_driver() if gpus else "none",
                   can_park=library is not None and library.has("park"), torch=torch.__version__,
                   nccl=version_text(library.version) if library else "none", megatron_core=versions["megatron_core"],
                   python=platform.python_version(), cores=len(os.sched_getaffinity(0)), code=versions["code"])


def _driver() -> str:
    try:
        return ask_smi("driver_version")[0][0]
    except RuntimeError:
        return "unknown"


if __name__ == "__main__":
    json.dump(asdict(_look()), sys.stdout)
