"""What the members of a generation tell each other of the groups that training uses, over a real store."""
from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from migration import usage
from migration.errors import DeadlineExpired
from migration.sums import NOT_PROBED, Sums, are_same

WAIT_S = 20.0


def test_all_learn_what_any_of_them_knows() -> None:
    store = dist.HashStore()
    threading.Timer(0.1, usage.tell, (store, 2, frozenset({"7", "0"}))).start()
    usage.tell(store, 0, frozenset({"0", "41"}))
    usage.tell(store, 1, None)
    assert usage.ask(store, range(3), WAIT_S) == {"0", "7", "41"}


def test_nobody_knows_and_nothing_is_used_are_two_things() -> None:
    store = dist.HashStore()
    usage.tell(store, 0, None)
    usage.tell(store, 1, None)
    assert usage.ask(store, range(2), WAIT_S) is None
    usage.tell(store, 1, frozenset())
    assert usage.ask(store, range(2), WAIT_S) == frozenset()


def test_who_has_not_told_is_named() -> None:
    store = dist.HashStore()
    usage.tell(store, 0, None)
    with pytest.raises(DeadlineExpired, match=r"waited 0\.2 s in vain for used/1"):
        usage.ask(store, range(2), 0.2)


@pytest.mark.parametrize("old, new, expected", [
    ("a b", "a b", True), ("a b", "a c", False), ("a -", "a c", None), ("a c", "a -", None), ("- b", "- b", True),
    ("- b", "a c", False), ("", "", True), (None, "", True), (None, "a fault", False), ("a", "a b", False)])
def test_what_was_probed_one_time_only_can_not_be_compared(old: str | None, new: str | None,
                                                           expected: bool | None) -> None:
    assert NOT_PROBED == "-"
    assert are_same(old, new) is expected


def test_sums_of_which_a_slot_knows_nothing_yet_are_not_known() -> None:
    sums = Sums()
    for slot, digest in enumerate(("fake digest", "")):
        sums.note(slot, digest)
        sums.begin(slot, "fake digest")
    assert sums.take_next() is None
    for slot in range(2):
        sums.begin(slot, "fake digest")
    assert sums.take_next() == []
