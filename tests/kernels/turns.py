"""Tests of the host library that take turns: those that differ in their kernel's element type and tile alone.

Such kernels come from the same templates. Those of f16 and bf16 differ in the types of some instructions,
tiles of a head_dim in the sizes of some loops. So a run with `--turn N` has every sixth of such tests, of
every test function some with each type, and the next five have the others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.kernels.harness import TestedKernel

TURNS = 6


def of_turn(items: list[pytest.Item], turn: int, name_of: Callable[[pytest.Item], str]) -> list[pytest.Item]:
    """The items of this turn, in their order: of those with the same name every sixth, at least one."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[name_of(item)].append(item)
    chosen: set[pytest.Item] = set()
    for name, alike in groups.items():
        turns = min(TURNS, len(alike))
        chosen.update(alike[(zlib.crc32(name.encode()) + turn) % turns :: turns])
    return [item for item in items if item in chosen]


def leave_other_turns(
    config: pytest.Config, items: list[pytest.Item], name_of: Callable[[pytest.Item], str]
) -> None:
    """Deselects what is not in the turn that `--turn` asks for, if it asks for one."""
    turn = config.getoption("--turn")
    if turn is not None:
        kept = of_turn(items, turn, name_of)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


def without_type_and_tile(item: pytest.Item) -> str:
    """The test's name, without the type and tile of the kernel that it runs on the host."""
    callspec = getattr(item, "callspec", None)
    for kernel in () if callspec is None else callspec.params.values():
        if isinstance(kernel, TestedKernel) and kernel.device == "cpu":
            name, head_dim = kernel.info.name, f"_d{kernel.info.head_dim}"
            family = name.partition(f"{head_dim}_")[0]
            features = name.partition(f"_{kernel.info.dtype.value}")[2]
            return item.nodeid.replace(name, f"{family}{head_dim}_*{features}")
    return item.nodeid
