"""A program in the place of harness.py: what a launched or forked process sees, and ways for it to end.

`dummy_ranks.py --np N --run DIR MODE` launches; without --np it is one process of the job.
"""
from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from migration.forkserver import ADDRESS_VARIABLE, forked_here, hand_over
from migration.launch import launch
from migration.mpich import unname_shared_memory


def preload() -> None:
    import mpi4py  # what a real job imports here is heavy; MPI itself must not be among it
    assert "mpi4py.MPI" not in sys.modules
    mpi4py.rc.finalize = False


def preload_with_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def run(argv: list[str]) -> int:
    """One process. argv: --run DIR MODE; returns an exit code."""
    _, folder, mode = argv
    if mode == "exit":
        return 7
    if mode == "raise":
        raise RuntimeError("this was to be expected")
    if mode in ("ranks", "failed", "no_result"):
        _end_as_rank(Path(folder), mode)
    assert mode == "wait"
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # hydra's news that another rank failed
    signal.signal(signal.SIGUSR2, lambda signum, frame: os._exit(12))
    if "PMI_RANK" in os.environ:
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        unname_shared_memory()
    _write(Path(folder), os.environ.get("PMI_RANK", "0"), _describe())
    threading.Event().wait()
    return 1


def _end_as_rank(folder: Path, mode: str) -> NoReturn:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank)
    _write(folder, str(world.rank), _describe() | {"size": world.size, "rank": world.rank, "sum": total})
    print(f"rank {world.rank} was here", flush=True)
    if world.rank == 0 and mode != "no_result":
        (folder / "result.json").write_text(json.dumps({"status": "completed" if mode == "ranks" else "failed"}))
    world.Barrier()  # hydra ends all as soon as one has left in this way
    unname_shared_memory()
    os._exit(0)


def _describe() -> dict[str, object]:
    return {"pid": os.getpid(), "light_pid": int(os.environ["DUMMY_LIGHT_PID"]), "forked": forked_here(),
            "argv": sys.argv, "cwd": os.getcwd(), "mark": os.environ.get("DUMMY_MARK"),
            "num_threads": len(os.listdir("/proc/self/task")), "num_fds": len(os.listdir("/proc/self/fd")),
            "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")}


def _write(folder: Path, rank: str, facts: dict[str, object]) -> None:
    new = folder / f"rank{rank}.new"
    new.write_text(json.dumps(facts))
    new.rename(folder / f"rank{rank}.json")


def main(argv: list[str]) -> int:
    if argv[0] == "--np":
        return launch(int(argv[1]), argv[2:], run_dir=Path(argv[3]), program=Path(__file__),
                      share_imports="DUMMY_ALONE" not in os.environ, preload="dummy_ranks:preload",
                      entry="dummy_ranks:run")
    os.environ["DUMMY_LIGHT_PID"] = str(os.getpid())
    if ADDRESS_VARIABLE in os.environ:
        hand_over(os.environ[ADDRESS_VARIABLE], argv)
    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
