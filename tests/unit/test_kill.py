"""`harness.py kill` ends what it can find, whatever it can't: a file that a crash left empty, a Slurm that hangs."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_footprint import SLEEPER, WRITER, Sleepers, run, sleepers  # noqa: F401  (two are fixtures)

from migration import kill
from migration.footprint import FOLDER, find_processes, read_footprints, write_footprint


def footprint_elsewhere(run: Path) -> None:
    """Of world rank 5, by Slurm's job 4 on another machine."""
    write_footprint(str(run), 5, "b2")
    path = run / FOLDER / "w0005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere", "node": "elsewhere", "job": "4",
                                                               "pid": 1 << 30}))


@pytest.mark.parametrize("text", ["", '{"world_rank": 1', "[]", '{"world_rank": 1}'])
def test_a_file_that_cannot_be_read_is_told_and_the_others_end(
        sleepers: Sleepers, run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    sleepers.start("-c", WRITER, str(run))
    (run / FOLDER / "w0001.json").write_text(text)
    assert [footprint.world_rank for footprint in read_footprints(str(run))] == [3]
    assert kill.kill(["--run", str(run)]) == 1, "nobody knows where world rank 1 was"
    assert not find_processes(str(run))
    said = capsys.readouterr().out
    assert "1 processes on 1 hosts ended, these are left:\n" in said, said
    assert said.count("\n") == 3 and f"{run / FOLDER / 'w0001.json'} can't be read (" in said.splitlines()[-1], said


def test_a_run_of_which_nothing_else_is_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / FOLDER).mkdir()
    (run / FOLDER / "w0001.json").touch()
    assert kill.kill(["--run", str(run)]) == 1
    assert "w0001.json can't be read" in capsys.readouterr().out


@pytest.mark.parametrize("program, reason", [
    (f"{sys.executable}\nimport time; time.sleep(60)", "no answer in 0 s"),
    ("/nowhere/python\n", "No such file or directory")], ids=["hangs", "can't be run"])
def test_a_slurm_that_does_not_answer(sleepers: Sleepers, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str], program: str, reason: str) -> None:
    sleepers.start("-c", SLEEPER, env={"LM_RUN": str(run)})
    footprint_elsewhere(run)
    for name in ("squeue", "srun"):
        (tmp_path / name).write_text(f"#!{program}")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kill, "_REMOTE_S", 0.2)
    assert kill.kill(["--run", str(run)]) == 1
    assert not find_processes(str(run))
    said = capsys.readouterr().out
    assert "1 others of the run" in said and f"elsewhere can't be reached (srun: {reason})" in said, said


def test_what_is_here_ends_if_the_others_are_not_waited_for(
        sleepers: Sleepers, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> kill.Outcome:
        raise KeyboardInterrupt

    sleepers.start("-c", SLEEPER, env={"LM_RUN": str(run)})
    monkeypatch.setattr(kill, "_end_elsewhere", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kill.kill(["--run", str(run)])
    assert not find_processes(str(run))
