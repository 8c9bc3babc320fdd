"""Many tiles for each CTA of Hopper's general kernels, which take them in turn where their lengths are known.

A host CTA is one of two, on a GPU one of as many as SMs: the batch grows with them.
"""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel

WINDOWS = (None, (60, 40), (0, 0), (200, 900), (-1, 70), (70, -1))


def case_with_many_tiles(
    kernel: TestedKernel,
    sizes: tuple[int, int],
    *,
    causal: Causal | None = None,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
) -> Case:
    """Six heads of `sizes` rows and keys, or so many that every SM gets several tiles; with sinks."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count if kernel.device == "cuda" else 2
    inputs = random_qkv(kernel, *sizes, batch=sms, heads=3, seed=5)
    return Case(
        **inputs,
        causal=causal,
        window=window,
        scale=scale,
        sinks=random_sinks(kernel, 3, torch.float32),
        p_dropout=0.2 if kernel.info.has_dropout else 0.0,
        philox=PhiloxState(7, 8),
    )


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT])
def test_windows(
    hopper_general_kernel: TestedKernel, window: tuple[int, int] | None, causal: Causal | None
) -> None:
    kernel = hopper_general_kernel
    sizes = (2 * kernel.info.block_m + 3, 3 * kernel.info.block_n + 5)
    if causal is not None and window is not None:
        window = (window[0], -1)
    check_case(kernel, case_with_many_tiles(kernel, sizes, causal=causal, window=window))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=("rows", "keys"))
def test_tiles_without_keys(hopper_general_kernel: TestedKernel, sizes: tuple[int, int]) -> None:
    """The first rows of a head, or none, see no key."""
    kernel = hopper_general_kernel
    tile = kernel.info.block_m
    shape = (sizes[0] * tile + 7, sizes[1] * tile - 9)
    for window in (None, (30, -1)):
        check_case(kernel, case_with_many_tiles(kernel, shape, causal=Causal.BOTTOM_RIGHT, window=window))


def test_a_negative_scale(hopper_general_kernel: TestedKernel) -> None:
    kernel = hopper_general_kernel
    check_case(kernel, case_with_many_tiles(kernel, (kernel.info.block_m + 1, 150), scale=-0.3))


def test_packed_sequences_of_which_the_first_is_empty(hopper_general_kernel: TestedKernel) -> None:
    """A CTA whose tile lies beyond its sequence leaves at once, so it may have no other one."""
    kernel = hopper_general_kernel
    case = Case(
        **random_qkv(kernel, 300, 310, batch=1, heads=3),
        lengths_q=Lengths(cu_seqlens=(0, 0, 70, 71, 300)),
        lengths_k=Lengths(cu_seqlens=(0, 5, 90, 200, 310)),
        p_dropout=0.2 if kernel.info.has_dropout else 0.0,
        philox=PhiloxState(7, 8),
    )
    check_case(kernel, case)
