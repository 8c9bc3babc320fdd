"""Who is blamed for a fault. Each check ends with a broken CUDA context, so it has its process to itself."""

from __future__ import annotations

import os

import torch

from sdpa_cutlass.call import checks
from sdpa_cutlass.call.launch import Plan, library_for, make_params
from sdpa_cutlass.errors import LaunchError
from tests.gpu_report import planted
from tests.gpu_report.context import Context, check
from tests.gpu_report.launching import Launch
from tests.gpu_report.memory import DeviceMemory
from tests.gpu_report.placement import Layout, Placement
from tests.gpu_report.problems import sized_case
from tests.kernels.harness import TORCH_DTYPES

_NOWHERE = 0x10  # no memory is mapped there
_STORE = 'extern "C" __global__ void planted(int *data) { data[threadIdx.x] = 1; }'
_EARLIER = "earlier work in this process had already failed"


def _launch(context: Context, memory: DeviceMemory) -> Launch:
    row = context.rows()[0]
    case = sized_case(row, heads=1, seqlen_q=33, seqlen_k=65)
    return Launch(context.library, row, case, Placement(memory, Layout.PLAIN))


def _synchronize(context: Context, memory: DeviceMemory) -> None:
    try:
        memory.synchronize()
    except RuntimeError:
        return
    context.fail(f"{context.progress}: no fault happened, so this proved nothing")


def _expect_refusal(context: Context, ours: Launch) -> None:
    """A launch after a fault is refused and says that earlier work is to blame."""
    try:
        ours.run()
    except LaunchError as error:
        if _EARLIER not in str(error):
            context.fail(f"{context.progress}: the message blames us: {error}")
    else:
        context.fail(f"{context.progress}: it was not refused")
    context.numbers["faults"] += 1


@check
def fault_of_another(context: Context) -> None:
    """Another kernel writes where no memory is; our next launch is refused and names earlier work."""
    memory = DeviceMemory()
    ours = _launch(context, memory)
    ours.run()
    ours.results()
    context.at("a launch after another kernel's fault")
    planted.launch(planted.compiled(_STORE), _NOWHERE)
    _synchronize(context, memory)
    _expect_refusal(context, ours)


@check
def fault_of_ours(context: Context) -> None:
    """Our own kernel faults while launches block: the error names the kernel and the shape, and nobody else.

    Without CUDA_LAUNCH_BLOCKING a launch is over before its fault; the report sets it for this check.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        raise RuntimeError("this check needs CUDA_LAUNCH_BLOCKING=1")
    row = next(row for row in context.rows() if not row.is_general and not row.is_causal)
    query = torch.zeros(1, 1, 33, row.head_dim, dtype=TORCH_DTYPES[row.dtype], device="cuda")
    operands = checks.canonical_operands(query, query, query, enable_gqa=False)
    problem = checks.problem_of(operands, None)
    out = torch.empty_like(query)
    library, device = library_for(query)
    params = make_params(problem, 1.0, query, query, query, out, None)
    plan = Plan(library, row, problem, params, device)
    plan.launch_at(query.data_ptr(), query.data_ptr(), query.data_ptr(), out, None)
    context.at("our own fault")
    try:
        plan.launch_at(query.data_ptr(), _NOWHERE, query.data_ptr(), out, None)
    except LaunchError as error:
        text = str(error)
        if row.name not in text or "seqlen_q=33" not in text:
            context.fail(f"{context.progress}: kernel and shape are not named: {text}")
        if _EARLIER in text:
            context.fail(f"{context.progress}: earlier work is blamed for it: {text}")
    else:
        context.fail(f"{context.progress}: it was not reported")
    context.numbers["faults"] += 1


@check
def fault_comes_late(context: Context) -> None:
    """Our own fault surfaces after the launch, which cannot know; the launch after it says earlier work."""
    memory = DeviceMemory()
    ours = _launch(context, memory)
    ours.run()
    context.at("a launch after a fault that came late")
    ours.params.k = _NOWHERE
    ours.run()
    _synchronize(context, memory)
    _expect_refusal(context, ours)
