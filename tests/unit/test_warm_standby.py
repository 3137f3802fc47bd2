"""A spare runs every pipeline role before any move is asked for, gives way to one, and survives what fails."""
from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_jobs import CountingSource, shared_groups, tiny_config

from migration import warmup
from migration.data import Samples
from migration.options import Options
from migration.topology import pipeline_role, slots_of_roles

PIPELINE = {"pp": 3, "num_layers": 3, "dp": 2}


class Spare:
    """What warm_standby asks of a Member: a process without a slot, told that the job trains."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(run="nowhere", **options)
        self.groups, self.timeline = shared_groups(), self
        self.is_training, self.is_recovering, self.part, self.generation = True, False, None, 0
        self.warm_roles: set[str] = set()
        self.events: list[tuple[str, str]] = []
        self.slots: list[int] = []

    def wait_for(self, condition: Any) -> Any:
        assert condition(), "would wait for ever"

    def add_event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    @contextmanager
    def span(self, name: str, _phase: str, *, slot: int, **_: Any) -> Any:
        assert name == "standby"
        self.slots.append(slot)
        self.on_role(slot)
        yield SimpleNamespace(bytes=0)

    def on_role(self, slot: int) -> None:
        """A role is about to be run."""


def warm(spare: Spare, source: Any = None) -> None:
    config = tiny_config(**PIPELINE)
    samples = Samples(CountingSource(1000, config.vocab_size), config.seq_length, config.seed)
    warmup.warm_standby(spare, config, source or samples)
    assert not spare.groups.handles, "no slot's handles may stay open"


def test_every_role_once() -> None:
    spare = Spare(standby="warm")
    warm(spare)
    assert spare.warm_roles == {"first", "middle", "last"} and spare.slots == [0, 2, 4] and not spare.events
    warm(spare)
    assert spare.slots == [0, 2, 4], "again, though all roles are warm"
    spare.warm_roles.remove("middle")
    warm(spare)
    assert spare.slots == [0, 2, 4, 2]


@pytest.mark.parametrize("options", [{"standby": "cold"}, {"standby": "auto"}, {"standby": "warm", "warm_up": "off"}])
def test_not_wanted(options: dict[str, str]) -> None:
    spare = Spare(**options)
    warm(spare)
    assert not spare.warm_roles and not spare.slots


def test_a_move_interrupts_it() -> None:
    spare = Spare(standby="warm")
    spare.on_role = lambda slot: setattr(spare, "part", object() if slot else None)  # while the second is being built
    warm(spare)
    assert spare.warm_roles == {"first"} and spare.slots == [0, 2] and not spare.events


def test_what_fails_is_logged_and_leaves_the_role_cold() -> None:
    class Broken:
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError(f"no sample {index} here")

    spare = Spare(standby="warm")
    warm(spare, Broken())
    assert not spare.warm_roles and spare.slots == [0, 2, 4]
    errors = [text for kind, text in spare.events if kind == "error"]
    assert [text.split(":")[0] for text in errors] == [f"standby, role {r}" for r in ("first", "middle", "last")]
    assert all("RuntimeError: no sample" in text for text in errors), errors
    assert sum(kind == "traceback" for kind, _ in spare.events) == 3


def test_roles_of_a_pipeline() -> None:
    config = tiny_config(**PIPELINE)
    assert slots_of_roles(config) == {"first": 0, "middle": 2, "last": 4}
    assert [pipeline_role(config, slot) for slot in range(6)] == ["first"] * 2 + ["middle"] * 2 + ["last"] * 2
    assert slots_of_roles(tiny_config(dp=2)) == {"only": 0}
    assert slots_of_roles(tiny_config(pp=2, dp=2)) == {"first": 0, "last": 2}
