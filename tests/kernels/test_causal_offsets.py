"""Diagonals that meet the border of a key block: which blocks need no mask is decided there, to one key."""

from __future__ import annotations

import pytest

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, random_qkv
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel, random_inputs
from tests.kernels.numerics import check_numerics

ROWS = 3  # a few rows show it: only a tile's first row decides which blocks are seen whole


def keys_of(kernel: TestedKernel, beside: int) -> int:
    """So many that the last key of the first row is `beside` the first key of the third block."""
    return 2 * kernel.info.block_n + beside + ROWS


@pytest.mark.kernels(causal=True)
@pytest.mark.parametrize("beside", [-2, -1, 0, 1])
def test_first_row_ends_beside_a_block(fused_kernel: TestedKernel, beside: int) -> None:
    inputs = random_inputs(fused_kernel, ROWS, keys_of(fused_kernel, beside))
    check_numerics(fused_kernel, inputs, causal=Causal.BOTTOM_RIGHT)


@pytest.mark.parametrize("beside", [-2, -1, 0, 1])
def test_first_row_ends_beside_a_block_of_a_general_kernel(lengths_kernel: TestedKernel, beside: int) -> None:
    inputs = random_qkv(lengths_kernel, ROWS, keys_of(lengths_kernel, beside), batch=1, heads=1)
    check_case(lengths_kernel, Case(**inputs, causal=Causal.BOTTOM_RIGHT))
