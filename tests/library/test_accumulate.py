"""`accumulate` of `attention`: results over sets of keys, one behind the other, merged in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdpa_cutlass import attention
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.library.reference import expect_close, rand

ROWS, KEYS, PARTS = 40, 120, 4


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    sizes = ((4, ROWS), (2, KEYS), (2, KEYS))
    return [rand(2, *size, 64, device=device, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


def nothing(query: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The running results before the first step: out may hold anything."""
    out = torch.full(query.shape, torch.nan, dtype=dtype, device=query.device)
    return out, torch.full(query.shape[:3], -torch.inf, device=query.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("runs_in_float32", [True, False])
def test_steps_give_the_whole(runs_in_float32: bool, dtype: torch.dtype, device: str) -> None:
    q, k, v = inputs(device, dtype)
    running = nothing(q, torch.float32 if runs_in_float32 else dtype)
    for i in range(PARTS):
        keys = slice(i * KEYS // PARTS, (i + 1) * KEYS // PARTS)
        step = {"causal": "top_left", "row_offset": 50, "key_offset": keys.start, "window": (70, -1)}
        before = running[0]._version
        out, lse = attention(q, k[:, :, keys], v[:, :, keys], **step, return_lse=True, accumulate=running)
        assert out is running[0]
        assert lse is running[1]
        assert out._version > before
    expected, expected_lse = attention(
        q, k, v, causal="top_left", row_offset=50, window=(70, -1), return_lse=True
    )
    tolerance = 3e-3 if dtype is torch.float16 else 2e-2
    torch.testing.assert_close(out.to(dtype), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def test_a_float32_result_is_not_rounded_at_every_step(device: str) -> None:
    """After many steps it is nearer to the truth than one in 16 bits."""
    q, k, v = inputs(device)
    exact = torch.softmax(q.double() @ k.double().repeat_interleave(2, 1).mT / 8, -1)
    exact = exact @ v.double().repeat_interleave(2, 1)
    errors = []
    for dtype in (torch.float32, torch.float16):
        running = nothing(q, dtype)
        for i in range(0, KEYS, 4):
            attention(q, k[:, :, i : i + 4], v[:, :, i : i + 4], accumulate=running)
        errors.append((running[0].double() - exact).abs().mean().item())
    assert errors[0] < 0.7 * errors[1]


def test_layouts_and_sinks(device: str) -> None:
    q, k, v = inputs(device)
    sinks = rand(4, device=device)
    expected, expected_lse = attention(q, k, v, sinks=sinks, return_lse=True)
    out, lse = nothing(q, torch.float32)
    running = out.transpose(1, 2).contiguous(), lse
    for i, keys in enumerate((slice(0, 50), slice(50, KEYS))):
        shard = (x.transpose(1, 2) for x in (q, k[:, :, keys], v[:, :, keys]))
        attention(*shard, layout="bshd", accumulate=running, sinks=sinks if i == 1 else None)
    expect_close(running[0].transpose(1, 2).half(), expected)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def test_under_torch_compile(device: str) -> None:
    q, k, v = inputs(device)
    running = nothing(q, torch.float32)
    step = torch.compile(
        lambda a, b, c, out, lse: attention(a, b, c, accumulate=(out, lse)), backend="eager", fullgraph=True
    )
    for keys in (slice(0, 60), slice(60, KEYS)):
        step(q, k[:, :, keys], v[:, :, keys], *running)
    expect_close(running[0].half(), attention(q, k, v))


def bad_pairs() -> dict[str, tuple[Any, type[Exception], str]]:
    q = inputs()[0]
    out, lse = nothing(q, torch.float32)
    unaligned = torch.empty(out.numel() + 1)[1:].view(out.shape)
    return {
        "one tensor": ({"accumulate": out}, ArgumentTypeError, "accumulate is a Tensor; allowed is a pair"),
        "no tensors": ({"accumulate": (1, 2)}, ArgumentTypeError, "accumulate is a tuple; allowed is a pair"),
        "dtype": ({"accumulate": (out.double(), lse)}, ArgumentTypeError, r"accumulate\[0\] has dtype"),
        "shape": ({"accumulate": (out[:, :1], lse)}, ArgumentError, r"accumulate\[0\] has shape \(2, 1,"),
        "lse": ({"accumulate": (out, lse[:1])}, ArgumentError, r"lses\[0\] has shape"),
        "lse dtype": ({"accumulate": (out, lse.half())}, ArgumentTypeError, r"lses\[0\] has dtype"),
        "address": ({"accumulate": (unaligned, lse)}, ArgumentError, "must be a multiple of 16"),
        "out": ({"accumulate": (out, lse), "out": q.clone()}, ArgumentError, "out is given together"),
        "gradients": (
            {"accumulate": (out.clone().requires_grad_(), lse)},
            UnsupportedError,
            r"accumulate\[0\] requires grad",
        ),
        "gradients of sinks": (
            {"accumulate": (out, lse), "sinks": rand(4).requires_grad_()},
            UnsupportedError,
            "sinks requires grad",
        ),
        "out_dtype": (
            {"accumulate": (out, lse), "out_dtype": torch.float16},
            ArgumentError,
            r"out_dtype=torch.float16; accumulate\[0\] has torch.float32",
        ),
        "out_dtype alone": (
            {"out_dtype": torch.float32},
            UnsupportedError,
            "out_dtype=torch.float32; kernels",
        ),
    }


@pytest.mark.parametrize("case", list(bad_pairs()))
def test_what_is_refused_changes_nothing(case: str) -> None:
    q, k, v = inputs()
    given, error, message = bad_pairs()[case]
    tensors = [x for x in given.get("accumulate", ()) if isinstance(x, torch.Tensor)]
    versions = [x._version for x in tensors]
    with pytest.raises(error, match=message):
        attention(q, k, v, **given)
    assert [x._version for x in tensors] == versions


def test_the_dtype_that_out_has_anyway_may_be_named() -> None:
    q, k, v = inputs()
    assert torch.equal(attention(q, k, v, out_dtype=torch.float16), attention(q, k, v))
