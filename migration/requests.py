"""Requests to a running job from outside: a line of JSON each way over TCP, to whoever is the controller.

The controller's process listens; its address and a secret lie in RUN/controller.json, readable by the user alone. The
server is polled by the control thread and never blocks it for long; the client is `harness.py request|status|cancel`.
"""
from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from migration.errors import UserError

_TIMEOUT_S = 1.0


class RequestServer:
    """Listens for requests; one connection a request."""

    def __init__(self, run: str, address: str, term: int, world_rank: int) -> None:
        self._secret = secrets.token_hex(16)
        self._socket = socket.create_server(("", 0))
        self._socket.setblocking(False)
        self._path = Path(run) / "controller.json"
        text = json.dumps({"host": address, "port": self._socket.getsockname()[1], "secret": self._secret,
                           "term": term, "world_rank": world_rank, "pid": os.getpid()})
        unfinished = self._path.with_suffix(".unfinished")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(unfinished, self._path)

    def poll(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer at most one waiting request. A request that can't be read is answered with an error."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        with connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                request = json.loads(_read_line(connection))
                if request.pop("secret", None) != self._secret:
                    reply: dict[str, Any] = {"error": "the secret is wrong: this is another run's controller"}
                else:
                    reply = answer(request)
                connection.sendall(json.dumps(reply).encode() + b"\n")
            except (OSError, ValueError):
                return  # the client went away or sent no JSON: nobody is left to answer

    def close(self) -> None:
        self._socket.close()


def send_request(run: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the controller of the job in `run`. Raises UserError if there is no such job or it refuses."""
    path = Path(run) / "controller.json"
    if not Path(run).is_dir():
        raise UserError(f"--run {run}: there is no such folder")
    try:
        contact = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"--run {run}: no job has started there (no controller.json)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {error}") from None
    try:
        with socket.create_connection((contact["host"], contact["port"]), timeout=10.0) as connection:
            connection.sendall(json.dumps({**request, "secret": contact["secret"]}).encode() + b"\n")
            reply = json.loads(_read_line(connection))
    except (OSError, ValueError) as error:
        raise UserError(f"--run {run}: no job answers there; it has ended, or its controller can't be reached from "
                        f"this machine ({error})") from None
    if "error" in reply:
        raise UserError(reply["error"])
    return reply


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            break
        data += part
    return data
