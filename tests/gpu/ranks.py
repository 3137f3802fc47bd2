"""Starts a body of bodies.py as several ranks on the GPUs of this machine, and is what each of these processes runs.

Owns processes, their environment and their time limit. Imports no torch: a rank loads the NCCL overlay before it.
LM_NCCL names another libnccl.so.2 than torch's.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # a rank is started by its path
    sys.path.insert(0, str(ROOT))

from third_party.nccl import overlay  # noqa: E402

STORE_TIMEOUT_S = 60.0
_ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a body gets."""

    rank: int
    world: int
    device: Any   # torch.device
    store: Any    # torch.distributed.TCPStore
    library: Any  # nccl_bindings.library.Library
    overlay: overlay.Overlay

    def barrier(self, name: str) -> None:
        """All ranks, on the host only."""
        self.store.add(f"barrier/{name}", 1)
        ends_s = time.monotonic() + STORE_TIMEOUT_S
        while self.store.add(f"barrier/{name}", 0) < self.world:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"barrier {name}: not all ranks came")
            time.sleep(0.005)


def run_ranks(body: str, *, world: int, hosts: str, timeout_s: float = 150.0) -> list[dict[str, Any]]:
    """What `bodies.<body>` returned on each rank. `hosts`: "one" for all ranks, or "each" its own.

    Raises AssertionError with the output of the rank that failed first.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-ranks-"))
    port_file = folder / "port"
    processes = []
    for rank in range(world):
        environment = {**os.environ, **_ONE_MACHINE, **overlay.environment(f"h{rank if hosts == 'each' else 0}"),
                       "OMP_NUM_THREADS": "1"}
        with open(folder / f"{rank}.log", "wb") as log:
            command = [sys.executable, __file__, body, str(rank), str(world), str(port_file)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        _wait(body, processes, folder, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _wait(body: str, processes: list[subprocess.Popen[bytes]], folder: Path, ends_s: float) -> None:
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if not failed and time.monotonic() > ends_s:
            failed = [rank for rank, process in enumerate(processes) if process.poll() is None]
        if failed:
            break
        time.sleep(0.05)
    else:
        failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        codes = [process.poll() for process in processes]
        text = (folder / f"{failed[0]}.log").read_text(errors="replace")
        raise AssertionError(f"{body}: rank {failed[0]} failed or hung (exit codes {codes}):\n{text[-6000:]}")


def _meet(rank: int, world: int, port_file: Path) -> Any:
    """A store served by rank 0."""
    from torch.distributed import TCPStore
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        unfinished = port_file.with_suffix(".part")
        unfinished.write_text(str(store.port))
        unfinished.replace(port_file)
        return store
    ends_s = time.monotonic() + STORE_TIMEOUT_S
    while not port_file.exists():
        if time.monotonic() > ends_s:
            raise TimeoutError("rank 0 didn't open its store")
        time.sleep(0.02)
    return TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, timeout=timeout)


def main(body: str, rank: int, world: int, port_file: Path) -> int:
    loaded = overlay.load(os.environ.get("LM_NCCL"))
    import torch

    from nccl_bindings.library import load
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    sys.path.insert(0, str(Path(__file__).parent))
    import bodies
    own = Rank(rank=rank, world=world, device=device, store=_meet(rank, world, port_file), library=load(),
               overlay=loaded)
    try:
        result = getattr(bodies, body)(own)
    except Exception:
        traceback.print_exc()
        return 1
    result |= {"nccl": own.library.version, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(device)}
    (port_file.parent / f"{rank}.json").write_text(json.dumps(result))
    own.barrier("end")
    own.store.add("gone", 1)
    while rank == 0 and own.store.add("gone", 0) < world:  # it serves the store: the others leave first
        time.sleep(0.005)
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a communicator that was left half-built on purpose must not hold up the exit
