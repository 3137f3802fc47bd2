"""Imports go one way: no two files need each other, and what lies below knows nothing of what lies above.

Imports within functions count; those for annotations (`if TYPE_CHECKING`) don't.
"""
from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("migration", "nccl_bindings", "third_party")


def sources() -> dict[str, str]:
    """The text of every module, by its full name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
            for path in paths}


def imported(node: ast.AST) -> Iterator[str]:
    """Full names, of modules or of what is in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from imported(ast.Module(body=child.orelse, type_ignores=[]))
        else:
            yield from imported(child)


def build_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """module -> modules that it needs, of those in `texts`."""
    graph = {}
    for module, text in texts.items():
        names = set(imported(ast.parse(text)))
        graph[module] = {name if name in texts else name.rpartition(".")[0] for name in names} & texts.keys() - {module}
    return graph


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One of them, from its first module back to that; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]  # from who imports to who is imported
    return []


def test_there_is_no_cycle() -> None:
    graph = build_graph(sources())
    assert len(graph["migration.controller"]) > 3, "the files were found"
    assert find_cycle(graph) == []


@pytest.mark.parametrize("below, above", [
    ("nccl_bindings", ("migration", "third_party")),
    ("third_party", ("migration",)),
    ("migration", ("harness",)),
    ("migration.communicators", ("migration.groups", "migration.next_generation", "migration.controller",
                                 "migration.member", "migration.part", "migration.move", "migration.protocol")),
    ("migration.groups", ("migration.controller", "migration.member", "migration.part", "migration.move",
                          "migration.protocol", "migration.world")),
])
def test_what_lies_below_knows_nothing_of_what_lies_above(below: str, above: tuple[str, ...]) -> None:
    found = [(module, name) for module, text in sources().items() for name in imported(ast.parse(text))
             if f"{module}.".startswith(f"{below}.") and f"{name}.".startswith(tuple(f"{a}." for a in above))]
    assert found == []


@pytest.mark.parametrize("second, cycle", [
    ("import first", ["first", "second", "first"]),
    ("def act():\n    from first import x", ["first", "second", "first"]),
    ("if TYPE_CHECKING:\n    import first\nelse:\n    import first", ["first", "second", "first"]),
    ("if TYPE_CHECKING:\n    import first", []),
    ("import os", []),
])
def test_a_cycle_is_found(second: str, cycle: list[str]) -> None:
    found = find_cycle(build_graph({"first": "from second import y", "second": second}))
    assert found in (cycle, ["second", "first", "second"] if cycle else [])
