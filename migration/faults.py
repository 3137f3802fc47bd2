"""Faults for tests and experiments, addressed by (slot, phase, move) and counted. Never active unless asked for.

`KIND@SLOT:PHASE[#MOVE]` fires once in a process, at the joiner that takes SLOT, in PREPARING, READY or SWITCHING:
raise (an exception), kill (SIGKILL to itself), hang (never goes on), corrupt (wrong bits: of the probe, of the
acknowledged position, of the received state), cancel (asks the controller to cancel the move), slow (in PREPARING: it
multiplies matrices SLOWDOWN times slower). A kill or a hang also in LEAVING, at the leaver of SLOT when it has come to
the switchover, and in COMMITTED, at the joiner before it acknowledges. A kill also at the controller:
in VERDICT when its deputy has the verdict on a move of SLOT, and before anybody else has heard it, and in PARKING when
one member alone has been told to make room by parking or closing its old communicators.
"""
from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from migration.errors import MoveFailed, UserError

_KILL_AFTER_S = 0.5

KINDS = ("raise", "kill", "hang", "corrupt", "cancel", "slow")
SLOWDOWN = 100
PHASES = ("PREPARING", "READY", "SWITCHING", "LEAVING", "COMMITTED", "VERDICT", "PARKING")
AT_CONTROLLER = ("VERDICT", "PARKING")


class InjectedFault(MoveFailed):
    """Raised by a fault of kind `raise`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; `move` is None where any move will do."""

    kind: str
    slot: int
    phase: str
    move: int | None
    text: str


def parse_fault(text: str) -> Fault:
    """Raises UserError if `text` isn't KIND@SLOT:PHASE[#MOVE]."""
    match = re.fullmatch(r"(\w+)@(\d+):(\w+)(?:#(\d+))?", text)
    if not match or match[1] not in KINDS or match[3] not in PHASES:
        raise UserError(f"--fault {text}: write it as KIND@SLOT:PHASE[#MOVE], such as raise@2:PREPARING; kinds are "
                        f"{', '.join(KINDS)}, phases {', '.join(PHASES)}")
    if match[1] == "slow" and match[3] != "PREPARING":
        raise UserError(f"--fault {text}: a joiner's speed is measured in PREPARING only")
    if match[3] in AT_CONTROLLER and match[1] != "kill":
        raise UserError(f"--fault {text}: in {match[3]} there is kill only")
    if match[3] in ("LEAVING", "COMMITTED") and match[1] not in ("kill", "hang"):
        raise UserError(f"--fault {text}: in {match[3]} there are kill and hang only")
    return Fault(kind=match[1], slot=int(match[2]), phase=match[3], text=text,
                 move=None if match[4] is None else int(match[4]))


class Faults:
    """The faults of one process. `on_fired(fault)` must be heard elsewhere even if the process dies right after."""

    def __init__(self, texts: tuple[str, ...], on_fired: Callable[[Fault], None]) -> None:
        self._waiting = [parse_fault(text) for text in texts]
        self._on_fired = on_fired
        self._lock = threading.Lock()

    def take(self, phase: str, slot: int, move: int) -> Fault | None:
        """The fault that is due, for the caller to tell and to carry out."""
        with self._lock:
            due = next((fault for fault in self._waiting
                        if (fault.phase, fault.slot) == (phase, slot) and fault.move in (None, move)), None)
            if due is not None:
                self._waiting.remove(due)
            return due

    def forget(self, texts: Collection[str]) -> None:
        """These have fired, in another process."""
        with self._lock:
            self._waiting = [fault for fault in self._waiting if fault.text not in texts]

    def fire(self, phase: str, slot: int, move: int) -> str:
        """Called at a fault point. Returns the kind for the caller to act on: hang, corrupt, cancel, slow, or
        ''.

        Raises InjectedFault for `raise`; `kill` is a hang that ends soon.
        """
        due = self.take(phase, slot, move)
        if due is None:
            return ""
        self._on_fired(due)
        if due.kind == "raise":
            raise InjectedFault(f"fault {due.text}")
        if due.kind == "kill":
            # a little later and from a thread of its own, so that the control thread can send the fault's record
            threading.Timer(_KILL_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return "hang"
        return due.kind


def hang() -> None:
    """Never returns; the process can only be ended from outside."""
    while True:
        time.sleep(1.0)
