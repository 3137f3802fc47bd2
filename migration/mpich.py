"""What MPICH and its launcher hydra need beside MPI itself: how it is set up, begun, and left without MPI_Finalize.

world.py calls MPI; nothing here sends or receives. Under Open MPI, or another launcher, it does no harm.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any


def set_defaults() -> None:
    """Environment variables that MPICH reads when it is loaded; what is set already stays."""
    # MPICH only: with its default (UCX) and polling like ours, records between hosts stayed away in 5 of 14 runs
    # for as long as we waited; with OFI in none of 50
    os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    # every process is a node of its own to MPI, as with the proxies of --np: with shared memory inside nodes, a
    # busy machine's starts hung in MPI_Init (8 of 129; without it 0 of 123)
    os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")
    # datagrams: with OFI's providers over connections ("sockets", "tcp"), MPICH ends a process that has a record on
    # its way to one that is just dying, whatever the error handler; with this one it survived 200 sends a second
    os.environ.setdefault("FI_PROVIDER", "udp;ofi_rxd")


def leave_hydra() -> None:
    """After MPI_Finalize, before os._exit: tell hydra that this process is done.

    MPICH says so in an exit handler, and without it hydra kills the others and returns 9. os._exit runs no handlers; a
    normal exit runs torch's destructors too, and then 2 of 4 runs ended in std::terminate. So the line of the PMI-1
    protocol is sent from here. Nothing to do under another launcher.
    """
    if "PMI_FD" in os.environ and "SLURM_PROCID" not in os.environ:
        descriptor = int(os.environ["PMI_FD"])
        os.write(descriptor, b"cmd=finalize\n")
        os.read(descriptor, 64)


def init(mpi: Any) -> None:
    """MPI_Init_thread through ctypes: mpi4py's own holds Python's lock while it waits for the whole world.

    Then no other thread of this process could run, and `World.start` would never see its time-out.
    """
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()  # finds what the module is linked to as well
    code = library.MPI_Init_thread(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    if code != mpi.SUCCESS or provided.value != mpi.THREAD_MULTIPLE:
        raise RuntimeError(f"MPI_Init_thread returned {code} and thread level {provided.value}, not "
                           f"{mpi.THREAD_MULTIPLE}")


def unname_shared_memory() -> None:
    """Remove the names of MPICH's files in /dev/shm, 1 MiB a process, once everybody has mapped what it needs.

    MPI_Finalize would do that, which no process here waits for; without a name the memory goes with the process.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/mpich_")
        if path[1]:
            with contextlib.suppress(FileNotFoundError):  # mapped in parts, or by others of this node too
                os.unlink(path[1] + path[2])
