"""The public function under scores far from 0, against torch's math backend in float32.

tests/kernels/test_large_scores.py holds every kernel to the same; here are the calls that users have met.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_cutlass import attention, scaled_dot_product_attention

DTYPES = (torch.float16, torch.bfloat16)
SIZES = {"tokens": (37, 37), "decode": (1, 600)}
Call = Callable[..., torch.Tensor]


def math_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """In float32, of inputs in 16 bits."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale)


def random_qkv(dtype: torch.dtype, sizes: tuple[int, int], head_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, keys = sizes
    return [torch.randn(1, 2, n, head_dim, generator=generator).to(dtype) for n in (rows, keys, keys)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [30, 300, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharp_heads(dtype: torch.dtype, scale: float, size: str) -> None:
    """Scores of up to 4e4: in nearly all rows one key has all the weight, and the result is its value."""
    q, k, v = random_qkv(dtype, SIZES[size])
    out = scaled_dot_product_attention(q, k, v, scale=scale)
    weights = (q.double() @ k.double().mT * scale).softmax(-1)
    winner = weights.argmax(-1, keepdim=True)
    decisive = weights.amax(-1) > 1 - 1e-9
    assert decisive.float().mean() > 0.5
    values = v.gather(2, winner.expand(*winner.shape[:3], v.shape[3]))
    assert torch.equal(out[decisive], values[decisive])
    torch.testing.assert_close(out.float(), math_backend(q, k, v, scale), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_tokens_of_one_large_value(call: Call, tokens: int, dtype: torch.dtype) -> None:
    q = torch.full((1, 2, tokens, 64), 133120.0 if dtype is torch.bfloat16 else 6e4, dtype=dtype)
    assert torch.equal(call(q, q, q), math_backend(q, q, q, None).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_signs_of_a_large_value(dtype: torch.dtype) -> None:
    """Scores of up to 7e10, ties among them: powers of two keep their sums exact everywhere."""
    q, k, v = random_qkv(dtype, (40, 90))
    q, k = (t.sign() * 32768.0 for t in (q, k))
    expected = math_backend(q, k, v, 1.0)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, scale=1.0).float(), expected, atol=2e-3, rtol=1e-2
    )


@pytest.mark.parametrize("scale", [3e38, -3e38, 3.4e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_zero_under_any_finite_scale(dtype: torch.dtype, scale: float) -> None:
    q, k, v = random_qkv(dtype, (5, 90))
    out = scaled_dot_product_attention(torch.zeros_like(q), k, v, scale=scale)
    torch.testing.assert_close(
        out.float(), v.float().mean(2, keepdim=True).expand(out.shape), atol=2e-3, rtol=1e-2
    )


def test_sums_of_products_beyond_float32() -> None:
    """A score of infinity gives NaN, one of minus infinity weighs nothing, as in torch."""
    large = torch.full((1, 1, 1, 64), 1e30, dtype=torch.bfloat16)
    keys = torch.cat([-large, torch.zeros_like(large)], 2)
    v = torch.tensor([5.0, 7.0], dtype=torch.bfloat16)[:, None].expand(1, 1, 2, 64).contiguous()
    for q, expected in ((large, 7.0), (-large, math.nan)):
        out = scaled_dot_product_attention(q, keys, v).float()
        torch.testing.assert_close(out, torch.full_like(out, expected), equal_nan=True)
        torch.testing.assert_close(out, math_backend(q, keys, v, None), equal_nan=True)
