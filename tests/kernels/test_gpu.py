"""On a GPU only: problems too large for the host target, and runs that have to repeat bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import TestedKernel, random_inputs, run_kernel
from tests.kernels.numerics import check_numerics

pytestmark = pytest.mark.gpu


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k"),
    [(1, 8, 512, 512), (8, 8, 256, 256), (2, 3, 1025, 2049), (1, 2, 8192, 8192), (1, 4, 1, 16384)],
)
def test_large_fused(
    fused_kernel: TestedKernel, batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> None:
    inputs = random_inputs(fused_kernel, seqlen_q, seqlen_k, batch=batch, heads=heads)
    for causal in fused_kernel.alignments:
        check_numerics(fused_kernel, inputs, causal=causal)


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize(("batch", "heads", "seqlen"), [(1, 8, 512), (1, 3, 1025), (1, 2, 4096)])
def test_large_unfused(unfused_kernel: TestedKernel, batch: int, heads: int, seqlen: int) -> None:
    inputs = random_inputs(unfused_kernel, seqlen, seqlen, batch=batch, heads=heads)
    for causal in unfused_kernel.alignments:
        check_numerics(unfused_kernel, inputs, causal=causal)


@pytest.mark.kernels(device="cuda")
def test_repeated_runs_give_the_same_bits(fused_kernel: TestedKernel) -> None:
    inputs = random_inputs(fused_kernel, 333, 555, batch=4, heads=8)
    causal = fused_kernel.alignments[-1]
    expected, expected_lse = run_kernel(fused_kernel, inputs, causal=causal)
    for _ in range(20):
        out, lse = run_kernel(fused_kernel, inputs, causal=causal)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
