"""Runs that have to repeat bit for bit: the same launch a thousand times, and captured in a CUDA graph."""

from __future__ import annotations

import torch

from tests.gpu_report.context import Context, check
from tests.gpu_report.on_device import DeviceLaunch, case_on
from tests.gpu_report.problems import sized_case
from tests.kernels.harness import HOST_THREADS

_RUNS = 1000
_SIZES = {"cuda": ((2, 97, 333), (8, 2049, 2047)), "cpu": ((1, 70, 150),)}  # heads, seqlen_q, seqlen_k


@check
def repeats(context: Context) -> None:
    """Every kernel, a small problem and a large one: results are poisoned before each of the runs."""
    runs = context.examples or _RUNS
    for row in context.each_row():
        for heads, seqlen_q, seqlen_k in _SIZES[context.device]:
            case = sized_case(row, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seed=context.seed)
            context.at(f"{row.name}, {runs} runs: {case}")
            launch = DeviceLaunch(context.library, row, case_on(case, context.device))
            changed = _changed_bits(context, launch, runs)
            if changed:
                context.fail(f"{context.progress}: {changed} elements changed from run to run")
            context.numbers["launches"] += runs


def _changed_bits(context: Context, launch: DeviceLaunch, runs: int) -> int:
    launch.run()
    expected = [bits.clone() for bits in launch.bits()]
    changed = torch.zeros((), dtype=torch.int64, device=context.device)
    for run in range(runs - 1):
        launch.forget()
        if context.device == "cpu":  # another order of warps and threads each time
            context.library.host_configure(schedule_seed=run + 1, num_threads=HOST_THREADS)
        launch.run()
        for bits, wanted in zip(launch.bits(), expected, strict=True):
            changed += (bits != wanted).sum()
    return int(changed)


@check
def graphs(context: Context) -> None:
    """Every kernel captured once, replayed on new values of q, k, v and mask: the bits of a launch."""
    for row in context.each_row():
        cases = [sized_case(row, heads=2, seqlen_q=129, seqlen_k=257, seed=seed) for seed in range(4)]
        context.at(f"{row.name}: {cases[0]}")
        captured = DeviceLaunch(context.library, row, case_on(cases[0], "cuda"))
        captured.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.run()
        for case in cases[1:]:
            _set_values(captured, case_on(case, "cuda"))
            captured.forget()
            graph.replay()
            replayed = [bits.clone() for bits in captured.bits()]
            captured.forget()
            captured.run()
            if not all(map(torch.equal, replayed, captured.bits())):
                context.fail(f"{context.progress}: a replay differs from a plain launch")
            context.numbers["replays"] += 1
        if all(map(torch.equal, replayed, _first_values(captured, cases[0]))):
            context.fail(f"{context.progress}: other values made no difference, so this proved nothing")


def _set_values(launch: DeviceLaunch, values: object) -> None:
    for name in ("q", "k", "v", "mask"):
        tensor = getattr(launch.case, name)
        if tensor is not None:
            tensor.copy_(getattr(values, name))


def _first_values(launch: DeviceLaunch, case: object) -> list[torch.Tensor]:
    _set_values(launch, case_on(case, "cuda"))
    launch.forget()
    launch.run()
    return launch.bits()
