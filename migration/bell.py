"""Wakes the control thread of another process: a datagram that says nothing but that a record is on its way.

MPI's waits spin, so control threads poll, and in the pause of a move each hop of a record would cost half an interval,
or polls that take the cores from those who transfer. A datagram that gets lost costs one interval; one from a stranger,
a poll. Knows nothing of MPI and of records.
"""
from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from migration.whereabouts import addresses, own_address

_DRAINED = 64  # datagrams at a time


class Bell:
    """`hello` goes to the others, whose hellos say where they can be rung. One thread waits; `wake` is for the others
    of this process."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(("", 0))
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (self._socket.fileno(), self._event):
            self._poll.register(descriptor, select.POLLIN)
        self.peers: list[tuple[str, int]] = []  # by rank: address, empty if there is none, and port
        self._near = ""  # the address from which a datagram proves nothing
        self.is_heard = False  # whether one has ever come, from another machine if there are several

    @property
    def hello(self) -> dict[str, Any]:
        return {"address": own_address(), "bell": self._socket.getsockname()[1]}

    def meet(self, hellos: Sequence[Mapping[str, Any]], rank: int) -> None:
        """`hellos`: of all ranks. Rings one on another machine, if there is one, so that everybody soon knows whether
        datagrams come through."""
        names = addresses(hellos)
        found = {name: _resolve(name) for name in set(names)}
        self.peers = [(found[name], hello["bell"]) for name, hello in zip(names, hellos, strict=True)]
        one_machine = len(found) == 1
        self._near = "" if one_machine else found[names[rank]]
        self.ring((rank + (1 if one_machine else names.count(names[rank]))) % len(names))

    def ring(self, rank: int) -> None:
        """At another process. Never waits, never fails: who isn't rung polls."""
        with contextlib.suppress(OSError):  # the network says no
            if self.peers[rank][0]:
                self._socket.sendto(b".", self.peers[rank])

    def wake(self) -> None:
        """At this process, from any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> bool:
        """Until somebody rings or wakes, or `timeout_s` has passed. Returns whether another process has rung."""
        if timeout_s < 0.001:  # poll takes whole milliseconds
            time.sleep(timeout_s)
            timeout_s = 0.0
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1e3)}
        if self._event in ready:
            os.eventfd_read(self._event)
        if self._socket.fileno() not in ready:
            return False
        num_rung = 0
        with contextlib.suppress(OSError):  # nothing is left
            while num_rung < _DRAINED:
                source = self._socket.recvfrom(1)[1][0]
                self.is_heard |= source != self._near
                num_rung += 1
        return num_rung > 0


def _resolve(address: str) -> str:
    """Once, since asking a name server may take seconds."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return ""
