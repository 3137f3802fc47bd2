"""What a process has told the controller, as far as another controller may have to hear it again. Pure.

Where a process stands can be asked; a checkpoint, a fault or an error happens once. Such records are numbered, and a
controller that takes over says which of them the last one's deputy knows of.
"""
from __future__ import annotations

import threading
from collections import deque
from typing import Any

_LASTING = frozenset({"CHECKPOINT", "FAULT", "FATAL", "VACATE_MY_HOST"})
_MOST = 64  # kept of those: the newest


class Told:
    """Of one process. `lock` is held from `note` until the record is handed over, so that numbers go out in order."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._lasting: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._last: dict[str, dict[str, Any]] = {}  # by kind
        self._number = 0

    def note(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record as it is to be sent."""
        if record["kind"] in _LASTING:
            self._number += 1
            record = {**record, "told": self._number}
            self._lasting.append(record)
        if record["kind"] in ("REPORT", "FINISHED"):
            self._last[record["kind"]] = record
        return record

    def again(self, number: int) -> list[dict[str, Any]]:
        """What a controller must hear that has heard of this process's lasting records up to `number`."""
        return [*(record for record in self._lasting if record["told"] > number), *self._last.values()]
