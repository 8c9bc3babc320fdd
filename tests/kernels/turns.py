"""Tests of the host library that take turns: those that differ in nothing but their kernel's element type.

Kernels of f16 and bf16 come from the same templates and differ in the types of some instructions. So a run
with `--turn N` has one of two such tests, of every test function some with each type, and that with N + 1 has
the others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

from tests.kernels.harness import TestedKernel


def of_turn(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """The items of this turn, in their order. What has no twin is in every turn."""
    twins: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        twins[_without_type(item)].append(item)
    chosen = {alike[(zlib.crc32(name.encode()) + turn) % len(alike)] for name, alike in twins.items()}
    return [item for item in items if item in chosen]


def _without_type(item: pytest.Item) -> str:
    """The test's name, without the type of the kernel that it runs on the host."""
    callspec = getattr(item, "callspec", None)
    for kernel in () if callspec is None else callspec.params.values():
        if isinstance(kernel, TestedKernel) and kernel.device == "cpu":
            name = kernel.info.name
            return item.nodeid.replace(name, name.replace(f"_{kernel.info.dtype.value}", "_*"))
    return item.nodeid
