"""Requests over TCP: the server never blocks and turns away what is no request; a client follows the controller."""
from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migration import requests
from migration.errors import UserError
from migration.requests import NoJob, RequestServer, send_request


HAND_OVER_S = 30.0


class Served:
    """A server that is polled on a thread of its own, as the control thread does, and the requests it has passed on."""

    def __init__(self, run: Path, term: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.longest_s = 0.0  # of a poll
        self._server = RequestServer(str(run), "127.0.0.1", term, 0, hand_over_s=HAND_OVER_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            started_s = time.monotonic()
            self._server.poll(self._answer)
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        return {"error": "no"} if request["do"] == "refuse" else {"done": request["do"]}

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.close()


def connect(run: Path) -> socket.socket:
    contact = json.loads((run / "controller.json").read_text())
    return socket.create_connection((contact["host"], contact["port"]), timeout=10.0)


def test_a_request_and_its_reply(served: Served, tmp_path: Path) -> None:
    assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}
    assert served.asked == [{"do": "status"}], "the secret stays here"
    with pytest.raises(UserError, match="^no$"):
        send_request(str(tmp_path), {"do": "refuse"})


@pytest.mark.parametrize("line", [b"1", b"[]", b"null", b'"x"', b"GET / HTTP/1.1\r", b"\xff\xfe", b"[" * 60000, b"{}",
                                  b'{"do": "vacate", "secret": null}', b'{"do": "cancel", "secret": "\xc3\xbc"}'],
                         ids=lambda line: repr(line[:20]))
def test_what_is_no_request_is_turned_away(served: Served, tmp_path: Path, line: bytes) -> None:
    with connect(tmp_path) as stranger:
        stranger.sendall(line + b"\n")
        assert "error" in json.loads(stranger.recv(4096))
    assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}
    assert served.asked == [{"do": "status"}]


def test_a_client_that_says_nothing_holds_nobody_up(served: Served, tmp_path: Path) -> None:
    with connect(tmp_path), connect(tmp_path) as slow:
        slow.sendall(b'{"do": ')
        assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}
    assert served.longest_s < requests._SEND_TIMEOUT_S


def test_a_client_that_leaves_at_once(served: Served, tmp_path: Path) -> None:
    connect(tmp_path).close()
    assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}


def test_the_role_moves_to_another_process(tmp_path: Path) -> None:
    """Between the old controller's end and the new one's file a request finds nobody, and asks again."""
    Served(tmp_path).close()
    found: list[Served] = []
    timer = threading.Timer(0.3, lambda: found.append(Served(tmp_path, term=1)))
    timer.start()
    assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}
    timer.join()
    found[0].close()


class Hung:
    """A controller that takes connections and says nothing."""

    def __init__(self, run: Path, hand_over_s: float) -> None:
        self.server = RequestServer(str(run), "127.0.0.1", 0, 0, hand_over_s=hand_over_s)


def test_who_hangs_is_waited_for_as_long_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes its place meanwhile, and is asked; or nobody does."""
    monkeypatch.setattr(requests, "_HAND_OVER_S", 0.0)
    hung, found = Hung(tmp_path, HAND_OVER_S), []
    timer = threading.Timer(0.5, lambda: found.append(Served(tmp_path, term=1)))
    timer.start()
    assert send_request(str(tmp_path), {"do": "status"}) == {"done": "status"}
    timer.join()
    found[0].close()
    hung.server.close()
    hung = Hung(tmp_path, 0.3)
    with pytest.raises(NoJob, match="no answer in 0 s"):
        send_request(str(tmp_path), {"do": "status"})
    hung.server.close()


def test_who_is_gone_is_waited_for_as_long_by_the_patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_HAND_OVER_S", 0.0)
    Served(tmp_path).close()
    with pytest.raises(NoJob):
        send_request(str(tmp_path), {"do": "status"})
    found: list[Served] = []
    timer = threading.Timer(0.3, lambda: found.append(Served(tmp_path, term=1)))
    timer.start()
    assert send_request(str(tmp_path), {"do": "status"}, is_patient=True) == {"done": "status"}
    timer.join()
    found[0].close()


def test_a_run_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Served(tmp_path).close()
    monkeypatch.setattr(requests, "_HAND_OVER_S", 0.1)
    for _ in range(2):
        with pytest.raises(UserError, match="no job answers there"):
            send_request(str(tmp_path), {"do": "status"})
        (tmp_path / "result.json").write_text("{}")


def test_the_address_is_for_the_user_alone(served: Served, tmp_path: Path) -> None:
    assert (tmp_path / "controller.json").stat().st_mode & 0o077 == 0
