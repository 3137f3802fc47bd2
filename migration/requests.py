"""Requests to a running job from outside: a line of JSON each way over TCP, to whoever is the controller.

The controller's process listens; its address and a secret lie in RUN/controller.json, readable by the user alone. The
server is polled by the control thread and doesn't block it; the client is `harness.py request|status|cancel|kill`.
Anybody may connect, so nothing that comes without the secret may do more than be turned away.
"""
from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migration.errors import UserError

_TIMEOUT_S = 10.0  # of the server for the rest of a request
_SEND_TIMEOUT_S = 1.0  # of a reply, which the kernel takes at once unless it is very long
_HAND_OVER_S = 3.0  # for the role of a controller that has ended to come to another process
_LOOK_S = 0.05  # at the file that names the controller
_MAX_REQUEST_BYTES = 1 << 16
_MAX_WAITING = 32  # connections at once, so that strangers can't take every file descriptor of the process


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A connection whose request hasn't come whole, or whose reply waits."""

    connection: socket.socket
    ends_s: float  # monotonic
    data: bytes = b""
    reply: bytes = b""  # once it has


class NoJob(UserError):
    """Nobody answers for the run."""


class RequestServer:
    """Listens for requests; one connection a request."""

    def __init__(self, run: str, address: str, term: int, world_rank: int, *, hand_over_s: float) -> None:
        """`hand_over_s`: in how long another process takes this one's place if it hangs; clients wait for so long."""
        self._secret = secrets.token_hex(16)
        self._socket = socket.create_server(("", 0))
        self._socket.setblocking(False)
        self._waiting: list[_Waiting] = []
        self._path = Path(run) / "controller.json"
        text = json.dumps({"host": address, "port": self._socket.getsockname()[1], "secret": self._secret,
                           "term": term, "world_rank": world_rank, "pid": os.getpid(), "hand_over_s": hand_over_s})
        unfinished = self._path.with_suffix(".unfinished")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(unfinished, self._path)

    @property
    def has_replied(self) -> bool:
        """Whether every request that has come whole has its reply."""
        return not any(waiting.reply for waiting in self._waiting)

    def poll(self, answer: Callable[[dict[str, Any]], dict[str, Any]],
             may_reply: Callable[[], bool] = lambda: True) -> None:
        """Answer the requests that have come whole. What is no request of this run's user is answered with an error.

        A reply goes out once `may_reply()`.
        """
        if len(self._waiting) < _MAX_WAITING:
            with contextlib.suppress(OSError):  # nobody came, or has left again, or can't be served just now
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._waiting.append(_Waiting(connection=connection, ends_s=time.monotonic() + _TIMEOUT_S))
        for waiting in self._waiting:
            if not waiting.reply and self._has_come(waiting):
                waiting.reply = json.dumps(self._reply(waiting.data, answer)).encode() + b"\n"
        if may_reply():
            self._send_replies()

    def _has_come(self, waiting: _Waiting) -> bool:
        """Whether there is nothing more to wait for."""
        try:
            part = waiting.connection.recv(_MAX_REQUEST_BYTES)
        except BlockingIOError:
            return time.monotonic() >= waiting.ends_s
        except OSError:
            part = b""  # the client is gone
        waiting.data += part
        return not part or waiting.data.endswith(b"\n") or len(waiting.data) >= _MAX_REQUEST_BYTES

    def _send_replies(self) -> None:
        for waiting in [waiting for waiting in self._waiting if waiting.reply]:
            self._waiting.remove(waiting)
            with waiting.connection, contextlib.suppress(OSError):  # the client went away: nobody is left to answer
                waiting.connection.settimeout(_SEND_TIMEOUT_S)
                waiting.connection.sendall(waiting.reply)

    def _reply(self, data: bytes, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        try:
            request = json.loads(data)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"error": "this is no request"}
        if not secrets.compare_digest(str(request.pop("secret", "")).encode(), self._secret.encode()):
            return {"error": "the secret is wrong: this is another run's controller"}
        return answer(request)

    def close(self) -> None:
        for waiting in self._waiting:
            waiting.connection.close()
        self._socket.close()


def send_request(run: str, request: dict[str, Any], *, limit_s: float | None = None,
                 is_patient: bool = False) -> dict[str, Any]:
    """Ask the controller of the job in `run`. Raises NoJob if none answers, another UserError if it refuses.

    A controller that doesn't answer is waited for as long as the job takes to put another one in its place, which it
    says in the file; one that isn't there only for a moment, or as long if `is_patient`: perhaps the run is over.
    limit_s: for this controller's answer, and no other one is asked.
    """
    contact = _read_contact(run)
    while True:
        hand_over_s = contact["hand_over_s"] if limit_s is None else limit_s
        started_s = time.monotonic()
        try:
            reply = _exchange(run, contact, request, started_s + hand_over_s)
            break
        except (OSError, ValueError) as error:
            if limit_s is not None:
                hand_over_s = 0.0
            elif not is_patient and not isinstance(error, TimeoutError):
                hand_over_s = _HAND_OVER_S
            # perhaps the role is on its way to another process, which will say so in the file
            before, contact = contact, _wait_for_another(run, contact, started_s + hand_over_s)
            if contact == before:
                raise NoJob(f"--run {run}: no job answers there; it has ended, or its controller can't be reached "
                            f"from this machine ({error})") from None
    if "error" in reply:
        raise UserError(reply["error"])
    return reply


def read_result(run: str) -> dict[str, Any]:
    """What a run that is over has left. Raises UserError where it left nothing: it was killed, or goes on."""
    path = Path(run) / "result.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--run {run}: no job answers there, and it left no result ({path}: {error})") from None


def _read_contact(run: str) -> dict[str, Any]:
    path = Path(run) / "controller.json"
    if not Path(run).is_dir():
        raise UserError(f"--run {run}: there is no such folder")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise NoJob(f"--run {run}: no job has started there (no controller.json)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {error}") from None


def _wait_for_another(run: str, contact: dict[str, Any], ends_s: float) -> dict[str, Any]:
    """Another controller than `contact`; or `contact`, if there is none until `ends_s` (monotonic) or the run's end."""
    while (found := _read_contact(run)) == contact and time.monotonic() < ends_s:
        if (Path(run) / "result.json").exists():
            break
        time.sleep(_LOOK_S)
    return found


def _exchange(run: str, contact: dict[str, Any], request: dict[str, Any], ends_s: float) -> dict[str, Any]:
    """Raises TimeoutError if no answer has come by `ends_s` (monotonic), OSError if `contact` isn't the one to ask."""
    limit_s = max(ends_s - time.monotonic(), _LOOK_S)
    with socket.create_connection((contact["host"], contact["port"]), timeout=limit_s) as connection:
        connection.sendall(json.dumps({**request, "secret": contact["secret"]}).encode() + b"\n")
        connection.settimeout(_LOOK_S)
        data = b""
        while not data.endswith(b"\n"):
            try:
                part = connection.recv(65536)
            except TimeoutError:
                if time.monotonic() >= ends_s:
                    raise TimeoutError(f"no answer in {limit_s:.0f} s") from None
                if _read_contact(run) != contact:
                    raise ConnectionError("another process is the controller now") from None
                continue
            if not part:
                break
            data += part
        return json.loads(data)
