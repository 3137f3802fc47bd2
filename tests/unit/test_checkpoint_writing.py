"""Who may finish a checkpoint, and what a process does to the others that hung over it and wakes up much later."""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from migration import checkpoint_writing
from migration.checkpoint_files import find_start, list_complete
from migration.checkpoint_writing import begin, finish, give_up_unfinished, unfinished_path
from migration.config import Config

CONFIG = Config(profile="test", iterations=100)
FILE = "__0_0.distcp"
STEPS = ("_write", "_sync_folder", "_put_in_place", "_set_aside", "_point_latest_to", "list_complete", "children")


def write(root: Path, iteration: int, num_recoveries: int, data: bytes) -> Path:
    path = unfinished_path(str(root), iteration, "run", num_recoveries)
    begin(path)
    (path / FILE).write_bytes(data)
    return path


def complete(path: Path) -> Path:
    iteration = int(path.name[len("iteration"):].partition(".")[0])
    return finish(path, iteration=iteration, config=CONFIG, data="", versions={}, keep=2)


def at_step(monkeypatch: pytest.MonkeyPatch, wanted: int, act: Callable[[], None]) -> list[str]:
    """Before call number `wanted` to anything that `finish` does, `act` happens. Returns the calls, as they come."""
    calls: list[str] = []
    is_acting = False

    def watched(module: Any, name: str) -> Callable[..., Any]:
        real = getattr(module, name)

        def call(*args: Any, **fields: Any) -> Any:
            nonlocal is_acting
            if not is_acting:
                calls.append(name)
                if len(calls) - 1 == wanted:
                    is_acting = True
                    act()
                    is_acting = False
            return real(*args, **fields)

        return call

    for module, names in ((checkpoint_writing, STEPS), (os, ("replace",)), (shutil, ("rmtree",))):
        for name in names:
            monkeypatch.setattr(module, name, watched(module, name))
    return calls


def hang_and_wake_up(monkeypatch: pytest.MonkeyPatch, root: Path, wanted: int, *, came_as_far: bool) -> list[str]:
    """A process hangs at that call of `finish`; the job goes on without it, and saves; it wakes up. Returns calls."""
    for iteration in (4, 8, *([12] if came_as_far else [])):
        complete(write(root, iteration, 0, b"before"))
    hung = write(root, 12, 0, b"of the hung one")
    shutil.copy(hung / FILE, hung / "another")
    living: list[Path] = []

    def go_on() -> None:
        give_up_unfinished(str(root))
        complete(write(root, 12, 1, b"of the living"))
        living.append(write(root, 16, 1, b"of the liv"))

    with monkeypatch.context() as patch:
        calls = at_step(patch, wanted, go_on)
        try:
            complete(hung)
        except FileNotFoundError:
            pass
    if not living:
        return calls
    twelve = find_start("", str(root), CONFIG)
    assert twelve.iteration == 12 and (Path(twelve.folder) / FILE).read_bytes() == b"of the living", calls
    assert not (Path(twelve.folder) / "another").exists()
    assert (root / "latest").resolve() == Path(twelve.folder)
    assert (living[0] / FILE).read_bytes() == b"of the liv"
    assert sorted(iteration for iteration, _ in list_complete(root)) == [8, 12]
    complete(living[0])
    assert find_start("", str(root), CONFIG).iteration == 16
    assert sorted(path.name for path in root.iterdir()) == ["iteration00000012", "iteration00000016", "latest"]
    return calls


@pytest.mark.parametrize("came_as_far", [False, True])
def test_a_hung_process_that_wakes_up_anywhere_hurts_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                            came_as_far: bool) -> None:
    """`came_as_far`: there is a checkpoint of that iteration already, which it replaces."""
    calls = hang_and_wake_up(monkeypatch, tmp_path / "all", -1, came_as_far=came_as_far)
    assert len(calls) > 8 and {"_write", "replace", "rmtree"} <= set(calls)
    for number in range(len(calls)):
        hang_and_wake_up(monkeypatch, tmp_path / str(number), number, came_as_far=came_as_far)


def test_an_older_one_that_comes_late_is_not_the_latest(tmp_path: Path) -> None:
    complete(write(tmp_path, 8, 0, b"x"))
    complete(write(tmp_path, 4, 0, b"x"))
    assert (tmp_path / "latest").resolve().name == "iteration00000008"


def test_each_writer_has_a_folder_of_its_own(tmp_path: Path) -> None:
    paths = {unfinished_path(str(tmp_path), 4, run, number) for run in ("a", "b") for number in (0, 1)}
    assert len(paths) == 4 and all(path.name.startswith("iteration00000004.") for path in paths)


def test_what_was_given_up_is_removed_with_the_next_one(tmp_path: Path) -> None:
    hung = write(tmp_path, 4, 0, b"half")
    give_up_unfinished(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        complete(hung)
    assert find_start("", str(tmp_path), CONFIG).folder == ""
    give_up_unfinished(str(tmp_path))  # once more
    complete(write(tmp_path, 8, 1, b"whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration00000008", "latest"]
    give_up_unfinished(str(tmp_path / "not there yet"))


def test_two_are_given_up_under_one_name(tmp_path: Path) -> None:
    """The run folder was removed and used again, so its second life writes under the names of its first."""
    for _ in range(3):
        write(tmp_path, 4, 0, b"half")
        give_up_unfinished(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3 and find_start("", str(tmp_path), CONFIG).folder == ""
    complete(write(tmp_path, 8, 0, b"whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration00000008", "latest"]
