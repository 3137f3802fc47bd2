"""The log: what is written can be read, while it is open, after a SIGKILL, and never silently in part."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from synthetic_run import HOSTS, build_iteration, make_run

from analysis.log import read_run, text
from migration.errors import UserError
from migration.timeline import DATASETS, SCHEMA_VERSION, Clock, Timeline, cut_utf8, process_counts
from migration.versions import code_digest, collect_versions

ROOT = Path(__file__).resolve().parents[2]


def open_timeline(run: Path, world_rank: int = 0) -> Timeline:
    return Timeline(run / "log" / f"w{world_rank:04d}.h5", world_rank=world_rank, host="b0", config={"profile": "p"},
                    options={"lead": 10}, versions={"python": "3"}, hosts=HOSTS)


def iteration_row(iteration: int, time_s: float = 1.0, disturbed: bool = False) -> dict[str, object]:
    row = build_iteration(iteration, 0, 1e9, move=False, switched=False)
    return row | {"time_s": time_s, "disturbed": disturbed}


def start_writer(run: Path) -> subprocess.Popen[str]:
    """A process that writes rows, says so, and then waits to be killed."""
    code = ("import sys\n"
            "from pathlib import Path\n"
            "from test_timeline import iteration_row, open_timeline\n"
            "timeline = open_timeline(Path(sys.argv[1]))\n"
            "for i in range(200):\n"
            "    timeline.add_iteration(**iteration_row(i))\n"
            "timeline.add_span('build', 'PREPARING', 1.0, 2.0, move=3, bytes=7)\n"
            "timeline.add_event('request', 'b1@12')\n"
            "timeline.add_digest(0, 'rng', 'ab')\n"
            "print('written', flush=True)\n"
            "sys.stdin.read()\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit")])}
    writer = subprocess.Popen([sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env=environment)
    assert writer.stdout is not None and writer.stdout.readline() == "written\n"
    return writer


@pytest.mark.timeout(60)
def test_everything_flushed_is_read_while_open_and_after_sigkill(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    try:
        while_open = read_run(tmp_path)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    killed = read_run(tmp_path)
    for run in (while_open, killed):
        assert run.iterations["iteration"].tolist() == list(range(200))
        assert [int(run.spans["bytes"][0]), int(run.spans["move"][0])] == [7, 3]
        assert text(run.events["text"][0]) == "b1@12"
        assert text(run.digests["digest"][0]) == "ab"
        assert run.result is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("closed", [True, False])
def test_a_log_cut_short_anywhere_is_an_error_that_names_it(tmp_path: Path, closed: bool) -> None:
    source = tmp_path / "whole" / "log" / "w0000.h5"
    if closed:
        make_run(tmp_path / "whole")
    else:
        writer = start_writer(tmp_path / "whole")
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    content = source.read_bytes()
    cut = tmp_path / "cut" / "log" / "w0000.h5"
    cut.parent.mkdir(parents=True)
    for num_bytes in [0, 7, 11, 12, 40, *range(97, len(content), 997), len(content) - 1]:
        cut.write_bytes(content[:num_bytes])
        with pytest.raises(UserError, match="w0000.h5") as caught:
            read_run(cut.parent.parent)
        assert "\n" not in str(caught.value)


def test_no_folder_no_logs_and_another_schema_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no log files"):
        read_run(tmp_path)
    run = make_run(tmp_path / "run")
    with h5py.File(run / "log" / "w0001.h5", "r+", libver="latest") as file:
        file.attrs["schema_version"] = SCHEMA_VERSION + 1
    with pytest.raises(UserError, match="w0001.h5: a log of schema version 4"):
        read_run(run)


def test_a_result_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "result.json").write_text('{"status": "comp')
    with pytest.raises(UserError, match="result.json"):
        read_run(run)


def test_a_slot_over_two_files_is_one_series(tmp_path: Path) -> None:
    series = read_run(make_run(tmp_path)).series(2)
    assert series["iteration"].tolist() == list(range(20))
    assert series["world_rank"].tolist() == [2] * 12 + [6] * 8


def test_schema_units_and_attributes_are_in_the_file(tmp_path: Path) -> None:
    open_timeline(tmp_path).close()
    with h5py.File(tmp_path / "log" / "w0000.h5") as file:
        assert file.attrs["schema_version"] == 3 and file.attrs["pid"] == os.getpid()
        assert json.loads(file.attrs["hosts"]) == HOSTS
        for name, schema in DATASETS.items():
            assert json.loads(file[name].attrs["units"]) == {column: unit for column, _, unit in schema}
            assert list(file[name].dtype.names) == [column for column, _, _ in schema]


def test_stall_is_above_the_median_of_undisturbed_iterations(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    for number, (time_s, disturbed) in enumerate(
            [(9.0, False), (1.0, False), (5.0, True), (2.0, False), (4.0, True), (1.5, False)]):
        timeline.add_iteration(**iteration_row(number, time_s, disturbed))
    timeline.close()
    rows = read_run(tmp_path).iterations
    assert rows["stall_s"].tolist() == [0, 0, 0, 0, 2.0, 0]  # before three undisturbed there is no median
    assert rows["disturbed"].tolist() == [0, 0, 1, 0, 1, 0]
    assert (rows["rss_bytes"] > 0).all() and (rows["num_threads"] > 0).all()


def test_a_span_is_recorded_when_its_body_raises(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    with pytest.raises(ZeroDivisionError), timeline.span("transfer", "SWITCHING", move=1, slot=2) as span:
        span.bytes = 5
        raise ZeroDivisionError
    timeline.close()
    row, = read_run(tmp_path).spans
    assert (text(row["name"]), row["bytes"], row["slot"], row["move"]) == ("transfer", 5, 2, 1)
    assert row["end_s"] >= row["start_s"] and row["rss_bytes"] > 0


def test_rows_from_several_threads_all_arrive(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    threads = [threading.Thread(target=lambda: [timeline.add_event("e", "x") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert len(read_run(tmp_path).events) == 200


def test_texts_are_cut_between_characters(tmp_path: Path) -> None:
    assert cut_utf8("aé", 2) == b"a" and cut_utf8("aé", 3) == "aé".encode()
    timeline = open_timeline(tmp_path)
    timeline.add_event("error", "é" * 400)
    timeline.close()
    assert text(read_run(tmp_path).events["text"][0]) == "é" * 256


def test_wrong_columns_a_closed_timeline_and_a_second_log_are_errors(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    with pytest.raises(AssertionError, match="iterations: columns missing or unknown: .'iteration', 'speed'."):
        row = iteration_row(0)
        del row["iteration"]
        timeline.add_iteration(**row, speed=1)
    timeline.close()
    timeline.close()
    with pytest.raises(ValueError, match="closed"):
        timeline.add_event("late", "")
    with pytest.raises(UserError, match="name a new run folder"):
        open_timeline(tmp_path)


def test_refused_requests_stay_and_a_later_term_replaces_a_move(tmp_path: Path) -> None:
    timeline = open_timeline(tmp_path)
    columns = {"reason": "", "iteration": -1, "generation": 0, "setup_s": None, "downtime_s": None, "total_s": None,
               "bytes": 0, "num_groups_rebuilt": 0, "num_groups_kept": 0, "assignments": [[2, 2, 6]]}
    for move, term, outcome, requested_s in ((-1, 0, "REFUSED", 3.0), (-1, 0, "REFUSED", 1.0), (0, 0, "ABORTED", 2.0),
                                             (0, 1, "COMMITTED", 2.0)):
        timeline.add_move(move=move, term=term, outcome=outcome, requested_s=requested_s, request="b1", arm="full",
                          **columns)
    timeline.close()
    moves = read_run(tmp_path).moves
    assert moves["outcome"].tolist() == [b"REFUSED", b"COMMITTED", b"REFUSED"]
    assert np.isnan(moves["setup_s"]).all() and json.loads(moves["assignments"][1]) == [[2, 2, 6]]


def test_clock_counts_and_versions() -> None:
    clock = Clock()
    assert clock() <= clock()
    rss_bytes, num_fds, num_threads = process_counts()
    with open(os.devnull):
        assert process_counts()[1] == num_fds + 1
    assert rss_bytes > 1_000_000 and num_threads >= 1
    versions = collect_versions()
    assert set(versions) == {"python", "torch", "megatron_core", "mpi4py", "mpi", "h5py", "code"}
    assert versions["code"] == code_digest() and len(code_digest()) == 64
