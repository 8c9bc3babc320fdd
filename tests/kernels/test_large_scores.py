"""Scores far from 0: one key wins each row, and its value has to come out bit for bit.

The softmax's reference is a rounded product, so what a row's largest weight is depends on how its score is
rounded: see kSharp in softmax.cuh. Every kind of kernel is tested with scores from 100 to 1e5, with the
largest finite inputs, and with rows of all sizes side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, run_case
from tests.kernels.general_numerics import case_violations, references
from tests.kernels.harness import Inputs, TestedKernel, run_kernel
from tests.kernels.masks import mask_dtypes, random_mask

LARGEST_SCORES = (1e2, 1e3, 1e4, 1e5)
_DECISIVE = 1e-9  # the weight of all keys but one: nothing of it is left in a result of 16 bits
_EXACT = 1e-7  # less than a unit in the last place of values of V that count
STATE = PhiloxState(11, 22)


def run(kernel: TestedKernel, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse) of any fused kernel."""
    if kernel.info.is_general:
        return run_case(kernel, case)
    return run_kernel(kernel, Inputs(case.q, case.k, case.v), causal=case.causal, scale=case.scale)


def sizes(kernel: TestedKernel) -> tuple[int, int]:
    """A few rows of two warps, and two blocks of keys and some for each group of warps."""
    return min(kernel.info.block_m, 37), (kernel.info.kv_groups + 1) * kernel.info.block_n + 13


def with_largest_score(case: Case, largest: float) -> Case:
    """The same with a scale that makes `largest` the size of the largest score."""
    repeat = case.q.shape[1] // case.k.shape[1]
    scores = case.q.double() @ case.k.double().repeat_interleave(repeat, 1).transpose(-1, -2)
    return replace(case, scale=largest / scores.abs().max().item())


def check_scores_of_all_sizes(kernel: TestedKernel, case: Case) -> None:
    for largest in LARGEST_SCORES:
        check_large(kernel, with_largest_score(case, largest))


def check_large(kernel: TestedKernel, case: Case) -> torch.Tensor:
    """Runs the kernel. Holds it to the rule of general_numerics.py, to (a) of numerics.py without any slack,
    and to exact results in rows where one key has all the weight.
    """
    out, lse = run(kernel, case)
    broken = case_violations(case, out, lse)
    assert not broken, f"{kernel}, {case}: {broken}"
    used = ~case.unused_rows().to(out.device)
    ref, chain = references(case, out.dtype)
    error = (out.double() - ref.out).abs()[:, :, used]
    chain_error = (chain.out.double() - ref.out).abs()[:, :, used]
    worst, allowed = error.max().item(), 2 * chain_error.max().item() + 1e-5
    assert worst <= allowed, f"{kernel}, {case}: (a) max error {worst:.3e}, allowed {allowed:.3e}"
    if not case.has_lengths:
        decisive = ref.largest_weight[:, :, used] > 1 - _DECISIVE
        worst = error.masked_fill(~decisive, 0).max().item()
        assert worst <= _EXACT, f"{kernel}, {case}: (a) max error {worst:.3e} where one key wins"
    return out


def test_plain(fused_kernel: TestedKernel) -> None:
    inputs = random_qkv(fused_kernel, *sizes(fused_kernel), batch=1)
    for causal in fused_kernel.alignments:
        check_scores_of_all_sizes(fused_kernel, Case(**inputs, causal=causal))


def test_masks_and_biases(general_kernel: TestedKernel) -> None:
    rows, keys = sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys, batch=1)
    check_scores_of_all_sizes(general_kernel, Case(**inputs))
    for i, dtype in enumerate(mask_dtypes(general_kernel.info)):
        mask = random_mask(dtype, (rows, keys), general_kernel.device, seed=i)
        causal = (None, *Causal)[i % 3]
        check_scores_of_all_sizes(general_kernel, Case(**inputs, mask=mask, causal=causal))


def test_dropout(dropout_kernel: TestedKernel) -> None:
    rows, keys = sizes(dropout_kernel)
    inputs = random_qkv(dropout_kernel, rows, keys, batch=1)
    for dtype in (None, *mask_dtypes(dropout_kernel.info)):
        mask = None if dtype is None else random_mask(dtype, (rows, keys), dropout_kernel.device)
        case = Case(**inputs, mask=mask, p_dropout=0.5, philox=STATE)
        check_scores_of_all_sizes(dropout_kernel, case)


def test_lengths_and_splits(lengths_kernel: TestedKernel) -> None:
    rows, keys = sizes(lengths_kernel)
    inputs = random_qkv(lengths_kernel, rows, keys, heads=4, heads_kv=2)
    lengths = Lengths(seqlens=(keys, keys // 2 + 1))
    for causal in (None, Causal.BOTTOM_RIGHT):
        check_scores_of_all_sizes(lengths_kernel, Case(**inputs, causal=causal))
        check_scores_of_all_sizes(lengths_kernel, Case(**inputs, causal=causal, lengths_k=lengths))


def one_size(kernel: TestedKernel, case: Case) -> Case:
    """Every element 133120, or 57344 where that is too large: each key has the same weight.

    Float32 holds the sums of their products exactly.
    """
    value = 133120.0 if kernel.dtype is torch.bfloat16 else 57344.0
    for tensor in (case.q, case.k):
        tensor.fill_(value)
    return case


def largest_finite(kernel: TestedKernel, case: Case) -> Case:
    """Rows of the largest finite number and its negative; the keys' sizes differ. No score exceeds 1e38.

    Few columns count: what float32 loses in sums of one sign is not tested here.
    """
    largest = torch.finfo(kernel.dtype).max
    case.q.zero_()
    case.q[..., :8] = largest
    case.q[:, :, ::3, :8] = -largest
    order = torch.randperm(case.k.shape[2], generator=torch.Generator().manual_seed(5)) + 1
    shares = (order / len(order)).to(case.k.device)[:, None]
    case.k.copy_((shares * min(largest, 1e38 / largest / case.k.shape[3])).to(kernel.dtype))
    return case


def all_sizes(kernel: TestedKernel, case: Case) -> Case:
    """From row to row 16 times as much, and small again."""
    rows = torch.arange(case.q.shape[2], device=case.q.device) % 5
    case.q.mul_((2.0 ** (4 * rows - 6)).to(kernel.dtype)[:, None])
    return case


def negative(kernel: TestedKernel, case: Case) -> Case:
    """All scores far below 0, and those of the last keys, which come first, the lowest."""
    keys = torch.arange(case.k.shape[2], device=case.k.device)
    case.q.fill_(16.0)
    case.k.copy_((-(keys + 100.0)).to(kernel.dtype)[:, None].expand(case.k.shape))
    return case


HUGE: dict[str, Callable[[TestedKernel, Case], Case]] = {
    "one-size": one_size,
    "largest-finite": largest_finite,
    "all-sizes": all_sizes,
    "negative": negative,
}


@pytest.mark.parametrize("change", HUGE)
def test_huge_inputs(fused_kernel: TestedKernel, change: str) -> None:
    case = HUGE[change](fused_kernel, Case(**random_qkv(fused_kernel, *sizes(fused_kernel), batch=1)))
    for causal in fused_kernel.alignments:
        check_large(fused_kernel, replace(case, causal=causal))


@pytest.mark.parametrize("change", HUGE)
def test_huge_inputs_of_general_kernels(general_kernel: TestedKernel, change: str) -> None:
    rows, keys = sizes(general_kernel)
    case = HUGE[change](general_kernel, Case(**random_qkv(general_kernel, rows, keys, batch=1)))
    check_large(general_kernel, case)
    for dtype in mask_dtypes(general_kernel.info):
        mask = random_mask(dtype, (rows, keys), general_kernel.device)
        check_large(general_kernel, replace(case, mask=mask))


@pytest.mark.parametrize("change", HUGE)
def test_huge_inputs_with_dropout(dropout_kernel: TestedKernel, change: str) -> None:
    case = Case(**random_qkv(dropout_kernel, *sizes(dropout_kernel), batch=1), p_dropout=0.5, philox=STATE)
    check_large(dropout_kernel, HUGE[change](dropout_kernel, case))


@pytest.mark.parametrize("change", HUGE)
def test_huge_inputs_of_lengths_and_splits(lengths_kernel: TestedKernel, change: str) -> None:
    rows, keys = sizes(lengths_kernel)
    case = HUGE[change](lengths_kernel, Case(**random_qkv(lengths_kernel, rows, keys)))
    check_large(lengths_kernel, case)
    check_large(lengths_kernel, replace(case, lengths_k=Lengths(seqlens=(keys, keys // 2 + 1))))


def test_a_token_of_its_own_value(fused_kernel: TestedKernel) -> None:
    """q = k = v, one token: the result is v."""
    case = one_size(fused_kernel, Case(**random_qkv(fused_kernel, 1, 1, batch=1)))
    case.v.copy_(case.k)
    out, _ = run(fused_kernel, replace(case, causal=fused_kernel.alignments[0]))
    assert torch.equal(out, case.v.expand_as(out))


@pytest.mark.parametrize("scale", [3e38, -3e38])
def test_queries_of_zero_under_the_largest_scales(fused_kernel: TestedKernel, scale: float) -> None:
    """The mean of V over the keys that a row sees."""
    inputs = random_qkv(fused_kernel, *sizes(fused_kernel), batch=1)
    inputs["q"].zero_()
    check_large(fused_kernel, Case(**inputs, causal=fused_kernel.alignments[-1], scale=scale))


def test_a_scale_of_zero_under_large_scores(fused_kernel: TestedKernel) -> None:
    inputs = random_qkv(fused_kernel, *sizes(fused_kernel), batch=1)
    factor = 1e15 if fused_kernel.dtype is torch.bfloat16 else 20.0
    for name in ("q", "k"):
        inputs[name].mul_(factor)
    check_large(fused_kernel, Case(**inputs, causal=fused_kernel.alignments[-1], scale=0.0))


def test_nan_stays_in_its_row_beside_the_lowest_biases(general_kernel: TestedKernel) -> None:
    rows, keys = sizes(general_kernel)
    for dtype in mask_dtypes(general_kernel.info)[1:]:
        case = Case(**random_qkv(general_kernel, rows, keys, batch=1))
        case.q[:, :, 3] = math.nan
        mask = torch.full((rows, keys), torch.finfo(dtype).min, dtype=dtype, device=general_kernel.device)
        out, _ = run(general_kernel, replace(case, mask=mask))
        assert out[:, :, 3].isnan().all()
        out[:, :, 3] = 0
        assert out.isfinite().all()
