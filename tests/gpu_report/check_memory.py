"""What kernels write and read: canaries, fences, poison, and the launches that compute-sanitizer watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sdpa_cutlass.library.registry import KernelInfo
from tests.gpu_report.context import Context, check
from tests.gpu_report.launching import Launch, same_bits
from tests.gpu_report.memory import memory_of
from tests.gpu_report.placement import Layout, Placement
from tests.gpu_report.problems import even_cases, few_cases, odd_cases
from tests.kernels.general import Case
from tests.kernels.general_numerics import case_violations


@check
def load(context: Context) -> None:
    """Every kernel of the registry loads; what follows finds its machine code in the driver's cache."""
    for row in context.each_row():
        context.at(row.name)
        context.library.prepare(row.index, 0)


@check
def launches(context: Context) -> None:
    """Launches every kernel, and checks nothing: compute-sanitizer does.

    Inputs are copied to the device, so initcheck knows them as initialised; results are not, and reading them
    back makes it look at every element.
    """
    _launch_all(context, few_cases)


@check
def even_launches(context: Context) -> None:
    """The same for racecheck, which needs KV groups to meet equally many barriers."""
    _launch_all(context, even_cases)


def _launch_all(context: Context, cases: Callable[[KernelInfo], Iterable[Case]]) -> None:
    placement = Placement(memory_of(context.device), Layout.PLAIN)
    for row in context.each_row():
        for case in cases(row):
            context.at(f"{row.name}: {case}")
            launch = Launch(context.library, row, case, placement, poison_outputs=False)
            launch.run()
            launch.results()
            placement.clear()
            context.numbers["launches"] += 1


@check
def canaries(context: Context) -> None:
    """Results right and complete; inputs and everything around them as they were."""
    placement = Placement(memory_of(context.device), Layout.CANARIES)
    for row in context.each_row():
        for case in odd_cases(row):
            out, lse = _run_guarded(context, placement, row, case, Layout.CANARIES)
            broken = case_violations(case, out, lse)
            if broken:
                context.fail(f"{context.progress}: {broken}")


@check
def guard_pages(context: Context) -> None:
    """Tensors that end, then begin, at unmapped memory: any access beyond them is a fault.

    Both times the same bits; `canaries` has them checked against float64.
    """
    memory = memory_of(context.device)
    placements = {
        layout: Placement(memory, layout) for layout in (Layout.FENCE_BEHIND, Layout.FENCE_IN_FRONT)
    }
    for row in context.each_row():
        for case in odd_cases(row):
            behind, in_front = (
                _run_guarded(context, placement, row, case, layout)
                for layout, placement in placements.items()
            )
            if not all(map(same_bits, behind, in_front)):
                context.fail(f"{context.progress}: other bits than with {Layout.FENCE_BEHIND.value}")


def _run_guarded(
    context: Context, placement: Placement, row: KernelInfo, case: Case, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse). What was written in the wrong place, or not at all, is a failure."""
    context.at(f"{row.name}, {layout.value}: {case}")
    launch = Launch(context.library, row, case, placement)
    launch.run()
    out, lse = launch.results()
    for what in [*placement.damage(), *launch.untouched()]:
        context.fail(f"{context.progress}: {what}")
    placement.clear()
    context.numbers["launches"] += 1
    return out, lse
