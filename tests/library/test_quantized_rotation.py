"""Rotating queries and keys by a Hadamard matrix before they become bytes: what docs/quantised.md says of it.

The caller does it, and the scores do not change but for rounding: (Q H)(K H)ᵀ = Q Kᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from benchmarks.quantised_data import errors_of_heads
from sdpa_cutlass import Precision, attention, quantize_kv
from tests.library.reference import rand

HEADS, ROWS, KEYS = 4, 64, 512
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hadamard(n: int) -> torch.Tensor:
    """Of size n, a power of two, normalised: its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(n)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of the rows' positions, base 10,000."""
    rows, columns = x.shape[-2:]
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-2 * torch.arange(columns // 2) / columns)
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., : columns // 2], x[..., columns // 2 :]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def normal(head_dim: int) -> Tensors:
    q, k, v = (rand(1, HEADS, KEYS, head_dim, device="cpu", dtype=torch.float32, seed=i) for i in range(3))
    return q, k, v


def rotated_bias(head_dim: int) -> Tensors:
    """Two channels of K in fast-rotating pairs are 40 for every key, before the rotary embedding."""
    q, k, v = normal(head_dim)
    for head in range(HEADS):
        k[0, head, :, [head % 3, head % 3 + 1]] += 40.0
    return rotary(q)[:, :, -ROWS:], rotary(k), v


def large_channels(head_dim: int) -> Tensors:
    """Two channels of Q are 12 times larger than others, and of K 8 times."""
    q, k, v = normal(head_dim)
    q = q[:, :, :ROWS].clone()
    for head in range(HEADS):
        q[0, head, :, 5 * head : 5 * head + 2] *= 12
        k[0, head, :, 5 * head : 5 * head + 2] *= 8
    return q / 4, k, v


def one_large_key(head_dim: int) -> Tensors:
    """The first key is 60 times larger than others."""
    q, k, v = normal(head_dim)
    k[:, :, 0] *= 60
    return q[:, :, :ROWS], k, v


def worst_error(tensors: Tensors, device: str, precision: Precision, matrix: torch.Tensor | None) -> float:
    """Relative L2, of the worst head."""
    q, k, v = (tensor.to(device, torch.float16) for tensor in tensors)
    weights = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
    want = weights @ v.double()
    if matrix is not None:
        h = matrix.to(device)
        q, k = ((tensor.float() @ h).half() for tensor in (q, k))
    out = attention(q, quantize_kv(k, v, precision=precision))
    return errors_of_heads(out, want)[0].max().item()


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
