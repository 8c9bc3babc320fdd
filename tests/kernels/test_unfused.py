"""Numerics of the piped baseline: the same rule as for the fused kernels, on a smaller grid."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import Inputs, TestedKernel, random_inputs
from tests.kernels.numerics import check_numerics


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 97), (97, 1), (65, 129), (130, 63), (40, 260)]
)
def test_sizes(unfused_kernel: TestedKernel, seqlen_q: int, seqlen_k: int) -> None:
    inputs = random_inputs(unfused_kernel, seqlen_q, seqlen_k)
    for causal in unfused_kernel.alignments:
        for with_lse in (True, False):  # the logits are float32 with it, float16 without
            check_numerics(unfused_kernel, inputs, causal=causal, with_lse=with_lse)


@pytest.mark.parametrize("bshd", [False, True], ids=["bhsd", "bshd"])
def test_heads_and_strides(unfused_kernel: TestedKernel, bshd: bool) -> None:
    inputs = random_inputs(unfused_kernel, 33, 70, batch=2, heads=4, heads_kv=2, bshd=bshd)
    check_numerics(unfused_kernel, inputs, causal=unfused_kernel.alignments[-1], bshd=bshd)


def test_expanded_batch(unfused_kernel: TestedKernel) -> None:
    one = random_inputs(unfused_kernel, 33, 70, heads=2)
    inputs = Inputs(*(tensor.expand(2, -1, -1, -1) for tensor in (one.q, one.k, one.v)))
    check_numerics(unfused_kernel, inputs, causal=unfused_kernel.alignments[-1])


@pytest.mark.parametrize("scale", [0.0, -0.2, 30.0])
def test_scales(unfused_kernel: TestedKernel, scale: float) -> None:
    inputs = random_inputs(unfused_kernel, 50, 71)
    check_numerics(unfused_kernel, inputs, causal=unfused_kernel.alignments[-1], scale=scale)


@pytest.mark.kernels(causal=True)
def test_fully_masked_rows_are_zero_and_minus_infinity(unfused_kernel: TestedKernel) -> None:
    inputs = random_inputs(unfused_kernel, 140, 41)
    out, lse = check_numerics(unfused_kernel, inputs, causal=unfused_kernel.alignments[-1])
    assert (out[:, :, :99] == 0).all()
    assert (lse[:, :, :99] == -torch.inf).all()
