"""Tells whether two runs are equal to the last bit, and if not, where they first differ.

Owns what equality means: for each iteration and slot the loss, gradient norm, sample digest, position in the data and
skipped step, and at the end the digest of each kind of state of each slot. Who held a slot, and when, is no part of it.
What a run has done twice, because it lost a process in between, is compared both times.
No tolerance: floats are compared by their bits, except that a NaN equals a NaN.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from analysis.log import Run, read_run, text
from migration.errors import UserError

FIELDS = {"samples": "sample digests", "consumed_samples": "positions in the data", "loss": "losses",
          "grad_norm": "gradient norms", "skipped": "skipped-step flags"}
DESCRIPTION = """\
Compare two runs bit for bit: every loss, gradient norm, sample digest, position in the data and skipped step of each
(iteration, slot), and every final digest. Exit code 0: equal. 1: not, or not comparable; the first difference is
named. 2: a run can't be read."""
EXAMPLE = """\
example: a run with a move, and the same run left alone
  python harness.py --np 8 --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3 --vacate b1@12 --run runs/moved
  python harness.py --np 8 --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3 --run runs/alone
  python -m analysis.compare runs/moved runs/alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison came to. `text` is one line if equal, else the first difference."""

    equal: bool
    text: str


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description=DESCRIPTION, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", metavar="RUN_A", help="run folder, such as runs/moved")
    parser.add_argument("run_b", metavar="RUN_B", help="run folder, such as runs/alone")
    options = parser.parse_args(argv)
    try:
        verdict = compare_runs(read_run(options.run_a), read_run(options.run_b))
    except UserError as error:
        print(f"analysis.compare: {error}", file=sys.stderr)
        return 2
    print(verdict.text)
    return 0 if verdict.equal else 1


def compare_runs(first: Run, second: Run) -> Verdict:
    """Compares two runs; what isn't whole is not equal to anything."""
    fault = next((fault for name, run in (("A", first), ("B", second)) if (fault := _find_gap(name, run))), None)
    fault = fault or _find_missing(first, second) or _find_difference(first, second)
    fault = fault or _find_redone_difference("A", first, second) or _find_redone_difference("B", second, first)
    fault = fault or _find_digest_difference(first, second)
    if fault is not None:
        lines = [f"different: {fault}", f"  A is {first.path}", f"  B is {second.path}"]
        return Verdict(equal=False, text="\n".join(lines + _config_differences(first, second)))
    rows = first.iterations
    counts = {field: int((~np.isnan(rows[field])).sum()) if rows[field].dtype.kind == "f" else len(rows)
              for field in FIELDS}
    compared = ", ".join(f"{counts[field]} {plural}" for field, plural in FIELDS.items())
    return Verdict(equal=True, text=f"equal: {len(np.unique(rows['iteration']))} iterations x {len(first.slots)} "
                                    f"slots: {compared}, {len(first.digests)} final digests"
                                    + _count_redone(first, second))


def _find_gap(name: str, run: Run) -> str | None:
    """What keeps `run` from being compared at all: nothing logged, a slot twice or never, no final digests."""
    rows = run.iterations
    if not len(rows):
        return f"{name} has no iterations"
    missing_slots = sorted(set(range(_num_slots(run))) - set(run.slots))
    if missing_slots:
        return f"{name} has no iterations of slot {missing_slots[0]}"
    twice = np.flatnonzero((rows["iteration"][1:] == rows["iteration"][:-1]) & (rows["slot"][1:] == rows["slot"][:-1]))
    if len(twice):
        row, other = rows[twice[0]], rows[twice[0] + 1]
        return (f"{name} has {_place(row['iteration'], row['slot'])} twice, by world ranks {row['world_rank']} and "
                f"{other['world_rank']}")
    numbers, num_rows = np.unique(rows["iteration"], return_counts=True)
    for iteration in numbers[num_rows < len(run.slots)][:1].tolist():
        absent = sorted(set(run.slots) - set(rows["slot"][rows["iteration"] == iteration].tolist()))
        return f"{name} lacks {_place(iteration, absent[0])}"
    if np.isnan(rows["loss"]).all():
        return f"{name} has no loss in any iteration"
    for slot in run.slots:
        kinds = run.digests["kind"][run.digests["slot"] == slot].tolist()
        if not kinds:
            return f"{name} has no final digests of slot {slot} (the run goes on, or didn't come to its end)"
        if len(set(kinds)) < len(kinds):
            return f"{name} has a final digest of slot {slot} twice: {_repeated(kinds)}"
    return None


def _find_missing(first: Run, second: Run) -> str | None:
    """The first (iteration, slot), or the first (slot, kind) of a digest, that only one run has."""
    for columns, what in ((("iteration", "slot"), "iteration"), (("slot", "kind"), "digest")):
        keys = [set(zip(*(array[column].tolist() for column in columns), strict=True)) for array in
                ((run.iterations if what == "iteration" else run.digests) for run in (first, second))]
        only = sorted(keys[0] ^ keys[1])
        if only:
            where = _place(*only[0]) if what == "iteration" else f"the digest of {text(only[0][1])}, slot {only[0][0]}"
            return f"only {'A' if only[0] in keys[0] else 'B'} has {where} ({len(only)} such)"
    return None


def _find_difference(first: Run, second: Run) -> str | None:
    rows, others = first.iterations, second.iterations  # same keys, both sorted by them
    unequal = {field: ~_equal_bits(rows[field], others[field]) for field in FIELDS}
    anywhere = np.flatnonzero(np.logical_or.reduce(list(unequal.values())))
    if not len(anywhere):
        return None
    at = anywhere[0]
    field = next(field for field in FIELDS if unequal[field][at])
    return (f"{_place(rows['iteration'][at], rows['slot'][at])}, {field}: A {_show(rows[field][at])}, "
            f"B {_show(others[field][at])} (world ranks {rows['world_rank'][at]} and {others['world_rank'][at]}; "
            + ", ".join(f"{int(unequal[name].sum())} of {len(rows)} {plural} differ"
                        for name, plural in FIELDS.items() if unequal[name].any()) + ")")


def _find_redone_difference(name: str, run: Run, other: Run) -> str | None:
    """The first of the rows behind which a recovery of `run` went back that isn't equal to the other run's."""
    known = {(int(row["iteration"]), int(row["slot"])): row for row in other.iterations}
    for row in run.redone:
        expected = known.get((int(row["iteration"]), int(row["slot"])))
        if expected is None:  # both runs ended before it was done again
            continue
        wrong = next((field for field in FIELDS if not _equal_bits(row[field], expected[field])), None)
        if wrong is not None:
            return (f"{_place(row['iteration'], row['slot'])}, {wrong}, as {name} had it before its recovery: "
                    f"{_show(row[wrong])}, the other run {_show(expected[wrong])}")
    return None


def _count_redone(first: Run, second: Run) -> str:
    number = len(first.redone) + len(second.redone)
    return f", {number} iterations of slots before they were done again" if number else ""


def _find_digest_difference(first: Run, second: Run) -> str | None:
    unequal = np.flatnonzero(first.digests["digest"] != second.digests["digest"])
    if not len(unequal):
        return None
    row, other = first.digests[unequal[0]], second.digests[unequal[0]]
    return (f"final digest of {text(row['kind'])}, slot {row['slot']}: A {text(row['digest'])}, "
            f"B {text(other['digest'])} ({len(unequal)} of {len(first.digests)} differ)")


def _equal_bits(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    if values.dtype.kind != "f":
        return values == others
    return (values.view("i8") == others.view("i8")) | (np.isnan(values) & np.isnan(others))


def _config_differences(first: Run, second: Run) -> list[str]:
    """Lines about configs that differ: the likely cause."""
    names = sorted(name for name in first.config.keys() | second.config.keys()
                   if first.config.get(name) != second.config.get(name))
    return [f"  config {name}: A {first.config.get(name)!r}, B {second.config.get(name)!r}" for name in names]


def _num_slots(run: Run) -> int:
    return int(run.config["tp"]) * int(run.config["pp"]) * int(run.config["dp"])


def _place(iteration: int, slot: int) -> str:
    return f"iteration {iteration}, slot {slot}"


def _repeated(kinds: list[bytes]) -> str:
    return text(next(kind for kind in kinds if kinds.count(kind) > 1))


def _show(value: np.generic) -> str:
    return float(value).hex() if value.dtype.kind == "f" else text(value) if value.dtype.kind == "S" else str(value)


if __name__ == "__main__":
    sys.exit(main())
