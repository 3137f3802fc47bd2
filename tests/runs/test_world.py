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
sizes = [0, 10, _MESSAGE_BYTES - 100, _MESSAGE_BYTES, 5 * _MESSAGE_BYTES + 7, 1, 3 * _MESSAGE_BYTES, 2]
sent = [{"kind": "X", "number": i, "text": "é" * (size // 6)} for i, size in enumerate(sizes)]
came = []
def on_record(record):
    came.append(record)
    if world.rank == 1:
        world.send(0, record)
ends_s = time.monotonic() + 60
def on_tick(now_s):
    if world.rank == 0 and len(came) == len(sent):
        print("equal" if came == sent else "different", flush=True)
        os._exit(0)
    if now_s > ends_s:
        print(f"rank {world.rank} has {len(came)}", flush=True)
        os._exit(1)
world.go(on_record, on_tick)
if world.rank == 0:
    for record in sent:
        world.send(1, record)
time.sleep(90)
"""

ALONE = """
import os, sys, time
from migration.world import World
if os.environ["PMI_RANK"] == "1":
    time.sleep(60)
try:
    World().start(lambda rank, size: {}, timeout_s=1.0)
except TimeoutError as error:
    print(error, flush=True)
    os._exit(1)  # at which hydra ends the other one
"""


def run_in_two(program: str) -> str:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    done = subprocess.run([mpiexec, "-n", "2", sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return done.stdout


def test_records_of_any_length() -> None:
    assert run_in_two(ECHO).splitlines()[0] == "equal"


def test_a_process_that_never_comes() -> None:
    said = run_in_two(ALONE)
    assert "MPI did not come up on" in said and "in 1 s" in said, said
