"""flash_api: FlashAttention 2's functions against float64, and what they refuse."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from sdpa_cutlass import flash_api
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, SdpaError, UnsupportedError
from tests.kernels.numerics import half_ulp
from tests.library.reference import rand

SHAPES = [
    # B, Sq, Sk, Hq, Hkv, D
    (2, 1, 97, 4, 2, 64),
    (1, 97, 97, 2, 2, 64),
    (2, 65, 129, 6, 2, 32),
    (1, 130, 67, 4, 1, 128),
    (3, 33, 33, 1, 1, 40),
]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])


def chain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, D], softmax_lse [B, H, Sq]), every step in `dtype`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (tensor.to(dtype).transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(repeat, 1) for tensor in (k, v))
    row = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    column = torch.arange(k.shape[2], device=q.device)
    seen = torch.ones_like(row - column, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    if left >= 0:
        seen &= column >= row - left
    if right >= 0:
        seen &= column <= row + right
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    nobody = ~seen.any(-1)
    out = (scores.softmax(-1).masked_fill(~seen, 0) @ v).masked_fill(nobody[:, None], 0)
    return out.transpose(1, 2), scores.logsumexp(-1)


def check(found: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """The numerics rule, of (out, softmax_lse, None)."""
    out, softmax_lse, probabilities = found
    assert probabilities is None
    assert (out.dtype, out.shape) == (q.dtype, (*q.shape[:3], v.shape[3]))
    expected, expected_lse = chain(q, k, v, **options)
    plain, _ = chain(q, k, v, dtype=q.dtype, **options)
    error = (out.double() - expected).abs()
    assert error.max() <= 2 * (plain.double() - expected).abs().max() + 1e-5
    if q.dtype is torch.float16:  # bfloat16 weights are too coarse for it with inputs of this size
        slack = error - half_ulp(expected, q.dtype) - 1e-3 * expected.abs().clamp(min=1)
        assert slack.max() <= 0
    assert softmax_lse.dtype == torch.float32
    torch.testing.assert_close(softmax_lse.double(), expected_lse, atol=1e-4, rtol=0)


def tensors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = shape
    sizes = [(batch, seqlen_q, heads, head_dim), *2 * [(batch, seqlen_k, heads_kv, head_dim)]]
    return [rand(*size, device=device, dtype=dtype, seed=7 * i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@both_dtypes
def test_batches(shape: tuple[int, ...], causal: bool, dtype: torch.dtype, device: str) -> None:
    """Lengths that differ, grouped heads; causal is aligned to the last row and key."""
    q, k, v = tensors(shape, device, dtype)
    found = flash_api.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    check(found, q, k, v, causal=causal)
    alone = flash_api.flash_attn_func(q, k, v, causal=causal)
    assert torch.equal(alone, found[0])
    packed = flash_api.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=causal)
    assert torch.equal(packed, alone)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@both_dtypes
def test_packed_query_key_and_value(causal: bool, dtype: torch.dtype, device: str) -> None:
    qkv = rand(2, 70, 3, 4, 64, device=device, dtype=dtype)
    found = flash_api.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, causal, return_attn_probs=True)
    check(found, *qkv.unbind(2), causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@both_dtypes
def test_packed_sequences(causal: bool, heads_kv: int, dtype: torch.dtype, device: str) -> None:
    """Each sequence gives what it gives alone; one has no rows, one more rows than keys."""
    lengths_q, lengths_k = [17, 0, 66, 30], [40, 5, 66, 11]
    q = rand(sum(lengths_q), 4, 64, device=device, dtype=dtype)
    kv = rand(sum(lengths_k), 2, heads_kv, 64, device=device, dtype=dtype, seed=1)
    k, v = kv.unbind(1)
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (lengths_q, lengths_k)
    )
    given = (cu_q, cu_k, max(lengths_q), max(lengths_k))
    found = flash_api.flash_attn_varlen_func(q, k, v, *given, causal=causal, return_attn_probs=True)
    assert torch.equal(flash_api.flash_attn_varlen_kvpacked_func(q, kv, *given, causal=causal), found[0])
    out, softmax_lse, _ = found
    for b in range(len(lengths_q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if lengths_q[b]:
            alone = (out[None, rows], softmax_lse[None, :, rows], None)
            check(alone, q[None, rows], k[None, keys], v[None, keys], causal=causal)


def test_packed_sequences_of_query_key_and_value(device: str) -> None:
    qkv = rand(50, 3, 2, 64, device=device)
    cu_seqlens = torch.tensor([0, 20, 50], device=device, dtype=torch.int32)
    found = flash_api.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 30, causal=True)
    expected = flash_api.flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, 30, 30, causal=True)
    assert torch.equal(found, expected)
    q, k, v = qkv[None, 20:].unbind(2)
    assert (found[None, 20:].double() - chain(q, k, v, causal=True)[0]).abs().max() < 2e-3


@pytest.mark.parametrize("window", [(9, -1), (9, 0), (5, 3), (-1, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_windows(window: tuple[int, int], causal: bool, device: str) -> None:
    q, k, v = tensors((2, 65, 129, 4, 2, 64), device, torch.float16)
    found = flash_api.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    check(found, q, k, v, causal=causal, window=window)


def test_a_window_without_limits_is_none(device: str) -> None:
    q, k, v = tensors((1, 33, 33, 2, 2, 64), device, torch.float16)
    for window, causal in (((-1, -1), False), ((-1, 5), True), ((-1, 0), True)):
        expected = flash_api.flash_attn_func(q, k, v, causal=causal)
        assert torch.equal(flash_api.flash_attn_func(q, k, v, causal=causal, window_size=window), expected)


def test_dropout_follows_torchs_seed(device: str) -> None:
    q, k, v = tensors((1, 33, 33, 2, 2, 64), device, torch.float16)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(flash_api.flash_attn_func(q, k, v, 0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


REFUSED: list[tuple[dict[str, Any], type[SdpaError], str]] = [
    ({"softcap": 30.0}, UnsupportedError, "softcap=30.0"),
    ({"alibi_slopes": torch.ones(2)}, UnsupportedError, "alibi_slopes is given"),
    ({"return_attn_probs": True, "dropout_p": 0.1}, UnsupportedError, "return_attn_probs=True with dropout"),
    ({"window_size": (-2, 0)}, ArgumentError, r"window_size=\(-2, 0\)"),
    ({"window_size": 3}, ArgumentTypeError, "window_size=3"),
    ({"window_size": (1.0, 2)}, ArgumentTypeError, r"window_size=\(1.0, 2\)"),
    ({"dropout_p": 2.0}, ArgumentError, "dropout"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:24])
def test_refused(options: dict[str, Any], error: type[SdpaError], message: str) -> None:
    q = rand(1, 5, 2, 64)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(error, match=message):
        flash_api.flash_attn_func(q, q, q, **options)
    with pytest.raises(error, match=message):
        flash_api.flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens, cu_seqlens, 5, 5, **options)


def test_tensors_that_are_refused() -> None:
    q = rand(1, 5, 2, 64)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    packed = (q[0], q[0], q[0], cu_seqlens, cu_seqlens, 5, 5)
    with pytest.raises(UnsupportedError, match="block_table is given"):
        flash_api.flash_attn_varlen_func(*packed, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ArgumentTypeError, match="k is a list"):
        flash_api.flash_attn_func(q, [], q)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"q has shape \(5, 2, 64\); allowed is \[batch, seqlen"):
        flash_api.flash_attn_func(q[0], q, q)
    with pytest.raises(ArgumentError, match=r"kv has shape .*\[batch, seqlen, 2, heads"):
        flash_api.flash_attn_kvpacked_func(q, rand(1, 5, 3, 2, 64))


def test_gradients_reach_packed_tensors() -> None:
    """deterministic changes nothing: gradients are so always."""
    for function, shape in (
        (flash_api.flash_attn_qkvpacked_func, (1, 5, 3, 2, 64)),
        (
            lambda kv, **options: flash_api.flash_attn_kvpacked_func(kv[:, :, 0], kv, **options),
            (1, 5, 2, 2, 64),
        ),
    ):
        found = []
        for deterministic in (False, True):
            packed = rand(*shape).requires_grad_()
            function(packed, causal=True, deterministic=deterministic).float().square().sum().backward()
            assert packed.grad is not None
            found.append(packed.grad)
        assert torch.equal(*found)
        assert found[0].any()


ARGUMENTS = {
    "flash_attn_func": "q k v",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
}
SHARED = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_flash_attns_names_and_order(name: str) -> None:
    """Callers pass them by position, too."""
    assert set(flash_api.__all__) == set(ARGUMENTS)
    last = ["block_table"] if name == "flash_attn_varlen_func" else []
    parameters = inspect.signature(getattr(flash_api, name)).parameters
    assert list(parameters) == [*ARGUMENTS[name].split(), *SHARED, *last]
    assert [parameters[shared].default for shared in SHARED] == [
        0.0, None, False, (-1, -1), 0.0, None, False, False,
    ]  # fmt: skip
