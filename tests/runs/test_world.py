"""World between two processes: records of any length arrive whole and in order; who waits for nobody says so."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Rank 0 sends records around the length of a message and far above it; rank 1 sends each one back.
ECHO = """
import os, sys, time
from migration.world import _MESSAGE_BYTES, World
world = World()
world.start(lambda rank, size: {})
named = [line for line in open("/proc/self/maps") if "/dev/shm/mpich_" in line and "(deleted)" not in line]
sizes = [0, 10, _MESSAGE_BYTES - 100, _MESSAGE_BYTES, 5 * _MESSAGE_BYTES + 7, 1, 3 * _MESSAGE_BYTES, 2]
sent = [{"kind": "X", "number": i, "text": "\u00e9" * (size // 6)} for i, size in enumerate(sizes)]
came = []
def on_record(record):
    came.append(record)
    if world.rank == 1:
        world.send(0, record)
ends_s = time.monotonic() + 60
def on_tick(now_s):
    if world.rank == 0 and len(came) == len(sent):
        say("equal" if came == sent and not named and world._bell.is_heard else
            f"different, or left in /dev/shm: {named}, or no bell is heard")
    if now_s > ends_s:
        say(f"rank {world.rank} has {len(came)}")
    leave_if_said()
world.urgent = True  # from the start, so that whoever is sent something is rung
world.go(on_record, on_tick)
if world.rank == 0:
    for record in sent:
        world.send(1, record)
time.sleep(90)
"""

ALONE = """
import os, sys, time
from migration.world import World
while os.environ["PMI_RANK"] == "1":
    leave_if_said()
    time.sleep(0.01)
try:
    World().start(lambda rank, size: {}, timeout_s=1.0)
except TimeoutError as error:
    say(str(error))
    leave_if_said()
"""

# hydra may wait for the one process when the other has ended, so both look for the file
COMMON = """
import os, sys
def say(text):
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(text)
    os.replace(sys.argv[1] + ".new", sys.argv[1])
def leave_if_said():
    if os.path.exists(sys.argv[1]):
        os._exit(0)
"""


def said_by_two(program: str, folder: Path) -> str:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    done = subprocess.run([mpiexec, "-n", "2", sys.executable, "-c", COMMON + program, str(folder / "said")], cwd=ROOT,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (folder / "said").exists(), done.stderr
    return (folder / "said").read_text()


def test_records_of_any_length(tmp_path: Path) -> None:
    assert said_by_two(ECHO, tmp_path) == "equal"


def test_a_process_that_never_comes(tmp_path: Path) -> None:
    said = said_by_two(ALONE, tmp_path)
    assert "MPI did not come up on" in said and "in 1 s" in said, said
