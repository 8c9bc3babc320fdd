"""The float64 reference of merge_states, and the rule that results are held to.

With `ref` computed in float64 from the same parts: |out − ref| ≤ 2^-18 · Σ_i w_i·|out_i| beyond half a unit
in the last place of the output type; |lse − ref| ≤ 2^-20 · max(1, |ref|). NaN and infinities are the
reference's.
"""

from __future__ import annotations

import math

import torch

from tests.kernels.numerics import half_ulp

_OUT_TOLERANCE = 2.0**-18
_LSE_TOLERANCE = 2.0**-20


def reference(
    outs: list[torch.Tensor], lses: list[torch.Tensor], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, and the sum of the weighted sizes, in float64. Parts [batch, heads, seqlen_q, head_dim].

    A part counts for nothing where its lse is -inf, unless the merged one is NaN.
    """
    logits = [lse.double() for lse in lses]
    if sinks is not None:
        logits.append(sinks.double()[:, None].expand(lses[0].shape))
    lse = torch.logsumexp(torch.stack(logits), 0)
    largest = torch.stack(logits).amax(0)
    log_sum = torch.where(lse.isfinite(), torch.logsumexp(torch.stack(logits) - largest, 0), 0.0)
    base = torch.where(lse.isfinite(), largest, lse)  # lse itself has lost log_sum where it is huge
    out = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    size = torch.zeros_like(out)
    for part, part_lse in zip(outs, logits, strict=False):
        is_there = ((part_lse != -math.inf) | lse.isnan())[..., None]
        weight = torch.exp(part_lse - base - log_sum)[..., None]
        out += torch.where(is_there, weight * part.double(), 0.0)
        size += torch.where(is_there, weight * part.double().abs(), 0.0)
    return out, lse, size


def violations(
    out: torch.Tensor,
    lse: torch.Tensor,
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    sinks: torch.Tensor | None = None,
) -> str:
    """What breaks the rule, in words; empty when nothing does."""
    ref, ref_lse, size = reference(outs, lses, sinks)
    rounding = half_ulp(ref, out.dtype) if out.dtype is not torch.float32 else 0.0
    found = []
    allowed = _OUT_TOLERANCE * size + rounding + 1e-30
    if bad := _count(out.double(), ref, allowed):
        found.append(f"(b) out: {bad}")
    if bad := _count(lse.double(), ref_lse, _LSE_TOLERANCE * ref_lse.abs().clamp(min=1)):
        found.append(f"(c) lse: {bad}")
    return "; ".join(found)


def _count(value: torch.Tensor, ref: torch.Tensor, allowed: torch.Tensor) -> str:
    same = (value == ref) | (value.isnan() & ref.isnan())
    bad = ~(same | ((value - ref).abs() <= allowed))
    if not bad.any():
        return ""
    where = tuple(bad.nonzero()[0].tolist())
    return (
        f"{int(bad.sum())} of {bad.numel()}, first {where}: {value[where].item()}, reference "
        f"{ref[where].item()}"
    )
