"""The GPU against the host library, both in one process, on the same inputs.

Both round P to the inputs' type, accumulate in float32 in an order of their own, and round O. So with u half
a unit in the last place relative to 1 (2^-11 in fp16, 2^-8 in bf16), g = 2^-21 (1 + largest score + |LSE|)
what float32 may cost a score, and W = Σ_j P_ij |V_jc|:

    |O_gpu - O_host| ≤ one unit in the last place of O + (2u + 4g + 2^-20) W + 2^-24 Σ_j |V_jc|
    |LSE_gpu - LSE_host| ≤ 2g + 2^-20

2u: two roundings of P that may go different ways. 4g: the weights and their sum, of two kernels. The last
term is fp16's absolute error where P is subnormal. Without a GPU the twin is another host tile.
"""

from __future__ import annotations

import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, read_kernels
from tests.gpu_report.context import Context, check
from tests.gpu_report.on_device import DeviceLaunch, case_on
from tests.gpu_report.problems import odd_cases
from tests.kernels.general import Case
from tests.kernels.general_numerics import expected
from tests.kernels.numerics import half_ulp

_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_FLOAT32 = 2.0**-21


@check
def twins(context: Context) -> None:
    """Every kernel by name in both libraries, every option at odd sizes."""
    library(Target.HOST).host_configure(num_threads=1)
    for row in context.each_row():
        twin = _twin_of(context, row)
        if twin is None:
            context.numbers["kernels without a twin"] += 1
            continue
        for case in odd_cases(row):
            context.at(f"{row.name}: {case}")
            ours = DeviceLaunch(context.library, row, case_on(case, context.device))
            other = DeviceLaunch(library(Target.HOST), twin, case)
            ours.run()
            other.run()
            for what in differences(context, case, [t.cpu() for t in ours.results], other.results):
                context.fail(f"{context.progress}: {what}")
            context.numbers["launches"] += 1


def _twin_of(context: Context, row: KernelInfo) -> KernelInfo | None:
    rows = read_kernels(library(Target.HOST))
    if context.device == "cuda":
        return next(other for other in rows if other.name == row.name)

    def kind(other: KernelInfo) -> tuple[object, ...]:
        return (
            other.family, other.dtype, other.head_dim, other.is_causal, other.is_general, other.has_dropout,
            other.is_split,
        )  # fmt: skip

    others = [other for other in rows if kind(other) == kind(row) and other.index != row.index]
    return next((other for other in others if other.index > row.index), others[0] if others else None)


def differences(
    context: Context, case: Case, ours: list[torch.Tensor], others: list[torch.Tensor]
) -> list[str]:
    """Where two kernels' (out, softmax_lse) are further apart than the bound; keeps the largest shares."""
    used = ~case.unused_rows()
    ref = expected(case)
    row_lse = ref.lse.masked_fill(ref.lse.isinf(), 0).abs()
    score = _FLOAT32 * (1 + ref.largest_score + row_lse)
    repeat = case.q.shape[1] // case.k.shape[1]
    values = case.v.double().abs().sum(2, keepdim=True).repeat_interleave(repeat, 1)
    a, b = (results[0].double() for results in (ours, others))
    unit = 2 * half_ulp(torch.maximum(a.abs(), b.abs()), case.q.dtype)
    relative = 2 * _ROUNDING[case.q.dtype] + 4 * score[..., None] + 2.0**-20
    p_scale = 1 / (1 - case.p_dropout)
    bound = unit + relative * ref.weight + 2.0**-24 * values * p_scale
    found = _beyond(context, "out", a, b, bound, used)
    context.numbers["elements"] += a[:, :, used].numel()
    context.numbers["elements of the same bits"] += int((ours[0] == others[0])[:, :, used].sum())
    return found + _beyond(
        context, "softmax_lse", ours[1].double(), others[1].double(), 2 * score + 2.0**-20, used
    )


def _beyond(
    context: Context,
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bound: torch.Tensor,
    used: torch.Tensor,
) -> list[str]:
    distance = torch.where(a == b, 0.0, (a - b).abs())  # infinities
    share = (distance / bound)[:, :, used]
    if share.numel() == 0:
        return []
    worst = share.max().item() if not share.isnan().any() else float("nan")
    context.keep_largest(f"{name}: largest share of the bound", worst)
    if worst <= 1:
        return []
    return [f"{name} differs by {worst:.3g} times the bound in {int((~(share <= 1)).sum())} elements"]
