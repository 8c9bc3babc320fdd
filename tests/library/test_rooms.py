"""Imports between the rooms of the package run one way.

    cli, machine_code → integrations, flash_api → public → call → choice | arrays → library → files at the top

Every import counts: those in functions, and those for type checkers alone. An import that goes up is an
exception with a name and a reason here, and has to be in a function.
"""

from __future__ import annotations

import ast
from enum import Enum
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "sdpa_cutlass"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = [
    {"__main__"},
    {"cli"},
    {"machine_code", "integrations", "flash_api"},
    {"public"},
    {"call"},
    {"choice", "arrays"},
    {"library"},
    {"dropout"},
    {"problem"},
    {"errors"},
]
"""Top first. A room imports from itself and from the levels below it; a file at the top counts as a room."""

UPWARD = {
    ("call.calls", "integrations.torch_ops"): "a call that torch records is an operator",
    ("call.calls", "integrations.torch_autograd"): "one that torch differentiates is a node of its graph",
    ("public.merge", "integrations.merge_ops"): "the same for merged results",
}

LONGEST_CHAIN = 9
"""Files that one import loads one below the other, at most. It should fall."""


class When(Enum):
    LOADING = "while the module loads"
    CALLED = "in a function"
    NEVER = "for type checkers alone"


class Import(NamedTuple):
    file: str  # "call.planning": below the package, without .py
    imported: str
    when: When


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {_name(path) for path in FILES}


def imports_of(name: str, source: str, *, is_package: bool = False) -> set[Import]:
    """What the source of the file `name` imports from the package, the package itself left out."""
    folder = name.split(".") if is_package else name.split(".")[:-1]
    found = set()

    def visit(node: ast.AST, when: When) -> None:
        for target in _targets(node, folder):
            if target in NAMES - {"", name}:
                found.add(Import(name, target, when))
        if isinstance(node, ast.FunctionDef):
            when = When.CALLED
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when = When.NEVER
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(ast.parse(source), When.LOADING)
    return found


def _targets(node: ast.AST, folder: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.removeprefix(f"{PACKAGE.name}.") for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = node.module.split(".") if node.module else []
    if node.level:
        module = [*folder[: len(folder) - node.level + 1], *module]
    elif module[:1] == [PACKAGE.name]:
        module = module[1:]
    else:
        return []
    named = (".".join([*module, alias.name]) for alias in node.names)
    return [name if name in NAMES else ".".join(module) for name in named]


IMPORTS = {
    found
    for path in FILES
    for found in imports_of(
        _name(path), path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
    )
}


def level(name: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if name.split(".")[0] in rooms)


def is_upward(found: Import) -> bool:
    """Up, or sideways into another room of the same level."""
    rooms = found.file.split(".")[0], found.imported.split(".")[0]
    return rooms[0] != rooms[1] and level(found.file) >= level(found.imported)


def chain(name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain of imports below `name` while modules load. Raises AssertionError for a circle."""
    assert name not in above, f"a circle of imports: {' → '.join([*above, name])}"
    below = [found.imported for found in IMPORTS if found.file == name and found.when is When.LOADING]
    chains = [chain(other, (*above, name)) for other in below]
    return (name, *max(chains, key=len, default=()))


def test_every_file_of_the_package_has_a_room() -> None:
    rooms = {name.split(".")[0] for name in NAMES} - {""}
    assert rooms == set.union(*LEVELS)


def test_imports_between_rooms_run_one_way() -> None:
    upward = {(found.file, found.imported) for found in IMPORTS if is_upward(found)}
    assert upward == set(UPWARD)


def test_what_goes_up_waits_for_a_call() -> None:
    for found in IMPORTS:
        if is_upward(found):
            assert found.when is When.CALLED, found


def test_no_circle_of_imports_and_no_longer_chains() -> None:
    assert max(len(chain(name)) for name in NAMES - {""}) <= LONGEST_CHAIN


def test_the_reader_of_imports_finds_every_kind() -> None:
    source = """
from . import checks
from ..library.abi import Library
from sdpa_cutlass.choice import select
import sdpa_cutlass.public.api
import os
if TYPE_CHECKING:
    from .calls import run
def f():
    from ..integrations import torch_ops
"""
    found = imports_of("call.planning", source)
    assert found == {
        Import("call.planning", "call.checks", When.LOADING),
        Import("call.planning", "library.abi", When.LOADING),
        Import("call.planning", "choice.select", When.LOADING),
        Import("call.planning", "public.api", When.LOADING),
        Import("call.planning", "call.calls", When.NEVER),
        Import("call.planning", "integrations.torch_ops", When.CALLED),
    }
    assert {i.imported for i in found if is_upward(i)} == {"public.api", "integrations.torch_ops"}
