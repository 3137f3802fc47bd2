"""What only shows when somebody else's mpirun starts the processes: other code on a host, and what is told once."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "harness.py"
JOB = ("--hosts", "b0,b1,b2,b3", "--set", "iterations=4")


def mpirun(*parts: tuple[int, Path, tuple[str, ...]]) -> subprocess.CompletedProcess[str]:
    """parts: so many processes of a program with arguments."""
    command = [str(Path(sys.executable).with_name("mpirun"))]
    for number, program, arguments in parts:
        command += [*([":"] if len(command) > 1 else []), "-n", str(number), sys.executable, str(program), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LM_")}
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
                          env=environment)


def test_hosts_with_other_code_are_named(tmp_path: Path) -> None:
    """One host's copy differs by a comment. The run folder isn't used up by a run that never began."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "__pycache__"))
    job = (*JOB, "--run", str(tmp_path / "run"))
    with (copy / "migration" / "part.py").open("a") as file:
        file.write("# changed\n")
    done = mpirun((4, HARNESS, job), (2, copy / "harness.py", job), (2, HARNESS, job))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    for words in ("host b2 (world ranks 4, 5;", str(copy), f"other code than host b0 (code ", str(ROOT), "sync --to"):
        assert words in line, line
    assert not (tmp_path / "run" / "log").exists()


def test_profiles_and_help_are_shown_once() -> None:
    done = mpirun((3, HARNESS, ("--list-profiles",)))
    assert done.returncode == 0 and done.stdout.count("20B_TP4_PP2") == 1 and not done.stderr
    done = mpirun((3, HARNESS, ("--help",)))
    assert done.returncode == 0 and done.stdout.count("usage:") == 1


def test_a_wrong_argument_is_told_once() -> None:
    for arguments, word in ((("--omit-state", "typo"), "rng_trackers"), (("bogus",), "status")):
        done = mpirun((3, HARNESS, arguments))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and word in done.stderr, done.stderr


def test_np_in_the_shell_of_a_batch_job(tmp_path: Path) -> None:
    """Slurm gives that shell a rank too; --np starts a run all the same."""
    done = subprocess.run([sys.executable, str(HARNESS), "--np", "4", *JOB, "--run", str(tmp_path / "run")], text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
                          env={**os.environ, "SLURM_PROCID": "0"})
    assert done.returncode == 2 and "needs 6 processes" in done.stderr, done.stderr
