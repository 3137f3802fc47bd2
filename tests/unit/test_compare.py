"""Comparison of runs: equal means equal to the last bit and whole; otherwise the first difference is named."""
from __future__ import annotations

import math
from pathlib import Path

import pytest
from synthetic_run import Edit, Row, make_run

from analysis.compare import main


def edit_at(iteration: int, slot: int, /, **changes: object) -> Edit:
    """Changes one row; `drop=True` leaves it out."""
    def edit(row: Row) -> Row | None:
        if (row["iteration"], row["slot"]) != (iteration, slot):
            return row
        return None if changes.get("drop") else row | changes
    return edit


def compare(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([str(first), str(second)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_run_with_a_move_equals_the_run_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = compare(make_run(tmp_path / "moved"), make_run(tmp_path / "alone", move=False), capsys)
    assert code == 0
    assert said == ("equal: 20 iterations x 6 slots: 120 sample digests, 120 positions in the data, 40 losses, "
                    "120 gradient norms, 120 skipped-step flags, 18 final digests\n")


@pytest.mark.parametrize(("changes", "named"), [
    ({"loss": math.nextafter(5.0 / 8, 1.0)}, "loss: A 0x1.4000000000000p-1, B 0x1.4000000000001p-1"),
    ({"loss": None}, "loss: A 0x1.4000000000000p-1, B nan"),
    ({"grad_norm": 2.5}, "grad_norm: A 0x1.0000000000000p+1, B 0x1.4000000000000p+1"),
    ({"skipped": 1}, "skipped: A 0, B 1"),
    ({"samples": "0"}, "samples: A 0000000700000005, B 0"),
    ({"consumed_samples": 85}, "consumed_samples: A 84, B 85"),
])
def test_each_field_is_compared_and_the_first_difference_named(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                               changes: Row, named: str) -> None:
    code, said = compare(make_run(tmp_path / "a"), make_run(tmp_path / "b", edit_iteration=edit_at(7, 5, **changes)),
                         capsys)
    assert code == 1
    assert said.startswith(f"different: iteration 7, slot 5, {named} (world ranks 5 and 5; 1 of 120 ")


def test_the_sign_of_zero_counts_and_a_nan_equals_a_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plus, minus, overflow = (edit_at(3, 1, grad_norm=value) for value in (0.0, -0.0, math.nan))
    runs = {name: make_run(tmp_path / name, edit_iteration=edit) for name, edit in
            (("plus", plus), ("minus", minus), ("nan", overflow), ("nan again", overflow))}
    assert compare(runs["plus"], runs["minus"], capsys)[0] == 1
    assert compare(runs["nan"], runs["nan again"], capsys)[0] == 0


def test_a_digest_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(row: Row) -> Row:
        return row | {"digest": "ff"} if (row["slot"], row["kind"]) == (2, "rng") else row

    code, said = compare(make_run(tmp_path / "a"), make_run(tmp_path / "b", edit_digest=edit), capsys)
    assert code == 1
    assert said.startswith("different: final digest of rng, slot 2: A 0203")
    assert "B ff (1 of 18 differ)" in said


def test_iterations_that_are_missing_or_twice_are_no_equality(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_run(tmp_path / "whole")
    for name, edit, named in (
            ("missing", edit_at(9, 4, drop=True), "B lacks iteration 9, slot 4"),
            ("no slot", lambda row: None if row["slot"] == 3 else row, "B has no iterations of slot 3"),
            ("none", lambda row: None, "B has no iterations"),
            ("twice", edit_at(13, 2, iteration=12), "B has iteration 12, slot 2 twice, by world ranks 6 and 6"),
            ("no loss", lambda row: row | {"loss": None}, "B has no loss in any iteration")):
        code, said = compare(whole, make_run(tmp_path / name, edit_iteration=edit), capsys)
        assert code == 1 and said.startswith(f"different: {named}"), said
    code, said = compare(make_run(tmp_path / "long", num_iterations=21), whole, capsys)
    assert code == 1 and said.startswith("different: only A has iteration 20, slot 0 (6 such)")
    assert "config iterations: A 21, B 20" in said


def test_digests_that_are_missing_are_no_equality_even_if_both_lack_them(tmp_path: Path,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name, edit_digest=lambda row: None, finished=False) for name in ("a", "b")]
    code, said = compare(*runs, capsys)
    assert code == 1 and "A has no final digests of slot 0" in said
    fewer = make_run(tmp_path / "fewer", edit_digest=lambda row: None if row["kind"] == "rng" else row)
    code, said = compare(make_run(tmp_path / "whole"), fewer, capsys)
    assert code == 1 and "only A has the digest of rng, slot 0 (6 such)" in said


def test_a_run_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = make_run(tmp_path / "whole"), make_run(tmp_path / "cut")
    log = cut / "log" / "w0003.h5"
    log.write_bytes(log.read_bytes()[:3000])
    code, said = compare(whole, cut, capsys)
    assert code == 2 and said.count("\n") == 1 and "w0003.h5" in said
    code, said = compare(whole, tmp_path / "nowhere", capsys)
    assert code == 2 and said.count("\n") == 1 and "nowhere" in said


REDONE = range(4, 7)


def test_iterations_done_again_after_a_recovery_are_compared_both_times(tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    alone = make_run(tmp_path / "alone", move=False)
    code, said = compare(make_run(tmp_path / "recovered", move=False, redone=REDONE), alone, capsys)
    assert code == 0 and said.endswith("18 final digests, 18 iterations of slots before they were done again\n")
    unfinished = make_run(tmp_path / "cut", move=False, redone=REDONE, edit_redone=edit_at(6, 2, drop=True))
    assert compare(unfinished, alone, capsys)[0] == 0, "not every slot had come as far when one was lost"
    for edit in ("edit_redone", "edit_iteration"):
        wrong = make_run(tmp_path / edit, move=False, redone=REDONE, **{edit: edit_at(5, 3, grad_norm=2.5)})
        for pair in ((wrong, alone), (alone, wrong)):
            code, said = compare(*pair, capsys)
            assert code == 1 and said.startswith("different: iteration 5, slot 3, grad_norm"), said
            assert ("before its recovery" in said) is (edit == "edit_redone")


def test_a_slot_that_was_held_twice_is_no_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = make_run(tmp_path / "alone", move=False)
    code, said = compare(make_run(tmp_path / "twice", move=False, redone=REDONE, recovers=False), alone, capsys)
    assert code == 1 and "has iteration 4, slot 0 twice" in said
    same = {"generation": 1}
    code, said = compare(make_run(tmp_path / "same", move=False, redone=REDONE, edit_redone=lambda row: row | same),
                         alone, capsys)
    assert code == 1 and "twice" in said, "two of one generation are never a recovery's"
