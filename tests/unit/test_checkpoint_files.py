"""Which checkpoint a run goes on from, when a folder counts, and how many stay. No tensors: any file will do."""
from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from migration import checkpoint_files, checkpoint_writing
from migration.checkpoint_files import MANIFEST, Start, find_start, list_complete
from migration.config import Config
from migration.errors import UserError

CONFIG = Config(profile="test", iterations=100)
VERSIONS = {"torch": "1", "code": "a"}


def make(root: Path, iteration: int, *, keep: int = 9, config: Config = CONFIG) -> Path:
    path = checkpoint_writing.unfinished_path(str(root), iteration, "run", 0)
    checkpoint_writing.begin(path)
    (path / "__0_0.distcp").write_bytes(b"tensors" * iteration)
    return checkpoint_writing.finish(path, iteration=iteration, config=config, data="d1", versions=VERSIONS, keep=keep)


def start(root: Path, load: Path | str = "", config: Config = CONFIG) -> Start:
    return find_start(str(load), str(root), config, data="d1", versions=VERSIONS)


def test_nothing_there_is_the_beginning(tmp_path: Path) -> None:
    assert start(tmp_path / "not yet") == Start()
    assert start(tmp_path) == Start()
    assert find_start("", "", CONFIG) == Start()


def test_the_newest_one(tmp_path: Path) -> None:
    for iteration in (8, 9, 10):
        make(tmp_path, iteration)
    found = start(tmp_path)
    assert (found.iteration, Path(found.folder).name) == (10, "iteration00000010")
    assert found.notes == (f"goes on at iteration 10 from {found.folder}",)
    assert start(tmp_path / "other", load=tmp_path).iteration == 10
    assert start(tmp_path / "other", load=tmp_path / "iteration00000008").iteration == 8
    assert start(tmp_path / "other", load=tmp_path / "latest").iteration == 10


def test_unfinished_ones_are_passed_over_and_said(tmp_path: Path) -> None:
    make(tmp_path, 4)
    shutil.copytree(make(tmp_path, 8), tmp_path / "iteration00000012.unfinished")
    found = start(tmp_path)
    assert found.iteration == 8
    assert any("iteration00000012.unfinished" in note and "passed over" in note for note in found.notes)


@pytest.mark.parametrize("damage", ["missing", "truncated", "manifest missing", "manifest cut"])
def test_a_damaged_one_is_passed_over_unless_it_is_named(tmp_path: Path, damage: str) -> None:
    make(tmp_path, 4)
    newest = make(tmp_path, 8)
    name = MANIFEST if damage.startswith("manifest") else "__0_0.distcp"
    if damage.endswith("missing"):
        (newest / name).unlink()
    else:
        os.truncate(newest / name, 20)
    found = start(tmp_path)
    assert found.iteration == 4
    assert any(str(newest) in note and name in note for note in found.notes), found.notes
    with pytest.raises(UserError, match=name):
        start(tmp_path / "other", load=newest)


def test_only_damaged_ones_are_no_new_beginning(tmp_path: Path) -> None:
    os.truncate(make(tmp_path, 4) / "__0_0.distcp", 3)
    with pytest.raises(UserError, match="none of its 1 checkpoints is whole .*has 3 bytes, not 28"):
        start(tmp_path)


def test_of_another_job(tmp_path: Path) -> None:
    make(tmp_path, 4)
    with pytest.raises(UserError, match=r"another dp \(3, here 2\)"):
        start(tmp_path, config=dataclasses.replace(CONFIG, dp=2))
    with pytest.raises(UserError, match="seed"):
        start(tmp_path, config=dataclasses.replace(CONFIG, seed=1))
    longer = dataclasses.replace(CONFIG, profile="other name", iterations=200, data="elsewhere")
    assert start(tmp_path, config=longer).iteration == 4


def test_a_field_that_came_later_was_at_its_default(tmp_path: Path) -> None:
    path = make(tmp_path, 4) / MANIFEST
    value = json.loads(path.read_text())
    del value["config"]["dropout"]
    path.write_text(json.dumps(value))
    assert start(tmp_path).iteration == 4
    with pytest.raises(UserError, match="dropout"):
        start(tmp_path, config=dataclasses.replace(CONFIG, dropout=0.0))


def test_nothing_left_to_train(tmp_path: Path) -> None:
    make(tmp_path, CONFIG.iterations)
    with pytest.raises(UserError, match="iterations"):
        start(tmp_path)


def test_what_may_cost_equality_is_said(tmp_path: Path) -> None:
    make(tmp_path, 4)
    notes = find_start("", str(tmp_path), CONFIG, data="d2", versions={"torch": "2", "code": "b"}).notes
    assert any("torch 1, this run has 2" in note for note in notes)
    assert any("other data" in note for note in notes)
    assert not any("code" in note for note in notes)


def test_older_than_what_would_be_found_next_time(tmp_path: Path) -> None:
    """Else the next start would go on from the newer one, of a course that was given up."""
    make(tmp_path, 4)
    make(tmp_path, 8)
    with pytest.raises(UserError, match="newer than the one to load"):
        start(tmp_path, load=tmp_path / "iteration00000004")


@pytest.mark.parametrize("load", ["nowhere", "."])
def test_a_load_without_a_checkpoint(tmp_path: Path, load: str) -> None:
    with pytest.raises(UserError, match=r"--load .*(no such folder|no checkpoint)"):
        start(tmp_path / "other", load=tmp_path / load)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        make(tmp_path, iteration, keep=2)
    assert [iteration for iteration, _ in checkpoint_files.list_complete(tmp_path)] == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration00000003", "iteration00000004", "latest"]
    assert (tmp_path / "latest").resolve().name == "iteration00000004"


def test_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    make(tmp_path, 4)
    (tmp_path / "iteration00000004" / "old").touch()
    make(tmp_path, 4)
    assert not (tmp_path / "iteration00000004" / "old").exists()


@pytest.mark.parametrize("step", ["replace", "rmtree"])
def test_a_removal_cut_short_leaves_nothing_that_looks_complete(tmp_path: Path, step: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call is the last one of a killed process, the newest complete one is whole."""
    make(tmp_path, 1, keep=1)
    module = os if step == "replace" else shutil
    real = getattr(module, step)

    def die(*args: object, **kwargs: object) -> None:
        if "00000001" in str(args[0]):
            if step == "rmtree":
                (Path(str(args[0])) / "__0_0.distcp").unlink()
            raise KeyboardInterrupt
        real(*args, **kwargs)

    monkeypatch.setattr(module, step, die)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, 2, keep=1)
    found = start(tmp_path)
    assert found.iteration == 2 and not any("isn't whole" in note for note in found.notes)


@pytest.mark.parametrize(("keep", "left"), [(1, [33, 40]), (2, [20, 33, 40]), (9, [4, 20, 33, 40])])
def test_the_last_whole_ones_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    """A run that goes on from 20, since the newer one isn't whole, saves at 33."""
    for iteration in (4, 20, 40):
        make(tmp_path, iteration)
    (tmp_path / "iteration00000040" / "__0_0.distcp").write_bytes(b"cut")
    assert start(tmp_path).iteration == 20
    assert make(tmp_path, 33, keep=keep).is_dir()
    assert [iteration for iteration, _ in list_complete(tmp_path)] == left
    assert start(tmp_path).iteration == 33 and (tmp_path / "latest").resolve().name == "iteration00000033"


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    make(tmp_path, 10)
    at_its_end = dataclasses.replace(CONFIG, iterations=10)
    for config, words in ((at_its_end, "iterations to more than that$"), (CONFIG, "--save-at, or leave that out$")):
        with pytest.raises(UserError, match=f"saved at iteration 10, and this run ends at 10; .*{words}"):
            find_start("", str(tmp_path), config, ends_at=10)
    assert find_start("", str(tmp_path), CONFIG, ends_at=11).iteration == 10
