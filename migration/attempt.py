"""A call that may hang where nothing ends it: it is made on a thread of its own, which may be left behind."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


class Attempt:
    """One such call. What comes first decides: its end, or `give_up`, from any thread and also before it has begun.

    The thread knows nothing but the future, so that it doesn't keep whoever gave up, and what is made too late goes
    with it.
    """

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def give_up(self, error: Exception) -> None:
        """`error` is what `make` raises, unless the call has ended."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)

    def make(self, name: str, call: Callable[[], Any], timeout_s: float, late: Exception) -> Any:
        """What `call` returns; raises what it raises, `late` after `timeout_s`, or what it was given up with."""
        threading.Thread(target=_fulfil, args=(self._future, call), name=name, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            self._future.exception(timeout_s)
        self.give_up(late)
        return self._future.result()


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # it was given up
        try:
            made = call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(made)
