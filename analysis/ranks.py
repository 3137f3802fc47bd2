"""Runs a function in several ranks on this machine's GPUs, or on its CPU, and hands back what each returned.

Owns processes, their environment and their time limit, and is what each of these processes runs. Imports no torch: a
rank on a GPU loads the NCCL overlay before it. LM_NCCL names another libnccl.so.2 than torch's.
"""
from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from migration.placement import has_gpu
from migration.versions import CODE_ROOT
from third_party.nccl import overlay

STORE_TIMEOUT_S = 60.0
_LAST_WORDS_S = 3.0  # a hung rank writes its stacks
_LAST_WORDS = 6000
_ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a function gets. `library` (nccl_bindings) and `overlay` are None on the CPU."""

    rank: int
    world: int
    device: Any   # torch.device
    store: Any    # torch.distributed.TCPStore
    library: Any
    overlay: overlay.Overlay | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def barrier(self, name: str, poll_s: float = 0.005) -> None:
        """All ranks, on the host only. A name serves once. `poll_s`: how far apart they may go on."""
        self.store.add(f"barrier/{name}", 1)
        ends_s = time.monotonic() + STORE_TIMEOUT_S
        while self.store.add(f"barrier/{name}", 0) < self.world:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"barrier {name}: not all ranks came")
            time.sleep(poll_s)


def run_ranks(function: str, *, world: int, hosts: str, device: str = "cuda", timeout_s: float = 150.0,
              arguments: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None,
              path: Path = CODE_ROOT) -> list[dict[str, Any]]:
    """What `function` ("module:name", found from `path`) returned on each rank, as JSON gives it back.

    `hosts`: "one" for all ranks, or "each" its own. `device`: cuda or cpu. Raises AssertionError with the output of
    every rank that failed, or hung.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    call = {"function": function, "path": str(path), "device": device, "world": world,
            "port_file": str(folder / "port"), "arguments": dict(arguments or {})}
    processes = []
    try:
        for rank in range(world):
            host = overlay.environment(f"h{rank if hosts == 'each' else 0}")
            own = {**os.environ, **_ONE_MACHINE, **host, **(environment or {})}
            command = [sys.executable, "-m", "analysis.ranks", json.dumps({**call, "rank": rank})]
            with open(folder / f"{rank}.log", "wb") as log:
                processes.append(subprocess.Popen(command, cwd=CODE_ROOT, env=own, stdin=subprocess.DEVNULL, stdout=log,
                                                  stderr=log))
        _wait(function, processes, folder, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    shutil.rmtree(folder)  # what failed stays to be looked at
    return results


def _wait(function: str, processes: list[subprocess.Popen[bytes]], folder: Path, ends_s: float) -> None:
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
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # it writes where it hangs
        time.sleep(_LAST_WORDS_S if None in codes else 0.0)
        # who waited for one that hangs fails too: the other's words say where
        texts = [f"rank {rank}:\n{(folder / f'{rank}.log').read_text(errors='replace')[-_LAST_WORDS:]}"
                 for rank, code in enumerate(codes) if code != 0]
        raise AssertionError(f"{function}: rank {failed[0]} failed or hung (exit codes {codes}):\n" + "\n".join(texts))


def _meet(rank: int, port_file: Path) -> Any:
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


def _take_device(kind: str, rank: int) -> dict[str, Any]:
    """The fields of Rank that differ: NCCL's overlay must be loaded before torch is."""
    if kind == "cpu":
        if has_gpu():
            overlay.load()  # else preload would, too late
        import torch
        torch.set_num_threads(1)
        return {"device": torch.device("cpu"), "library": None, "overlay": None}
    loaded = overlay.load(os.environ.get("LM_NCCL"))
    import torch

    from nccl_bindings.library import load
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return {"device": device, "library": load(), "overlay": loaded}


def main(call: Mapping[str, Any]) -> int:
    faulthandler.enable()
    rank, world, port_file = call["rank"], call["world"], Path(call["port_file"])
    if call["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    fields = _take_device(call["device"], rank)
    sys.path.insert(0, call["path"])
    module, _, name = call["function"].partition(":")
    own = Rank(rank=rank, world=world, store=_meet(rank, port_file), arguments=call["arguments"], **fields)
    try:
        result = getattr(importlib.import_module(module), name)(own)
    except Exception:
        traceback.print_exc()
        return 1
    (port_file.parent / f"{rank}.json").write_text(json.dumps(result))
    own.barrier("end")
    own.store.add("gone", 1)
    while rank == 0 and own.store.add("gone", 0) < world:  # it serves the store: the others leave first
        time.sleep(0.005)
    return 0


if __name__ == "__main__":
    exit_code = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a communicator that was left half-built on purpose must not hold up the exit
