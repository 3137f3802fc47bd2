"""The stores at which members meet to build communicators. Own nothing: whoever starts one drops it."""
from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_CONNECT_S = 20.0

def start_store(host: str) -> dist.TCPStore:
    """The store that bootstraps one generation, served by the controller's process and needed only meanwhile.

    Dropping it ends every wait on it, at every member: that is how a half-built generation is aborted.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def connect_store(address: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    """`timeout_s`: of each wait on it. Raises RuntimeError if nobody serves it any more: who asks was told of a server
    that listened, so it is looked for only for a while.
    """
    host, port = address
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=min(timeout_s, _CONNECT_S)))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
