"""Whether results keep to the contract of docs/quantised.md; benchmarks/quantised_data.py has its numbers."""

from __future__ import annotations

import torch

from benchmarks.quantised_data import CONTRACTS, errors_of_heads
from sdpa_cutlass.library.registry import Accuracy
from tests.kernels.general import Case
from tests.kernels.general_numerics import expected


def contract_violations(
    accuracy: Accuracy,
    case: Case,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    is_normal: bool,
    few_keys: bool,
    slack: float = 1.0,
) -> str:
    """What breaks the contract, in words; empty when nothing does. The worst head counts. `slack` multiplies
    what is allowed.
    """
    contract, ref = CONTRACTS[accuracy], expected(case)
    error, angle = errors_of_heads(out, ref.out)
    allowed = slack * (contract.normal if is_normal else contract.every_family)
    allowed_angle = slack * (contract.cosine_normal if is_normal else contract.cosine_every)
    found = []
    if not error.max().item() <= allowed:
        found.append(f"(a) max error {error.max().item():.3e} of a head, allowed {allowed:.3e}")
    if not angle.max().item() <= allowed_angle:
        found.append(f"(b) 1 - cosine {angle.max().item():.3e} of a head, allowed {allowed_angle:.3e}")
    if lse is not None:
        allowed_lse = slack * (contract.lse_of_few_keys if few_keys else contract.lse)
        allowed_lse *= max(1.0, _largest_logit(case))
        same = (lse.double() == ref.lse) | ref.lse.isnan()
        lse_error = torch.where(same, 0.0, (lse.double() - ref.lse).abs()).max().item()
        if not lse_error <= allowed_lse:
            found.append(f"(c) softmax_lse is off by {lse_error:.3e}, allowed {allowed_lse:.3e}")
    return "; ".join(found)


def _largest_logit(case: Case) -> float:
    repeat = case.q.shape[1] // case.k.shape[1]
    k = case.k.double().repeat_interleave(repeat, 1)
    return (case.q.double() @ k.transpose(-1, -2)).abs().max().item() * abs(case.softmax_scale)
