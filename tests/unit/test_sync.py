"""Which code is the same on all hosts, what sync sends, and what unpacking may replace."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from migration import sync, unpack, versions
from migration.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git isn't installed")


# the code's digest


def hello(host: str, code: str = "a" * 64, root: str = "/code") -> dict[str, object]:
    return {"host": host, "root": root, "versions": {"code": code}}


def test_hosts_with_other_code_are_named() -> None:
    same = [hello("b0"), hello("b0"), hello("b1"), hello("b1")]
    assert versions.describe_other_code(same) is None
    said = versions.describe_other_code([*same, hello("b2", "b" * 64, "/old"), hello("b2", "b" * 64, "/old"),
                                         hello("b3", "c" * 64)])
    assert said is not None and "\n" not in said
    assert said.startswith("host b2 (world ranks 4, 5; code bbbbbbbbbbbb in /old), host b3 (world rank 6; code "
                           "cccccccccccc in /code) runs other code than host b0 (code aaaaaaaaaaaa in /code): ")


def test_the_first_host_may_be_the_odd_one() -> None:
    said = versions.describe_other_code([hello("b0", "b" * 64), hello("b1"), hello("b2")])
    assert said is not None and said.startswith("host b0 (world rank 0; ") and "than host b1" in said


@pytest.mark.parametrize("name", ["harness.py", "migration/plan.py", "nccl_bindings/types.py",
                                  "third_party/nccl/adopt.c", "third_party/pytorch/nccl_group.py"])
def test_every_source_counts(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "__pycache__"))
    assert unpack.digest_in(copy) == versions.code_digest()
    with (copy / name).open("a") as file:
        file.write("\n")
    assert unpack.digest_in(copy) != versions.code_digest()


# what is sent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "a.py").write_text("committed\n")
    (root / ".gitignore").write_text("*.log\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", str(root), *arguments], check=True, timeout=60)
    return root


def contents(archive: Path) -> dict[str, str]:
    root = archive.with_suffix("")
    unpack.extract(archive, root)
    return {path.name: path.read_text() for path in root.iterdir()}


@needs_git
def test_the_commit_is_sent(checkout: Path, tmp_path: Path) -> None:
    (checkout / "some.log").write_text("ignored")
    assert sync.pack(checkout, tmp_path / "x.tar", dirty=False).startswith("commit ")
    assert contents(tmp_path / "x.tar") == {"a.py": "committed\n", ".gitignore": "*.log\n"}


@needs_git
def test_a_changed_tree_is_refused_by_name_unless_it_is_wanted(checkout: Path, tmp_path: Path) -> None:
    (checkout / "a.py").write_text("changed\n")
    (checkout / "new.py").write_text("new\n")
    (checkout / "some.log").write_text("ignored")
    with pytest.raises(UserError, match="not committed: a.py, new.py; commit, or say --dirty"):
        sync.pack(checkout, tmp_path / "x.tar", dirty=False)
    assert "with 2 changed files" in sync.pack(checkout, tmp_path / "x.tar", dirty=True)
    assert contents(tmp_path / "x.tar") == {"a.py": "changed\n", "new.py": "new\n", ".gitignore": "*.log\n"}


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no git checkout"):
        sync.pack(tmp_path, tmp_path / "x.tar", dirty=False)


# to the nodes


@needs_git
def test_a_slash_at_the_end_of_the_folder(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """In an allocation the archive lies beside the folder, never in it. Programs in the place of Slurm's."""
    programs = {"scontrol": "echo n1", "sbcast": 'cp "$2" "$3"',
                "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    (checkout / "migration").mkdir()
    (checkout / "migration" / "versions.py").write_text("print('digest')")
    monkeypatch.setattr(sync, "CODE_ROOT", checkout)
    assert sync.sync(["--to", f"{tmp_path}/to/code/", "--dirty"]) == 0, capsys.readouterr().out
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["code"]
    assert (tmp_path / "to" / "code" / "a.py").exists()


def test_hosts_without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unpacked here either."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "bin").mkdir()
    if git := shutil.which("git"):
        (tmp_path / "bin" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="^--hosts h1: outside a Slurm allocation .* over ssh, which isn't installed"):
        sync.sync(["--to", str(tmp_path / "code"), "--hosts", "h1", "--dirty"])
    assert not (tmp_path / "code").exists()


# what is unpacked


class Node:
    """A node's folder, and archives of a package whose digest is its text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "to" / "code"
        self._scratch = folder

    def put(self, text: str, identity: str, claimed: str | None = None) -> dict[str, str]:
        source = self._scratch / "migration"
        source.mkdir(exist_ok=True)
        (source / "versions.py").write_text(f"print({text!r})")
        archive = self._scratch / "x.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(source, arcname="migration")
        # as a node runs it: the file's text, without the package
        done = subprocess.run([sys.executable, "-c", Path(unpack.__file__).read_text(), str(archive), str(self.folder),
                               identity, claimed or text], capture_output=True, text=True, cwd="/", timeout=60)
        found = json.loads(done.stdout)
        assert done.returncode == int(found["digest"] != (claimed or text)), done.stderr
        return found

    def names(self) -> set[str]:
        return {entry.name for entry in self.folder.iterdir()}


def test_unpacked_then_there_then_replaced(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.put("one", "1")["done"] == "unpacked"
    (node.folder / "runs").mkdir()
    assert node.put("one", "1")["done"] == "was there"
    assert node.put("one", "2")["done"] == "replaced", "another file than code has changed"
    assert node.put("two", "3") == {"machine": os.uname().nodename, "done": "replaced", "digest": "two", "problem": ""}
    assert node.names() == {"migration", "runs", unpack.MARKER}
    assert [entry.name for entry in node.folder.parent.iterdir()] == ["code"], "something was left beside the folder"


def test_code_that_was_changed_there_is_replaced(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.put("one", "1")
    (node.folder / "migration" / "versions.py").write_text("print('tampered')")
    assert node.put("one", "1")["done"] == "replaced"


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.folder.mkdir(parents=True)
    (node.folder / "thesis.tex").touch()
    assert "sync didn't put there" in node.put("one", "1")["problem"]
    assert node.names() == {"thesis.tex"}


def test_other_code_than_was_sent_is_found(tmp_path: Path) -> None:
    assert Node(tmp_path).put("one", "1", claimed="another")["digest"] == "one"
