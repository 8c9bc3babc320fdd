"""Every general and split kernel with smaller head dimensions than its own: predicated loads and stores.

NaNs lie right behind each row of q, k and v, so that a column too many shows in the result; `out` is
watched in the same place.
"""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.library.registry import Op
from sdpa_cutlass.problem import Causal
from sdpa_cutlass.public.api import kernels
from tests.kernels.general import Case, random_qkv
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import random_mask


def served(kernel: TestedKernel) -> list[int]:
    """The head_dims for which no smaller kernel of its kind is in the library, and the smallest of all."""
    smaller = [
        row.head_dim
        for row in kernels(kernel.library.build.target)
        if row.op is Op.FORWARD
        and row.is_general
        and row.is_split == kernel.info.is_split
        and row.head_dim < kernel.info.head_dim
        and row.family is kernel.info.family
    ]
    return [8, *range(max(smaller, default=8) + 8, kernel.info.head_dim + 8, 8)]


def sizes(kernel: TestedKernel) -> tuple[int, int]:
    return 37, (kernel.info.kv_groups + 1) * kernel.info.block_n - 7


@pytest.mark.parametrize("spare_columns", [0, 8])
def test_head_dims(lengths_kernel: TestedKernel, spare_columns: int) -> None:
    rows, keys = sizes(lengths_kernel)
    for head_dim in served(lengths_kernel):
        inputs = random_qkv(
            lengths_kernel, rows, keys, batch=1, head_dim=head_dim, spare_columns=spare_columns, bshd=True
        )
        case = Case(**inputs, causal=Causal.BOTTOM_RIGHT)
        check_case(lengths_kernel, case, bshd=True, spare_columns=spare_columns)


def test_head_dim_of_v(lengths_kernel: TestedKernel) -> None:
    """Smaller and larger than that of q and k."""
    rows, keys = sizes(lengths_kernel)
    own = lengths_kernel.info.head_dim
    for head_dim, head_dim_v in [(own, 8), (8, own), (own - 8, own), (own, own - 16), (16, 24), (24, 8)]:
        inputs = random_qkv(
            lengths_kernel,
            rows,
            keys,
            batch=1,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            spare_columns=16,
            bshd=head_dim > head_dim_v,
        )
        check_case(lengths_kernel, Case(**inputs), spare_columns=24)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float32"])
def test_beside_masks_and_a_negative_scale(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """The sign of a negative scale is moved to Q, whose columns end early."""
    rows, keys = sizes(general_kernel)
    head_dim = served(general_kernel)[1]
    inputs = random_qkv(general_kernel, rows, keys, head_dim=head_dim, spare_columns=8)
    mask = random_mask(dtype, (2, 1, rows, keys), general_kernel.device)
    case = Case(**inputs, mask=mask, scale=-0.3)
    check_case(general_kernel, case, spare_columns=8)


def test_beside_a_negative_scale(lengths_kernel: TestedKernel) -> None:
    rows, keys = sizes(lengths_kernel)
    head_dim = served(lengths_kernel)[1]
    inputs = random_qkv(lengths_kernel, rows, keys, head_dim=head_dim, spare_columns=8)
    check_case(lengths_kernel, Case(**inputs, scale=-0.3), spare_columns=8)
