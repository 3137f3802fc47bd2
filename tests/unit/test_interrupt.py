"""Ctrl-C to a command that starts launchers: the launcher has its time to end the job, then one line and code 130."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from migration.forkserver import ADDRESS_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
IN_ORDER = """
import sys, time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("ended in order", flush=True)
    sys.exit(130)
"""
NEVER = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
HARNESS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from pathlib import Path
from migration import launch
launch.CODE_ROOT, launch._CHILD_GRACE_S = Path(sys.argv[2]), float(sys.argv[3])
sys.argv = [sys.argv[1], *sys.argv[4:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupt(folder: Path, launcher: str, arguments: Sequence[str], grace_s: float = 30.0) -> tuple[int, str, str]:
    """The harness with `launcher` in the place of the program that it starts: exit code, output, errors."""
    (folder / "harness.py").write_text(launcher)
    command = [sys.executable, "-c", HARNESS, str(ROOT / "harness.py"), str(folder), str(grace_s), *arguments,
               "--run", str(folder / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), ADDRESS_VARIABLE: "/nowhere"}  # no fork server of its own
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        begun = ""
        while not begun.endswith("up\n") and (line := process.stdout.readline()):
            begun += line
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        out, err = process.communicate(timeout=60)
    return process.returncode, begun + out, err


@pytest.mark.parametrize("arguments", [("demo",), ("--experiment", "rebalance")], ids=lambda words: words[-1])
def test_the_launcher_ends_in_order(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = interrupt(tmp_path, IN_ORDER, arguments)
    assert (code, err) == (130, "harness: interrupted\n")
    assert out.endswith("up\nended in order\n"), out


def test_a_launcher_that_does_not_end_is_killed(tmp_path: Path) -> None:
    code, _, err = interrupt(tmp_path, NEVER, ("--experiment", "rebalance"), grace_s=0.5)
    assert (code, err) == (130, "harness: interrupted\n")
