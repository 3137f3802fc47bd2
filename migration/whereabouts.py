"""Where a process is: its host, as moves name it, and an address at which the others reach it."""
from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from migration.plan import spread_hosts


def own_host(world_rank: int, world_size: int, virtual_hosts: list[str]) -> str:
    """This process's host: an equal run of ranks per virtual host, or what the launcher says, or the machine's name.

    Raises UserError when the processes can't be divided equally over `virtual_hosts`.
    """
    if virtual_hosts:
        return spread_hosts(virtual_hosts, world_size)[world_rank]
    for name in ("LM_HOST", "SLURMD_NODENAME", "PMI_HOSTNAME"):
        if os.environ.get(name):
            return os.environ[name]
    return socket.gethostname()


def own_address() -> str:
    """An address of this machine that other hosts can reach: LM_ADDRESS, or what its name resolves to."""
    if os.environ.get("LM_ADDRESS"):
        return os.environ["LM_ADDRESS"]
    try:
        found = [row[4][0] for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        found = []
    return next((a for a in found if not a.startswith("127.")), "127.0.0.1")


def addresses(hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    """At which address the others reach each rank. `hellos`: of all, with their `address`; on one machine it isn't
    used, for it may be shut off."""
    found = [hello["address"] for hello in hellos]
    return ["127.0.0.1"] * len(found) if len(set(found)) == 1 else found
