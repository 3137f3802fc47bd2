"""The stores at which members meet to build communicators. Own nothing: whoever starts one drops it."""
from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from datetime import timedelta

import torch.distributed as dist

from migration.attempt import Attempt
from migration.errors import DeadlineExpired, MoveFailed

_CONNECT_S = 20.0


def start_store(host: str) -> dist.TCPStore:
    """The store that bootstraps one generation, served by the controller's process and needed only meanwhile.

    Dropping it ends every wait on it, at every member: that is how a half-built generation is aborted. Where the
    controller hangs, members end their own waits (`StoreClient.end`).
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def wait_for_keys(store: dist.Store, keys: list[str], timeout_s: float, what: str) -> None:
    """Until all members have set theirs. Raises DeadlineExpired, naming the keys that are missing, and RuntimeError at
    once when the store's server goes away."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise DeadlineExpired(f"{what}: waited {timeout_s:.1f} s in vain for {missing} of the members") from error


def connect_store(address: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    """A client that nobody needs to end; as `StoreClient.connect`."""
    return StoreClient(address, timeout_s).connect()


class StoreClient:
    """This process's end of the store at `address`, of which another thread can end every wait.

    A server that hangs neither answers nor closes, and torch's client can't be told to give up; it waits for the answer
    to its first question without a deadline (torch 2.13). So it connects on a thread that may be left behind, and what
    it waits for later is a socket, which can be shut down under it.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        """`timeout_s`: of each wait."""
        self._address, self._timeout_s = address, timeout_s
        self._attempt = Attempt()
        self._servers: frozenset[tuple[str, int]] = frozenset()

    def connect(self) -> dist.TCPStore:
        """Raises RuntimeError if nobody serves it any more: who asks was told of a server that listened, so it is
        looked for only for a while. MoveFailed if it was ended.
        """
        host, port = self._address
        return self._attempt.make("connect store", self._connect, _CONNECT_S, RuntimeError(
            f"the store at {host}:{port} didn't answer within {_CONNECT_S:.0f} s"))

    def _connect(self) -> dist.TCPStore:
        host, port = self._address
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._servers = frozenset((_plain(str(end[0])), port) for *_, end in found)
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=min(self._timeout_s, _CONNECT_S)))
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store

    def end(self) -> None:
        """End every wait on it, at once, as if its server were gone. From any thread; may be called twice."""
        host, port = self._address
        self._attempt.give_up(MoveFailed(f"the connection to the store at {host}:{port} was given up"))
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue  # a copy of it would stay open
                connection = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue  # closed meanwhile
            with connection, contextlib.suppress(OSError):  # one that isn't connected
                end = connection.getpeername()
                if isinstance(end, tuple) and (_plain(str(end[0])), end[1]) in self._servers:
                    connection.shutdown(socket.SHUT_RDWR)


def _plain(text: str) -> str:
    """A numeric address as it is compared: without a scope, and IPv4 as such where a socket of IPv6 carries it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
