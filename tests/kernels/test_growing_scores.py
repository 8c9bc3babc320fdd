"""Scores that grow from one key block to the next: the softmax's running reference has to follow in time.

Blocks are visited from the last to the first, so each block's scores exceed those before it by `step` in
units of log2. Beyond the slack of softmax.cuh the reference must move; P would leave fp16's range at 16.
"""

from __future__ import annotations

import math

import pytest

from tests.kernels.harness import TestedKernel, random_inputs
from tests.kernels.numerics import check_numerics


@pytest.mark.parametrize("step", [7, 9, 12, 15, 17, 19, 40])
def test_scores_may_grow_from_block_to_block(fused_kernel: TestedKernel, step: int) -> None:
    check_growing(fused_kernel, step)


def test_negative_scores_may_grow(fused_kernel: TestedKernel) -> None:
    check_growing(fused_kernel, 19, below_zero=True)


def check_growing(fused_kernel: TestedKernel, step: int, *, below_zero: bool = False) -> None:
    """Below zero or from zero on, each block's scores exceed those of the block before it by `step`."""
    info = fused_kernel.info
    blocks = 2 * info.kv_groups + 1
    inputs = random_inputs(fused_kernel, info.block_m + 3, blocks * info.block_n)
    inputs.q.zero_()
    inputs.q[..., 0] = 1
    inputs.k.zero_()
    for block in range(blocks):
        level = -1 - block if below_zero else blocks - 1 - block
        rows = slice(block * info.block_n, (block + 1) * info.block_n)
        inputs.k[:, :, rows, 0] = level * step * math.log(2)
    check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[-1], scale=1.0)
