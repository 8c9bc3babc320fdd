"""Whether results keep to the contract of docs/quantised.md; benchmarks/quantised_data.py has its numbers."""

from __future__ import annotations

import torch

from benchmarks.quantised_data import CONTRACTS, errors_of_heads
from sdpa_cutlass.library.registry import Accuracy
from tests.kernels.general import Case, run_case
from tests.kernels.general_numerics import expected
from tests.kernels.harness import TestedKernel
from tests.kernels.quantized_model import BLOCK


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


def small_values(kernel: TestedKernel, num_blocks: int) -> Case:
    """Uniform attention to tokens that are large in column 0. One of each block is 7.875 times smaller, and
    has in column 3 what its byte 1 stands for, which P's byte 32 multiplies: column 3 of the output is 1 / 64
    of that, which bytes express without an error.
    """
    shape = (1, 1, num_blocks * BLOCK, kernel.info.head_dim)
    v = torch.zeros(shape, dtype=kernel.dtype, device=kernel.device)
    v[..., 0] = 63 / 64
    small = torch.arange(num_blocks, device=kernel.device) * BLOCK
    small += 37 * torch.arange(num_blocks, device=kernel.device) % BLOCK
    v[:, :, small, 0] = 1 / 8
    v[:, :, small, 3] = 1 / 8 / 127
    q = torch.zeros_like(v[:, :, :5])
    return Case(q=q, k=torch.zeros_like(v), v=v)


def check_small_values(kernel: TestedKernel, case: Case) -> None:
    """Of a case of `small_values`, masked or not: column 3 is right, though each block adds kMagic."""
    out, _ = run_case(kernel, case)
    found, want = (x[..., 3].double().cpu() for x in (out, expected(case).out))
    error = ((found - want).abs().max() / want.abs().max()).item()
    assert error < 0.02, f"(a) max error {error:.2e} of a column of small values"
