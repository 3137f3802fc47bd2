"""The controller's clocks: who was heard when, and the deadline of the phase under way. Monotonic seconds."""
from __future__ import annotations

import time

HEARTBEAT_S = 0.5  # each process says so often that it lives
LOOK_AROUND_S = 1.8  # more than three heartbeats: silence for so long counts once another process is in trouble
STANDING_S = 10.0  # for a process to tell another controller where it stands; its control thread is never busy for long
FIRST_WORD_S = 120.0  # for a process to import and take its GPU: some nodes need a minute more than others
LONGEST_TICK_S = 0.1  # what a tick counts at most: while a process stands still it hears nobody


class Watch:
    """When each process was heard last, when all are to hear of the controller, and one deadline."""

    def __init__(self, world_size: int, *, beat_s: float, heartbeat_timeout_s: float,
                 first_word_s: float = 0.0) -> None:
        """`beat_s`: between two words of the controller. Seldom, for MPI ends a process that has a record on its way to
        one that dies just then. `first_word_s`: a process that hasn't said a word yet may be silent for so long."""
        self._beat_s, self._timeout_s, self._first_word_s = beat_s, heartbeat_timeout_s, first_word_s
        self._unheard = set(range(world_size))
        self._heard_s = dict.fromkeys(range(world_size), time.monotonic())
        self._beaten_s, self._looked_s = -beat_s, -HEARTBEAT_S
        self._deadline: tuple[float, str] | None = None

    def heard(self, world_rank: int) -> None:
        self._unheard.discard(world_rank)
        self._heard_s[world_rank] = time.monotonic()

    def heard_before(self, world_rank: int, when_s: float) -> None:
        """It was heard last by another process than this one, at `when_s`."""
        self._heard_s[world_rank] = when_s

    def heard_s(self, world_rank: int) -> float:
        """When it was heard last."""
        return self._heard_s[world_rank]

    def is_beat_due(self, now_s: float) -> bool:
        """True once every `beat_s`."""
        is_due = now_s - self._beaten_s >= self._beat_s
        self._beaten_s = now_s if is_due else self._beaten_s
        return is_due

    def is_look_due(self, now_s: float) -> bool:
        """True once every HEARTBEAT_S: time to see who is silent."""
        if now_s - self._looked_s < HEARTBEAT_S:
            return False
        if self._looked_s > 0 and now_s - self._looked_s > self._timeout_s / 2:
            # this process itself stood still (a debugger, a stopped machine): what it missed says nothing of others
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        return True

    def silent(self, now_s: float) -> list[tuple[int, float]]:
        """(world rank, seconds of silence) of those silent for too long."""
        return self.silent_for(now_s, self._timeout_s)

    def silent_for(self, now_s: float, seconds: float) -> list[tuple[int, float]]:
        """Those silent for more than `seconds`, likewise."""
        return [(rank, now_s - heard_s) for rank, heard_s in self._heard_s.items()
                if now_s - heard_s > (max(seconds, self._first_word_s) if rank in self._unheard else seconds)]

    # ---- the deadline

    @property
    def has_deadline(self) -> bool:
        return self._deadline is not None

    def set_deadline(self, seconds: float, what: str) -> None:
        self._deadline = (time.monotonic() + seconds, f"{what} took longer than {seconds:g} s")

    def clear_deadline(self) -> None:
        self._deadline = None

    def pop_expired(self, now_s: float) -> str | None:
        """What took too long, once, after the deadline."""
        if self._deadline is None or now_s <= self._deadline[0]:
            return None
        reason, self._deadline = self._deadline[1], None
        return reason
