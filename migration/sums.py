"""Whether sums keep their bits from one generation to the next, by the probes of each slot's communicators. Pure.

A communicator's probe is an adversarial reduction (communicators/base.py): its digest changes where terms are added in
another order. A move compares the old and the new ones itself (move.py). A recovery has no old ones to compare with
any more, so that the controller keeps a digest of each slot's: of those that training uses, as its first iteration
shows.
"""
from __future__ import annotations


NOT_PROBED = "-"  # in the place of a communicator's digest


def are_same(old: str | None, new: str | None) -> bool | None:
    """Whether a slot's old and new communicators give the same digests; both are in one order, between spaces.

    None: as far as it can be told, but some were probed only before or only after. What training doesn't use is probed
    neither time, and doesn't matter.
    """
    olds, news = (old or "").split(), (new or "").split()
    if len(olds) != len(news):
        return False
    pairs = [pair for pair in zip(olds, news, strict=True) if pair[0] != pair[1]]
    if any(NOT_PROBED not in pair for pair in pairs):
        return False
    return None if pairs else True


class Sums:
    """By slot, whoever holds it: the digest of all its communicators (`Groups.sums_digest`), empty if not known yet."""

    def __init__(self) -> None:
        self._now: dict[int, str] = {}
        self._next: dict[int, str] = {}  # of the generation that all slots are beginning together

    def note(self, slot: int, digest: str) -> None:
        """After a move: of the generation that the job trains in."""
        self._now[slot] = digest

    def begin(self, slot: int, digest: str) -> None:
        """The slot has begun the next generation; one that doesn't come about is followed by another."""
        self._next[slot] = digest

    def take_next(self) -> list[int] | None:
        """All slots have begun it. Returns those whose sums have other bits than before; None: that isn't known."""
        before, self._now, self._next = self._now, self._next, {}
        if before.keys() != self._now.keys() or "" in (*before.values(), *self._now.values()):
            return None
        return sorted(slot for slot in before if before[slot] != self._now[slot])

    @property
    def are_known(self) -> bool:
        """Of every slot that has said anything."""
        return "" not in self._now.values()

    # ---- for another controller

    def to_json(self) -> list[tuple[int, str]]:
        return list(self._now.items())

    def load_json(self, value: list[tuple[int, str]]) -> None:
        self._now = {slot: digest for slot, digest in value}
