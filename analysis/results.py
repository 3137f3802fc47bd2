"""Figures beside their targets, and the files that keep them: JSON for programs, Markdown for microbenchmark.md.

Owns what "met" means and the layout of the tables. Pure: the standard library only; knows nothing of how a figure came
about.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`value` None: this run doesn't give it. `at_most` and `at_least` are targets; a figure has one of them or none.

    `column`: where the same figure was taken in several ways, the way.
    """

    name: str
    value: float | str | None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    column: str = ""

    @property
    def met(self) -> bool | None:
        """None without a target; a figure that is missing doesn't meet it."""
        if self.at_most is None and self.at_least is None:
            return None
        if not isinstance(self.value, (int, float)):
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one part of a benchmark gave. `problem`: why it failed, empty if it didn't. `machine` is Machine's line."""

    title: str
    machine: str
    figures: tuple[Figure, ...] = ()
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""


def format_value(value: float | str | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def format_target(figure: Figure) -> str:
    """Such as 'at most 1.03: met'; empty without a target."""
    if figure.met is None:
        return ""
    limit = f"at most {figure.at_most:g}" if figure.at_most is not None else f"at least {figure.at_least:g}"
    return f"{limit}: {'met' if figure.met else '**missed**'}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def build_markdown(sections: Sequence[Section]) -> str:
    """A heading and a table for each section."""
    blocks = []
    for section in sections:
        blocks += [f"### {section.title}", section.machine]
        blocks += ["\n".join(f"    {command}" for command in section.commands)] if section.commands else []
        blocks += [f"**Failed**: {section.problem}"] if section.problem else []
        blocks += [_figure_table(section.figures)] if section.figures else []
        blocks += list(section.notes)
    return "\n\n".join(blocks) + "\n"


def _figure_table(figures: Sequence[Figure]) -> str:
    """A row for each name, with a column for each way it was taken; the targets in the last one."""
    columns = list(dict.fromkeys(figure.column for figure in figures))
    rows = []
    for name in dict.fromkeys(figure.name for figure in figures):
        same = {figure.column: figure for figure in figures if figure.name == name}
        cells = [f"{format_value(same[column].value)} {same[column].unit}".strip() if column in same else ""
                 for column in columns]
        rows.append((name, *cells, ", ".join(filter(None, map(format_target, same.values())))))
    return markdown_table(("", *(column or "figure" for column in columns), "target"), rows)


def write_sections(folder: Path, stem: str, sections: Sequence[Section]) -> None:
    """Writes folder/stem.json and folder/stem.md, each whole or not at all."""
    write_whole(folder / f"{stem}.json", json.dumps([asdict(section) for section in sections], indent=1) + "\n")
    write_whole(folder / f"{stem}.md", build_markdown(sections))


def read_sections(path: Path) -> list[Section]:
    """What `write_sections` left; empty if there is no file."""
    if not path.exists():
        return []
    return [_section(row) for row in json.loads(path.read_text())]


def _section(row: dict[str, Any]) -> Section:
    lists = {name: tuple(row[name]) for name in ("commands", "notes")}
    return Section(**{**row, **lists, "figures": tuple(Figure(**figure) for figure in row["figures"])})


def replace_section(sections: Sequence[Section], new: Section) -> list[Section]:
    """`sections` with `new` in the place of the one with its title, or at the end."""
    found = [new if section.title == new.title else section for section in sections]
    return found if new in found else [*found, new]


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)
