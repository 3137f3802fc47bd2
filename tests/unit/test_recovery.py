"""Who is lost, and where a run goes on: what a recovery decides before anything is built. Who takes a slot:
test_recovery_plan.py."""
from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_controller import ALL, ROSTER, OneController

from migration import checkpoint_writing
from migration.checkpoint_files import Start, find_restart
from migration.config import Config
from migration.footprint import FOLDER, write_footprint
from migration.neighbours import Neighbours
from migration.options import Options
from migration.protocol import Action, Phase
from migration.starting import Starting


# ---- from where


def save(root: Path, iteration: int) -> Path:
    folder = checkpoint_writing.unfinished_path(str(root), iteration, "run", 0)
    checkpoint_writing.begin(folder)
    (folder / "some.distcp").write_bytes(b"x" * 10)
    config = Config(profile="p")
    return checkpoint_writing.finish(folder, iteration=iteration, config=config, data="", versions={}, keep=9)


def test_goes_on_from_the_newest_whole_checkpoint_of_this_run(tmp_path: Path) -> None:
    begun = Start(folder="elsewhere", iteration=8)
    assert find_restart(begun, "").folder == find_restart(begun, str(tmp_path / "none")).folder == "elsewhere"
    save(tmp_path, 4)  # older than what the run began with
    assert find_restart(begun, str(tmp_path)) == begun
    twelve, sixteen = save(tmp_path, 12), save(tmp_path, 16)
    assert find_restart(begun, str(tmp_path)).folder == str(sixteen.resolve())
    # half written by the crash
    checkpoint_writing.begin(checkpoint_writing.unfinished_path(str(tmp_path), 20, "run", 0))
    found = find_restart(begun, str(tmp_path))
    assert found.iteration == 16 and "never finished" in found.notes[0]
    os.truncate(sixteen / "some.distcp", 3)
    found = find_restart(begun, str(tmp_path))
    assert (found.folder, found.iteration) == (str(twelve.resolve()), 12)
    for folder in tmp_path.glob("iteration*"):
        (folder / "some.distcp").unlink(missing_ok=True)
    found = find_restart(begun, str(tmp_path))
    assert (found.folder, found.iteration) == ("elsewhere", 8) and "whole" in found.notes[0]


def test_a_generation_that_begins_gives_up_what_the_last_one_left_unfinished(tmp_path: Path) -> None:
    """Else a process that hung in it could still give it its name (test_checkpoint_writing.py)."""
    hung = checkpoint_writing.unfinished_path(str(tmp_path), 4, "run", 0)
    checkpoint_writing.begin(hung)
    starting: Any = Starting.__new__(Starting)
    starting.options, starting._run_start = Options(run="run", checkpoints=str(tmp_path)), Start()
    assert starting._choose_start() == Start() and not hung.exists()


# ---- who is lost


@pytest.fixture
def sleeper(tmp_path: Path) -> Any:
    """A process of a run, world rank 1, beside this one, world rank 0."""
    program = (f"import sys, time; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
               f"from migration.footprint import write_footprint; write_footprint({str(tmp_path)!r}, 1, 'b0'); "
               "print('here', flush=True); time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    write_footprint(str(tmp_path), 0, "b0")
    yield process
    process.kill()
    process.wait()


def test_neighbours_see_who_died_and_not_who_hangs(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    neighbours = Neighbours(str(tmp_path), 0, ["machine", "machine", "another"])
    assert neighbours.gone() == []
    sleeper.send_signal(signal.SIGSTOP)
    assert neighbours.gone() == []
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has taken note: a zombie
    assert neighbours.gone() == [1]
    sleeper.wait()
    assert neighbours.gone() == [1]


def test_a_process_that_cannot_be_seen_from_here_is_nobodys_neighbour(tmp_path: Path,
                                                                      sleeper: subprocess.Popen) -> None:
    path = tmp_path / FOLDER / "w0001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_ticks": 1}))  # of other pids
    assert Neighbours(str(tmp_path), 0, ["machine", "machine"]).gone() == []
    assert Neighbours(str(tmp_path), 0, ["machine", "another"]).gone() == []


def fatal(controller: OneController, code: int = 1) -> None:
    number = len(controller._record.recoveries)
    controller._on_fatal({"from": 2, "recovery": number, "message": "no peer", "code": code})


@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_with_nobody_lost_ends_the_job(code: int) -> None:
    controller = OneController()
    fatal(controller, code)
    controller.wait(3.0, ALL)
    assert controller.done == [("no peer", code)]


def test_a_failure_with_a_silent_process_is_its_consequence() -> None:
    controller = OneController()
    fatal(controller)
    controller.wait(1.0, (0, 1, 2, 4, 5, 6, 7))
    assert controller.done == []
    controller.wait(2.0, (0, 1, 2, 4, 5, 6, 7))
    assert controller.done == [Action.SEND_RECOVER] and controller._tally.roster.holders == (0, 1, 4, 5)
    (recovery,) = controller._record.recoveries
    assert recovery["lost"] == [3] and controller.sent == [3], "if it hangs it must end"
    assert (recovery["slots"], recovery["to"]) == ([2, 3], [4, 5])


def test_just_a_slot_if_asked_to() -> None:
    controller = OneController(recover="slot")
    controller._suspect(3, "gone")
    controller.wait(1.0, ALL)
    assert controller.done == [Action.SEND_RECOVER] and controller._tally.roster.holders == (0, 1, 2, 4)


def test_a_failure_of_a_spare_costs_the_spare() -> None:
    """Such as one that doesn't come out of training on a host that is broken: its slot is another process's now."""
    controller = OneController()
    controller._tally.roster = dataclasses.replace(ROSTER, holders=(0, 1, 4, 3))
    fatal(controller)
    controller.wait(1.0, ALL)
    assert controller.done == []
    controller.wait(2.0, ALL)
    assert controller.done == [Action.NOTE_LOSS] and controller.sent == [2]
    assert controller._tally.roster.lost == {2} and controller._failure is None


def test_a_controller_whose_own_training_hangs_ends_the_job() -> None:
    """Told to end itself, it would leave everybody without a verdict."""
    controller = OneController()
    controller._suspect(0, "it isn't ready")
    assert controller.done == [("world rank 0 on a, the controller's: it isn't ready", 1)] and controller.sent == []


def test_a_controller_whose_own_training_hangs_leaves_the_job_to_its_deputy() -> None:
    controller = OneController()
    controller._gate.appoint(7)
    controller._suspect(0, "it isn't ready")
    (text,) = controller.done
    assert text.startswith("world rank 0 on a, the controller's: it isn't ready; the process ends")


def test_a_controller_that_stood_still_suspects_nobody() -> None:
    """A long tick counts for little: what others said meanwhile has not been read."""
    controller = OneController()
    fatal(controller)
    controller._look_around(controller._ticked_s + 60.0)
    assert controller.done == [] and not controller._suspects


def test_those_that_die_together_are_replaced_together() -> None:
    controller = OneController()
    controller._suspect(2, "gone", has_died=True)
    controller.wait(0.3, ALL)
    controller._suspect(3, "gone", has_died=True)
    controller._suspect(3, "gone again", has_died=True)
    controller.wait(0.6, ALL)
    assert controller.done == [Action.SEND_RECOVER] and controller._tally.roster.holders == (0, 1, 4, 5)
    assert controller.sent == [], "MPI may end who sends to one that has died"
    assert controller._record.recoveries[0]["hosts"] == ["b", "b"]


@pytest.mark.parametrize(("options", "has_begun", "why"), [({"recover": "off"}, True, ""),
                                                          ({}, False, "had not begun to train")])
def test_where_nothing_is_recovered(options: dict[str, str], has_begun: bool, why: str) -> None:
    controller = OneController(**options)
    controller._has_begun = has_begun
    controller._suspect(2, "gone")
    controller.wait(1.0, ALL)
    assert controller.done == [Action.FAIL_JOB] and controller._tally.phase is Phase.TRAINING
    assert "world rank 2 on b is lost: gone" in controller._tally.reason and why in controller._tally.reason


def test_a_failure_of_the_generation_before_counts_for_nothing() -> None:
    controller = OneController()
    controller._suspect(2, "gone")
    controller.wait(1.0, ALL)
    controller._on_fatal({"from": 1, "recovery": 0, "message": "no peer", "code": 1})
    assert controller._failure is None


def test_a_slots_failure_counts_more_than_a_spares() -> None:
    controller = OneController()
    for rank in (4, 1, 5, 2):  # the first and the third hold none
        controller._on_fatal({"from": rank, "recovery": 0, "message": f"of {rank}", "code": 1})
    assert controller._failure is not None and controller._failure.message == "of 1"


def test_a_second_loss_in_a_recovery_needs_another_spare() -> None:
    controller = OneController()
    for lost in (1, 2, 3):  # the last one has left its slot, and stands by
        controller._suspect(lost, "gone")
        controller.wait(1.0, ALL)
    assert controller.done == [Action.SEND_RECOVER] * 2 + [Action.NOTE_LOSS] and controller._tally.generation == 2
    assert controller._tally.phase is Phase.RECOVERING and controller._tally.roster.holders == (4, 5, 6, 7)
    for lost in (4, 5):
        controller._suspect(lost, "gone")
    controller.wait(1.0, ALL)
    assert controller.done[3:] == [Action.FAIL_JOB] and "too few" in controller._tally.reason
