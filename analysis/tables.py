"""Tables and times for people. Pure: nothing of what the figures mean."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.report import format_bytes, format_s
from analysis.results import Figure, format_target, format_value

__all__ = ["format_bytes", "format_ratio", "format_s", "format_table", "format_targets"]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first one to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) if column else cell.ljust(width)
                               for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in lines)


def format_ratio(value: float | None) -> str:
    """Such as '1.04 x'."""
    return "-" if value is None else f"{format_value(value)} x"


def format_targets(figures: Iterable[Figure]) -> str:
    """One line for each, with what was asked for and whether it was met."""
    return "\n".join(f"  {figure.name}: {format_value(figure.value)}{' ' + figure.unit if figure.unit else ''}"
                     + (f", {target.replace('*', '')}" if (target := format_target(figure)) else "")
                     for figure in figures)
