"""Which processes belong to a run: by what they wrote, by LM_RUN, by their arguments; and which ones never do."""
from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from migration.arguments import EXAMPLES
from migration.commands import COMMANDS
from migration.footprint import BESIDE, FOLDER, find_processes, is_alive, read_footprints, write_footprint

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"
WRITER = ("import sys; from migration.footprint import write_footprint; write_footprint(sys.argv[1], 3, 'b1'); "
          + SLEEPER)
ROOT = Path(__file__).resolve().parents[2]


class Sleepers:
    """Processes that live until the test ends."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> int:
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})})
        self.started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process.pid

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers()
    yield made
    made.close()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A harness.py that does nothing."""
    path = tmp_path / "code" / "harness.py"
    path.parent.mkdir()
    path.write_text(SLEEPER)
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def found(run: Path) -> set[int]:
    return set(find_processes(str(run)))


def test_by_its_file(sleepers: Sleepers, run: Path) -> None:
    pid = sleepers.start("-c", WRITER, str(run))
    ((got, process),) = find_processes(str(run)).items()
    assert got == pid and process.footprint == read_footprints(str(run))[0]
    assert (process.footprint.world_rank, process.footprint.host) == (3, "b1") and is_alive(process)
    sleepers.close()
    assert found(run) == set() and not is_alive(process)


@pytest.mark.parametrize("change", [{"start_ticks": 17}, {"boot_id": "another start of the machine"},
                                    {"machine": "elsewhere"}], ids=lambda change: next(iter(change)))
def test_another_process_with_its_pid_is_left_alone(sleepers: Sleepers, run: Path, change: dict[str, object]) -> None:
    pid = sleepers.start("-c", WRITER, str(run))
    (footprint,) = read_footprints(str(run))
    process = find_processes(str(run))[pid]
    changed = dataclasses.replace(footprint, **change)
    (run / FOLDER / "w0003.json").write_text(json.dumps(dataclasses.asdict(changed)))
    assert found(run) == set()
    assert is_alive(process) and not is_alive(dataclasses.replace(process, start_ticks=17))


def test_by_its_environment(sleepers: Sleepers, run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    pids = {sleepers.start("-c", SLEEPER, env={"LM_RUN": name}) for name in (str(run), str(tmp_path / "link"))}
    for other in (tmp_path, tmp_path / "run2"):
        sleepers.start("-c", SLEEPER, env={"LM_RUN": str(other)})
    assert found(run) == pids


def test_by_its_arguments(sleepers: Sleepers, run: Path, program: str, tmp_path: Path) -> None:
    pids = {sleepers.start(program, "--run", str(run)), sleepers.start(program, f"--run={run}", "--lead", "1"),
            sleepers.start(program, "check", "--run", str(run)), sleepers.start(program, "--run", "run", cwd=tmp_path)}
    sleepers.start(program, "--run", str(tmp_path))
    sleepers.start(program, "--run", "run")  # of another folder
    sleepers.start("-c", SLEEPER, "--run", str(run))  # some other program
    assert found(run) == pids


@pytest.mark.parametrize("command", BESIDE)
def test_commands_beside_a_run_are_no_part_of_it(sleepers: Sleepers, run: Path, program: str, command: str) -> None:
    sleepers.start(program, command, "--run", str(run))
    sleepers.start(program, command, "--run", str(run), env={"LM_RUN": str(run)})
    assert found(run) == set()


def test_every_command_is_beside_a_run_or_a_run() -> None:
    assert set(BESIDE) | {"check"} == set(COMMANDS)
    assert all(f"harness.py {name} " in EXAMPLES for name in COMMANDS)


def test_who_asks_is_never_found(run: Path) -> None:
    write_footprint(str(run), 0, "b0")
    assert found(run) == set()


def test_what_started_it_goes_along_as_far_as_it_is_a_launcher(sleepers: Sleepers, run: Path, program: str) -> None:
    """`harness.py --np` that chose its own run folder: nothing but its child says which run it is."""
    child = [sys.executable, "-c", WRITER, str(run)]
    Path(program).write_text(f"import subprocess; subprocess.run({child!r})")
    launcher = sleepers.start(program, "--np", "1")
    named = find_processes(str(run))
    assert launcher in named and named[launcher].footprint is None
    assert [f.footprint.world_rank for f in named.values() if f.footprint is not None] == [3] and len(named) == 2
