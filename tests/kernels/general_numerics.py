"""The numerics rule of numerics.py for general kernels: float64 with mask, lengths and dropout.

(a) max|out − ref| ≤ max(2 · max|chain − ref|, slack) + half a unit in the last place + 1e-5.
(b) every |out − ref| ≤ max(1e-3 · max(1, |ref|), slack) beyond half a unit in the last place.
(c) softmax_lse as there; dropout does not change it.
Slack is what rounding the weights to the input's type, and the scores to float32, may cost in that row:
weights are divided by p_keep, and scores may be as large as a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sdpa_cutlass.dropout import dropout_mask
from tests.kernels.general import Case, Sequence, run_case
from tests.kernels.harness import TestedKernel
from tests.kernels.numerics import Latest, half_ulp, matmul, visible

LARGEST_SCORE = 1e38  # finite scores beyond it count as this: the softmax's own units are log2, in float32
_HUGE = 1e30  # scores of this size swallow all differences between the others, here as in the kernels
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_FLOAT32_SLACK = 2.0**-21  # four units in the last place
_LSE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Expected:
    """Results in the shapes of q; rows of no sequence are NaN. The last three are there in float64 alone."""

    out: torch.Tensor
    lse: torch.Tensor
    weight: torch.Tensor  # Σ_j P_ij |V_jc|, with dropout
    largest_weight: torch.Tensor  # [B, H, Sq, 1], without dropout; 0 in rows without keys
    largest_score: float  # Σ_d |Q_id| |K_jd| · |scale|, the largest over i and j


def expected(case: Case, dtype: torch.dtype = torch.float64) -> Expected:
    """The plain chain, every step in `dtype`."""
    shape = case.out_shape
    device = case.q.device
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    lse = torch.full(shape[:3], torch.nan, dtype=dtype, device=device)
    weight = torch.zeros(shape, dtype=dtype, device=device)
    largest_weight = torch.zeros((*shape[:3], 1), dtype=dtype, device=device)
    largest = 0.0
    kept = None
    if case.p_dropout:
        sizes = (case.batch, shape[1], case.seqlen_q, case.seqlen_k)
        kept = dropout_mask(*sizes, case.p_dropout, case.philox, device=device)
    repeat = shape[1] // case.k.shape[1]
    for b, (sequence_q, sequence_k) in enumerate(case.sequences):
        rows = slice(sequence_q.first_row, sequence_q.first_row + sequence_q.num_rows)
        out[sequence_q.index, :, rows] = 0
        lse[sequence_q.index, :, rows] = -math.inf
        attending = slice(sequence_q.first_row, sequence_q.first_row + sequence_q.length)
        if case.sinks is not None:
            lse[sequence_q.index, :, attending] = case.sinks[:, None].to(dtype)
        if sequence_q.length == 0 or sequence_k.length == 0:
            continue
        q = _rows(case.q, sequence_q).to(dtype).contiguous()  # cuBLAS refuses strides beyond 2^31
        k, v = (
            _rows(t, sequence_k).to(dtype).contiguous().repeat_interleave(repeat, 0) for t in (case.k, case.v)
        )
        scores = matmul(q, k.transpose(-1, -2)) * case.softmax_scale
        size = (sequence_q.length, sequence_k.length)
        seen = visible(*size, case.causal, device).expand(scores.shape)
        if case.window is not None:
            offset = size[1] - size[0] if case.is_bottom_right else 0
            left, right = case.window
            if left >= 0:
                seen = seen & torch.ones_like(seen).triu(offset - left)
            if right >= 0:
                seen = seen & torch.ones_like(seen).tril(offset + right)
        if case.mask is not None:
            mask = case.full_mask[b, :, : size[0], : size[1]]
            if mask.dtype is torch.bool:
                seen = seen & mask
            else:
                seen = seen & (mask > -math.inf)
                scores = scores + mask.to(dtype)
        limit = min(LARGEST_SCORE, torch.finfo(dtype).max)
        scores = scores.clamp(-limit, limit).masked_fill(~seen, -math.inf)
        if case.sinks is not None:  # one more column, which is dropped again
            column = case.sinks[:, None, None].to(dtype).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], -1)
        p = scores.softmax(-1)[..., : size[1]].masked_fill(~seen, 0)
        if dtype is torch.float64:
            largest_weight[sequence_q.index, :, attending] = p.amax(-1, keepdim=True)
        if kept is not None:
            p = p.masked_fill(~kept[b, :, : size[0], : size[1]], 0) * (1 / (1 - case.p_dropout))
        out[sequence_q.index, :, attending] = matmul(p, v)
        lse[sequence_q.index, :, attending] = scores.logsumexp(-1)
        if dtype is not torch.float64:  # the bounds come from the reference
            continue
        weight[sequence_q.index, :, attending] = p @ v.abs()
        bound = (q.abs() @ k.abs().transpose(-1, -2)).masked_fill(~seen, 0).max().item()
        largest = max(largest, bound * abs(case.softmax_scale))
    return Expected(out, lse, weight, largest_weight, largest)


def _rows(tensor: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    first = sequence.first_row
    return tensor[sequence.index, :, first : first + sequence.length]


# Of a case that several launches compute: in float64, and the chain.
references = Latest(lambda case, dtype: (expected(case), expected(case, dtype)))


def case_violations(case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> str:
    """What breaks the rule, in words; empty when nothing does."""
    used = ~case.unused_rows().to(out.device)
    if not used.any():
        return ""
    ref, chain = references(case, out.dtype)
    found = []
    # What was rounded lies between the two, and the steps double at every power of two.
    ulp = half_ulp(torch.maximum(ref.out.abs(), out.double().abs()), out.dtype)
    error = (out.double() - ref.out).abs()[:, :, used]
    chain_error = (chain.out.double() - ref.out).abs()[:, :, used].max().item()
    row_lse = ref.lse.masked_fill(ref.lse == -math.inf, 0).abs()
    resolution = _FLOAT32_SLACK * row_lse.masked_fill(row_lse > _HUGE, 0)
    slack = (_ROUNDING[out.dtype] + resolution[..., None]) * ref.weight
    # With a few keys the chain's own error may by chance be far less than what rounding P can cost.
    allowed = max(2 * chain_error, slack[:, :, used].max().item()) + ulp[:, :, used].max().item() + 1e-5
    if not error.max().item() <= allowed:
        found.append(f"(a) max error {error.max().item():.3e}, allowed {allowed:.3e}")
    limits = ulp + torch.maximum(1e-3 * ref.out.abs().clamp(min=1), slack)
    bad = ~((out.double() - ref.out).abs() <= limits) & used[:, None]
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        found.append(
            f"(b) {int(bad.sum())} of {bad.numel()} elements, first {where}: {out[where].item():.6f}, "
            f"reference {ref.out[where].item():.6f}"
        )
    if lse is not None:
        same = lse.double() == ref.lse  # infinities
        lse_error = torch.where(same, 0.0, (lse.double() - ref.lse).abs())
        limits = _LSE_TOLERANCE + _FLOAT32_SLACK * (ref.largest_score + row_lse)
        bad = ~(lse_error <= limits) & used
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            found.append(
                f"(c) {int(bad.sum())} of {bad.numel()} rows of softmax_lse, "
                f"first {where}: {lse[where].item():.6f}, reference {ref.lse[where].item():.6f}"
            )
    return "; ".join(found)


def check_case(
    kernel: TestedKernel, case: Case, *, with_lse: bool = True, bshd: bool = False, spare_columns: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs `kernel` and applies the rule. Returns (out, softmax_lse)."""
    out, lse = run_case(kernel, case, with_lse=with_lse, bshd=bshd, spare_columns=spare_columns)
    broken = case_violations(case, out, lse)
    assert not broken, f"{kernel}, {case}: {broken}"
    return out, lse
