"""Rotating queries and keys by a Hadamard matrix before they become bytes: what docs/quantised.md says of it.

The caller does it, and the scores do not change but for rounding: (Q H)(K H)ᵀ = Q Kᵀ.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.rotation import (
    Tensors,
    hadamard,
    large_channels,
    normal,
    one_large_key,
    rotated_bias,
    worst_error,
)
from sdpa_cutlass import Precision


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("make", "least", "most"),
    [(rotated_bias, 0.0, 0.5), (large_channels, 0.0, 0.7), (normal, 0.9, 1.1), (one_large_key, 0.9, 3.0)],
)
def test_what_rotating_brings(
    device: str,
    precision: Precision,
    head_dim: int,
    make: Callable[[int], Tensors],
    least: float,
    most: float,
) -> None:
    """The error with it over the error without."""
    matrix = hadamard(head_dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim), atol=1e-6, rtol=0)
    tensors = make(head_dim)
    plain = worst_error(tensors, device, precision, None)
    rotated = worst_error(tensors, device, precision, matrix)
    assert least <= rotated / plain <= most, f"{plain:.1e} without, {rotated:.1e} with"
