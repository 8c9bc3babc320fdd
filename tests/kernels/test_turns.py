"""Which tests are in which turn: some turns together have everything, each has every family in both types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.public.api import kernels
from tests.kernels.harness import TestedKernel
from tests.kernels.turns import TURNS, of_turn, without_type_and_tile


def items_of(device: str) -> list[Any]:
    """Tests of every kernel of the host library that a fixture gives, and one of none."""
    rows = [row for row in kernels(Target.HOST) if row.family is not Family.COMBINE]
    tests = [
        SimpleItem(f"test_{number}[{row.name}@{device}]", TestedKernel(device, row))
        for number in range(40)
        for row in rows
    ]
    return [*tests, SimpleItem("test_nothing", None)]


class SimpleItem:
    """What of_turn asks of a test."""

    def __init__(self, nodeid: str, kernel: TestedKernel | None) -> None:
        self.nodeid, self.kernel = nodeid, kernel
        if kernel is not None:
            self.callspec = SimpleNamespace(params={"causal": None, "fused_kernel": kernel})


def tile_of(row: KernelInfo) -> tuple[Any, ...]:
    return row.family, row.arch, row.head_dim, row.details


def kept(items: list[Any], turn: int) -> list[Any]:
    return of_turn(items, turn, without_type_and_tile)


def test_all_turns_together_have_everything() -> None:
    items = items_of("cpu")
    turns = [kept(items, turn) for turn in range(6, 6 + TURNS)]
    for one in turns:
        known = set(one)
        assert one == [item for item in items if item in known]
        assert len(one) < 0.3 * len(items)
        assert items[-1] in one
    assert {item.nodeid for one in turns for item in one} == {item.nodeid for item in items}
    assert kept(items, 6 + 60) == turns[0], "groups of two to six are back where they were"


def test_a_turn_has_every_tile() -> None:
    items = items_of("cpu")
    asked = {tile_of(item.kernel.info) for item in items[:-1]}
    for turn in range(TURNS):
        assert {tile_of(item.kernel.info) for item in kept(items, turn) if item.kernel} == asked


def test_a_turn_has_every_family_in_both_types() -> None:
    items = items_of("cpu")
    asked = {(item.kernel.info.family, item.kernel.info.dtype) for item in items[:-1]}
    for turn in range(TURNS):
        assert {
            (item.kernel.info.family, item.kernel.info.dtype) for item in kept(items, turn) if item.kernel
        } == asked


def test_a_gpu_has_no_turns() -> None:
    items = items_of("cuda")
    assert kept(items, 0) == items
