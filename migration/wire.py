"""Messages between a leaver and its joiner: JSON over one TCP connection, in order, each with a time limit.

Beside the pair's communicator, which moves bytes but can't wait without burning a core or a GPU, and can't say what
comes next. The joiner listens and says where in the store of the generation being built. Closing the wire, from any
thread, ends every wait on it, at both ends: that is how an abort reaches them.
"""
from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from migration.errors import MoveFailed

_LENGTH = struct.Struct("!Q")
_HELLO_S = 5.0
_HELLO_BYTES = 4096
_LONG_S = 1e6  # never None: with a time limit the socket stays non-blocking, whichever thread set it last
Message = dict[str, Any]


class Wire:
    """One end. `send` and `receive` may be called from different threads, but only one each at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, do: str, timeout_s: float, **fields: Any) -> int:
        """Returns the bytes sent. Raises MoveFailed if the other end is gone or doesn't read for `timeout_s`."""
        data = json.dumps({"do": do, **fields}).encode()
        with self._sending:
            try:
                self._socket.settimeout(timeout_s)
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise MoveFailed(f"message {do} couldn't be sent to the other side of the pair: {error}") from error
        return len(data)

    def receive(self, timeout_s: float = _LONG_S, most_bytes: int = 1 << 40) -> Message:
        """The next message. Raises MoveFailed if the other end is gone or says nothing for `timeout_s`."""
        try:
            size, = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
            if size > most_bytes:
                raise MoveFailed(f"a message of {size} bytes, at most {most_bytes} were expected")
            return json.loads(self._read(size, timeout_s))
        except OSError as error:
            raise MoveFailed(f"no message from the other side of the pair: {error}") from error

    def _read(self, size: int, timeout_s: float) -> bytes:
        parts, left, ends_s = [], size, time.monotonic() + timeout_s
        while left:
            self._socket.settimeout(max(0.001, ends_s - time.monotonic()))
            part = self._socket.recv(min(left, 1 << 20))
            if not part:
                raise ConnectionError("it has closed the connection")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """From any thread; may be called twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has done so already
        self._socket.close()


class Listener:
    """The joiner's end before it is connected. `address` is where this process can be reached."""

    def __init__(self, store: dist.Store, name: str, address: str) -> None:
        self._name, self._token = name, secrets.token_hex(16)
        # on one machine nobody else needs to come in
        self._server = socket.create_server(("127.0.0.1" if address == "127.0.0.1" else "", 0))
        store.set(f"{name}/wire", json.dumps([address, self._server.getsockname()[1], self._token]))

    def accept(self, timeout_s: float) -> Wire:
        """Wait for the leaver, whoever else may come. Raises MoveFailed after `timeout_s`; closes the listener."""
        ends_s = time.monotonic() + timeout_s
        with self._server:
            while True:
                try:
                    self._server.settimeout(max(0.001, ends_s - time.monotonic()))
                    connection = self._server.accept()[0]
                except TimeoutError as error:
                    raise MoveFailed(f"{self._name}: the leaver didn't connect within {timeout_s:.0f} s") from error
                except OSError as error:
                    raise MoveFailed(f"{self._name}: nobody waits for the leaver any more: {error}") from error
                wire = Wire(connection)
                if self._is_leaver(wire):
                    return wire
                wire.close()  # only the leaver has read the store

    def _is_leaver(self, wire: Wire) -> bool:
        try:
            token = wire.receive(_HELLO_S, _HELLO_BYTES)["token"]
            return hmac.compare_digest(str(token).encode(), self._token.encode())
        except Exception:  # whatever a stranger sends: it isn't the leaver
            return False

    def close(self) -> None:
        """Ends `accept`, from any thread; may be called twice."""
        with contextlib.suppress(OSError):  # it is closed
            self._server.shutdown(socket.SHUT_RDWR)  # closing alone wakes nobody up
        self._server.close()


def connect(store: dist.Store, name: str, timeout_s: float) -> Wire:
    """The leaver's end."""
    store.wait([f"{name}/wire"], timedelta(seconds=timeout_s))
    address, port, token = json.loads(store.get(f"{name}/wire"))
    try:
        wire = Wire(socket.create_connection((address, port), timeout=timeout_s))
    except OSError as error:
        raise MoveFailed(f"{name}: the joiner at {address}:{port} can't be reached: {error}") from error
    wire.send("HELLO", timeout_s, token=token)
    return wire
