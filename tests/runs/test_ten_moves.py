"""Ten moves in one run: nothing is left over from a generation, and the last bit is still right."""
from __future__ import annotations

import numpy as np
import pytest
from support import Case, Harness, Undisturbed, assert_equal, completed, outcomes, undisturbed, vacate  # noqa: F401

from analysis.log import Run, read_run, text

NUM_MOVES = 10
EVERY = 8  # iterations
LEAD = ("--lead", "1")  # begin to prepare so late that there are iterations with nothing under way
CASE = Case(iterations=EVERY * (NUM_MOVES + 1) + 1)
# Each host in turn goes where the one before it was: after four moves every process has had a slot and has left one.
FREE = ("b3", "b1", "b0", "b2")
CYCLE = 4
MAX_MORE_RSS = 1.05
MAX_MORE_COUNT = 2  # such as a file that is open just now


@pytest.fixture(scope="module")
def moved_runs() -> dict[str, Run]:
    return {}


@pytest.fixture
def ten_moves(harness: Harness, moved_runs: dict[str, Run], undisturbed: Undisturbed,
              tmp_path_factory: pytest.TempPathFactory) -> Run:
    if not moved_runs:
        requests = [f"{FREE[(i + 1) % 4]}->{FREE[i % 4]}@{EVERY * (i + 1)}" for i in range(NUM_MOVES)]
        run = tmp_path_factory.mktemp("ten_moves") / "run"
        result = completed(harness(*CASE.arguments(8), *vacate(*requests), *LEAD, run=run, timeout=240))
        assert outcomes(result) == ["COMMITTED"] * NUM_MOVES
        assert [move["iteration"] for move in result["moves"]] == [EVERY * (i + 1) for i in range(NUM_MOVES)]
        assert result["generation"] == NUM_MOVES
        moved_runs["run"] = read_run(run)
    return moved_runs["run"]


def between_moves(run: Run, after_move: int) -> np.ndarray:
    """Rows of the last iteration before the next move is prepared: by then the last generation is closed."""
    # at the cut, a move is prepared from one iteration earlier on, and other slots may be an iteration ahead
    return run.iterations[run.iterations["iteration"] == EVERY * (after_move + 1) - 4]


def test_equal(ten_moves: Run, undisturbed: Undisturbed) -> None:
    assert_equal(CASE, undisturbed(CASE), ten_moves.path)


def test_only_what_has_never_run_is_warmed_up(ten_moves: Run) -> None:
    """The spares of the start; all later joiners have trained before."""
    warmed = [(int(span["world_rank"]), int(span["move"])) for span in ten_moves.spans
              if text(span["name"]) == "warm_up"]
    assert sorted(warmed) == [(6, 0), (7, 0)]


def test_number_of_groups_is_constant(ten_moves: Run) -> None:
    for slot in ten_moves.slots:
        settled = [int(row["num_groups"]) for i in range(NUM_MOVES + 1)
                   for row in between_moves(ten_moves, i) if row["slot"] == slot]
        assert len(settled) == NUM_MOVES + 1 and len(set(settled)) == 1, f"slot {slot}: {settled}"


@pytest.mark.parametrize("column", ["num_fds", "num_threads"])
def test_descriptors_and_threads_are_flat(ten_moves: Run, column: str) -> None:
    """The same process, each time that it holds a slot again."""
    for world_rank in range(8):
        counts = [int(row[column]) for i in range(CYCLE, NUM_MOVES + 1)
                  for row in between_moves(ten_moves, i) if row["world_rank"] == world_rank]
        assert len(counts) >= 3
        assert max(counts) <= counts[0] + MAX_MORE_COUNT, f"world rank {world_rank}: {counts}"


def test_memory_is_flat(ten_moves: Run) -> None:
    for world_rank in range(8):
        rss = [int(row["rss_bytes"]) for i in range(CYCLE, NUM_MOVES + 1)
               for row in between_moves(ten_moves, i) if row["world_rank"] == world_rank]
        assert max(rss) <= MAX_MORE_RSS * rss[0], f"world rank {world_rank}: {[r >> 20 for r in rss]} MiB"
