"""q, k and v that lie differently in memory, so that a stride of one taken for another's shows."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.harness import Inputs, TestedKernel
from tests.kernels.numerics import check_numerics


def _lying(
    kernel: TestedKernel, shape: tuple[int, int, int, int], *, order: tuple[int, int, int], spare: int
) -> torch.Tensor:
    """Seeded values [B, H, S, D]: axes `order` from the outermost on, NaNs in `spare` columns of each row."""
    *outer, head_dim = shape
    storage = torch.full((*(outer[axis] for axis in order), head_dim + spare), torch.nan, dtype=kernel.dtype)
    back = [order.index(axis) for axis in range(3)]
    view = storage.to(kernel.device).permute(*back, 3)[..., :head_dim]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(spare + shape[2]))
    return view.copy_(values * (0.125 if kernel.dtype is torch.bfloat16 else 1.0))


@pytest.mark.parametrize("turn", range(3))
def test_every_operand_has_its_own_strides(fused_kernel: TestedKernel, turn: int) -> None:
    """Three orders of the axes and three widths of a row, dealt out to q, k and v in turn."""
    orders = list(itertools.islice(itertools.cycle([(0, 1, 2), (0, 2, 1), (1, 0, 2)]), turn, turn + 3))
    head_dim = fused_kernel.info.head_dim
    q = _lying(fused_kernel, (2, 4, 41, head_dim), order=orders[0], spare=8)
    k = _lying(fused_kernel, (2, 2, 83, head_dim), order=orders[1], spare=16)
    v = _lying(fused_kernel, (2, 2, 83, head_dim), order=orders[2], spare=24)
    assert len({tensor.stride() for tensor in (q, k, v)}) == 3
    check_numerics(fused_kernel, Inputs(q, k, v), causal=fused_kernel.alignments[-1])
