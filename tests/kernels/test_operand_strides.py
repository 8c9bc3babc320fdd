"""q, k and v that lie differently in memory: a stride of one taken for another's shows.

The strides of axes of extent 1 do not count.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, launch, make_case_params, random_qkv
from tests.kernels.general_numerics import case_violations
from tests.kernels.harness import OUTPUT_POISON, Guarded, Inputs, TestedKernel
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


def _odd_where_single(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements; axes of extent 1, whose strides lead nowhere, get an odd one."""
    strides = (
        stride if extent > 1 else 2 * stride + 1
        for extent, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)
    )
    return tensor.as_strided(tensor.shape, (*strides, 1), tensor.storage_offset())


def check_single_axes(kernel: TestedKernel, rows: int, keys: int) -> None:
    """One batch and one head, and where `rows` or `keys` is 1 one row: all of them with odd strides."""
    inputs = random_qkv(kernel, rows, keys, batch=1, heads=1)
    case = Case(
        **{name: _odd_where_single(tensor) for name, tensor in inputs.items()}, causal=_causal(kernel)
    )
    assert any(stride % 8 for stride in case.q.stride()[:3])
    out = Guarded(case.out_shape, kernel.dtype, kernel.device, poison=OUTPUT_POISON[kernel.dtype])
    launch(kernel, *make_case_params(case, _odd_where_single(out.tensor), None))
    out.check_untouched("out")
    broken = case_violations(case, out.tensor, None)
    assert not broken, f"{kernel}, {case}: {broken}"


def _causal(kernel: TestedKernel) -> Causal | None:
    return Causal.BOTTOM_RIGHT if kernel.info.is_causal else None


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 33), (9, 1), (9, 33)])
def test_strides_of_single_axes_do_not_count(fused_kernel: TestedKernel, rows: int, keys: int) -> None:
    check_single_axes(fused_kernel, rows, keys)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 33), (9, 1), (9, 33)])
def test_strides_of_single_axes_do_not_count_in_general_kernels(
    lengths_kernel: TestedKernel, rows: int, keys: int
) -> None:
    check_single_axes(lengths_kernel, rows, keys)
