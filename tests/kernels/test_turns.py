"""Which tests are in which turn: two turns have everything, and each has every family in both types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family
from sdpa_cutlass.public.api import kernels
from tests.kernels.harness import TestedKernel
from tests.kernels.turns import of_turn


def items_of(device: str) -> list[Any]:
    """Tests of every kernel of the host library that a fixture gives, and one of none."""
    rows = [row for row in kernels(Target.HOST) if row.family is not Family.COMBINE]
    tests = [
        SimpleItem(f"test_{number}[{row.name}@{device}]", TestedKernel(device, row))
        for number in range(8)
        for row in rows
    ]
    return [*tests, SimpleItem("test_nothing", None)]


class SimpleItem:
    """What of_turn asks of a test."""

    def __init__(self, nodeid: str, kernel: TestedKernel | None) -> None:
        self.nodeid, self.kernel = nodeid, kernel
        if kernel is not None:
            self.callspec = SimpleNamespace(params={"causal": None, "fused_kernel": kernel})


def test_two_turns_have_everything() -> None:
    items = items_of("cpu")
    turns = [of_turn(items, turn) for turn in (6, 7)]
    in_both = [item for item in turns[0] if item in turns[1]]
    for one in turns:
        assert one == [item for item in items if item in one]
        assert len(one) < 0.6 * len(items)
    assert {item.nodeid for one in turns for item in one} == {item.nodeid for item in items}
    assert in_both == items[-1:]
    assert of_turn(items, 8) == turns[0]


def test_a_turn_has_every_family_in_both_types() -> None:
    items = items_of("cpu")
    asked = {(item.kernel.info.family, item.kernel.info.dtype) for item in items[:-1]}
    for turn in (0, 1):
        assert {
            (item.kernel.info.family, item.kernel.info.dtype) for item in of_turn(items, turn) if item.kernel
        } == asked


def test_a_gpu_has_no_turns() -> None:
    items = items_of("cuda")
    assert of_turn(items, 0) == items
