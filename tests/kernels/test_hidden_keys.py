"""What a hidden key holds does not matter: a mask by position selects scores and never adds to them."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.harness import TestedKernel, random_inputs, run_kernel


@pytest.mark.kernels(causal=True)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_reaches_only_rows_that_see_it(fused_kernel: TestedKernel, value: float) -> None:
    """Rows in front of the key are those of a clean key, to rounding; rows from it on are NaN where it is."""
    rows = 2 * fused_kernel.info.block_m + 9
    key = fused_kernel.info.block_m + fused_kernel.info.block_m // 2
    clean = random_inputs(fused_kernel, rows, rows)
    expected, expected_lse = run_kernel(fused_kernel, clean, causal=Causal.TOP_LEFT)
    dirty = random_inputs(fused_kernel, rows, rows)
    dirty.k[:, :, key] = value
    out, lse = run_kernel(fused_kernel, dirty, causal=Causal.TOP_LEFT)
    assert out[:, :, key].isnan().all()
    assert lse is not None
    assert expected_lse is not None
    torch.testing.assert_close(out[:, :, :key], expected[:, :, :key], atol=2e-3, rtol=8e-3)
    torch.testing.assert_close(lse[:, :, :key], expected_lse[:, :, :key], atol=1e-4, rtol=1e-6)
