"""The checks behind the rows of mappings.py: this library and torch's own kernel on the same call.

A check takes a device. On the CPU the operator of flash attention has no kernel; there float64 with the
operator's mask written out answers in its place.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

import sdpa_cutlass
from sdpa_cutlass import flash_api
from sdpa_cutlass.integrations import flash_impl
from sdpa_cutlass.integrations.head_dims import HeadDims
from tests.library.torch_calls import ORIGINAL, close, half

HEAD_DIMS = HeadDims(plain=frozenset({64}), general=256, dropout=256)
LENGTHS = ((5, 5), (5, 11), (11, 5), (1, 11), (70, 130), (130, 70))
"""(Sq, Sk): equal, fewer and more rows than keys, decoding, and more than one tile."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(device: str, seqlen_q: int, seqlen_k: int, head_dim: int = 64, heads_kv: int = 2) -> Tensors:
    """q [2, 2, Sq, D], k and v [2, Hkv, Sk, D]."""
    return (
        half(2, 2, seqlen_q, head_dim, device=device),
        half(2, heads_kv, seqlen_k, head_dim, device=device, seed=1),
        half(2, heads_kv, seqlen_k, head_dim, device=device, seed=2),
    )


def by_torch(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention by torch's math backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return ORIGINAL(*tensors, **options)


def enabled(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention, served by this library."""
    with sdpa_cutlass.enabled(devices=[tensors[0].device.type]) as usage:
        out = F.scaled_dot_product_attention(*tensors, **options)
    assert usage.served == 1
    return out


def flash_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float | None = None
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, or its first two results written out."""
    if q.device.type == "cuda":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    scores = q.double() @ k.double().mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        keeps = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~keeps, -torch.inf)
    lse = torch.logsumexp(scores, -1).float()
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return (weights @ v.double()).half(), lse.masked_fill(lse == -torch.inf, torch.inf)


class Untouched:
    """Stands in for torch's kernel where no call may reach it."""

    def call_boxed(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("left to torch")


class Noted:
    """Stands in for torch's kernel, and gives back what it was called with."""

    def call_boxed(self, *arguments: Any, **options: Any) -> Any:
        return arguments, options


def flash(*arguments: Any, original: Any = None, **options: Any) -> tuple[Any, ...]:
    """The kernel that this library offers for the operator."""
    kernel = flash_impl.make_kernel({arguments[0].device: HEAD_DIMS}, original or Untouched())
    return kernel("keys", *arguments, **options)


def same_lse(lse: torch.Tensor, expected: torch.Tensor) -> None:
    assert (lse.shape, lse.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(lse, expected, atol=1e-4, rtol=1e-5)


def sdpa_is_causal(device: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs(device, seqlen_q, seqlen_k)
        expected = by_torch(q, k, v, is_causal=True)
        close(enabled(q, k, v, is_causal=True), expected)
        close(sdpa_cutlass.attention(q, k, v, causal="top_left"), expected)


def sdpa_scale_none(device: str) -> None:
    for head_dim in (64, 36):  # the latter is filled up to 40
        q, k, v = inputs(device, 5, 11, head_dim)
        close(enabled(q, k, v), by_torch(q, k, v))
        close(enabled(q, k, v, scale=0.3), by_torch(q, k, v, scale=0.3))


def sdpa_boolean_mask(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    mask = half(2, 1, 5, 11, device=device, seed=3) > 0
    mask[:, :, 2] = False  # a row that sees no key
    close(enabled(q, k, v, attn_mask=mask), by_torch(q, k, v, attn_mask=mask))


def sdpa_float_mask(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    mask = half(2, 5, 11, device=device, seed=3) * 2
    mask[:, 2, 3] = -torch.inf
    for bias in (mask, mask.float()):
        expected = by_torch(q, k, v, attn_mask=mask, scale=0.3)
        close(enabled(q, k, v, attn_mask=bias, scale=0.3), expected)


def sdpa_enable_gqa(device: str) -> None:
    q = half(2, 6, 5, 64, device=device)
    _, k, v = inputs(device, 5, 11)
    expected = by_torch(q, k, v, enable_gqa=True)
    close(enabled(q, k, v, enable_gqa=True), expected)
    close(sdpa_cutlass.attention(q, k, v), expected)


def sdpa_dropout_p(device: str) -> None:
    """Of many equal weights the same share is left, each as much larger."""
    q, k = torch.zeros(2, 2, 64, 64, device=device).half(), torch.zeros(2, 2, 256, 64, device=device).half()
    ones = torch.ones_like(k)
    torch.manual_seed(0)
    for p_dropout in (0.25, 0.75):
        outs = [function(q, k, ones, dropout_p=p_dropout).float()[..., 0] for function in (by_torch, enabled)]
        spreads = [out.std().item() for out in outs]
        for out in outs:
            assert abs(out.mean().item() - 1) < 0.05
        assert abs(spreads[0] / spreads[1] - 1) < 0.25
    for function in (by_torch, enabled):
        assert not function(q, k, ones, dropout_p=1.0).any()


def bias(variant: CausalVariant, seqlen_q: int, seqlen_k: int) -> CausalBias:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rows without keys may be NaN
        return CausalBias(variant, seqlen_q, seqlen_k)


def check_bias(device: str, variant: CausalVariant, causal: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs(device, seqlen_q, seqlen_k)
        made = bias(variant, seqlen_q, seqlen_k)
        expected = by_torch(q, k, v, attn_mask=made._materialize(q.device))
        if device == "cuda" and seqlen_q <= seqlen_k:
            close(ORIGINAL(q, k, v, attn_mask=made), expected)  # torch's own kernels of a bias mean the same
        close(enabled(q, k, v, attn_mask=made), expected)
        close(sdpa_cutlass.attention(q, k, v, causal=causal), expected)


def causal_upper_left(device: str) -> None:
    check_bias(device, CausalVariant.UPPER_LEFT, "top_left")


def causal_lower_right(device: str) -> None:
    check_bias(device, CausalVariant.LOWER_RIGHT, "bottom_right")


def flash_is_causal(device: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs(device, seqlen_q, seqlen_k)
        close(flash(q, k, v, 0.0, True)[0], flash_by_torch(q, k, v, is_causal=True)[0])


def flash_for_cpu_is_causal(device: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs("cpu", seqlen_q, seqlen_k)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ours = sdpa_cutlass.attention(q, k, v, causal="top_left", return_lse=True)
        close(ours[0], out)
        same_lse(ours[1], lse.float())


def flash_scale(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    for scale in (None, 0.3):
        close(flash(q, k, v, scale=scale)[0], flash_by_torch(q, k, v, scale=scale)[0])


def flash_logsumexp(device: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs(device, seqlen_q, seqlen_k)
        for is_causal in (False, True):
            expected = flash_by_torch(q, k, v, is_causal, scale=0.3)[1]
            lse = flash(q, k, v, 0.0, is_causal, scale=0.3)[1]
            same_lse(lse, expected)
            assert lse.is_contiguous()
            causal = "bottom_right" if is_causal else None
            ours = sdpa_cutlass.attention(q, k, v, causal=causal, scale=0.3, return_lse=True)[1]
            same_lse(ours, expected.masked_fill(expected == torch.inf, -torch.inf))


def flash_grouped_heads(device: str) -> None:
    q, k, v = inputs(device, 5, 11, heads_kv=1)
    close(flash(q, k, v)[0], flash_by_torch(q, k, v)[0])


def flash_debug_mask(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    arguments, _ = flash(q, k, v, 0.0, False, True, original=Noted())
    assert arguments[-1] is True
    empty = flash(q, k, v)[8]
    assert (empty.shape, empty.dtype, empty.device) == (torch.Size([0]), q.dtype, q.device)


def flash_dropout_p(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    arguments, _ = flash(q, k, v, 0.1, original=Noted())
    assert arguments[4] == 0.1


def flash_seeds_and_lengths(device: str) -> None:
    """Without dropout torch leaves its seeds unset; what counts is that backward can take the tuple."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("torch has no swap point; its operator returned something else")
    q, k, v = inputs(device, 5, 11)
    expected = torch.ops.aten._scaled_dot_product_flash_attention(*(t.to("meta") for t in (q, k, v)))
    if device == "cuda":
        expected = flash_by_torch(q, k, v)
    for got, wanted in zip(flash(q, k, v)[2:8], expected[2:8], strict=True):
        if isinstance(wanted, torch.Tensor):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        else:
            assert got == wanted


def flash_requires_grad(device: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in inputs(device, 5, 11))
    served = {q.device: HEAD_DIMS._replace(backward=64)}
    out, lse, *_, seed, offset, _ = flash_impl.make_kernel(served, Untouched())("keys", q, k, v)
    dout, others = torch.ones_like(out), (None, None, 5, 11)
    backward = flash_impl.make_backward_kernel(served, Untouched())
    found = backward("keys", dout, q, k, v, out, lse, *others, 0.0, False, seed, offset)
    for one, expected in zip(found, torch.autograd.grad(by_torch(q, k, v), (q, k, v), dout), strict=True):
        close(one, expected)
    noted = flash_impl.make_kernel(served, Noted())("keys", q, k, v, 0.1)
    assert noted[0][1] is q
    given = ("keys", dout, q, k, v, out, lse, *others, 0.1, False, seed, offset)
    assert flash_impl.make_backward_kernel(served, Noted())(*given)[0] == given


def varlen_is_causal(device: str) -> None:
    lengths = ((5, 11), (11, 5), (1, 7), (70, 70))
    q, k, v = (
        torch.cat([half(n[i > 0], 2, 64, seed=7 * j + i) for j, n in enumerate(lengths)]).to(device)
        for i in range(3)
    )
    starts = [torch.tensor([0, *(n[i] for n in lengths)], device=device).cumsum(0).int() for i in range(2)]
    out, lse = sdpa_cutlass.attention_varlen(q, k, v, *starts, 70, 70, causal="bottom_right", return_lse=True)
    if device == "cuda":
        expected = torch.ops.aten._flash_attention_forward(q, k, v, *starts, 70, 70, 0.0, True, False)
        close(out, expected[0])
        same_lse(lse, expected[1].masked_fill(expected[1] == torch.inf, -torch.inf))
    for b in range(len(lengths)):
        rows, keys = (slice(*start[b : b + 2].tolist()) for start in starts)
        alone = [t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])]
        close(out[rows], flash_by_torch(*alone, is_causal=True)[0][0].transpose(0, 1))


def autocast(device: str) -> None:
    q, k, v = inputs(device, 5, 11)
    mask = half(5, 11, device=device, seed=3).float()
    with torch.autocast(device, dtype=torch.float16):
        expected = by_torch(q.float(), k, v.float(), attn_mask=mask)
        close(enabled(q.float(), k, v.float(), attn_mask=mask), expected)


def seen(seqlen_q: int, seqlen_k: int, left: int, right: int, device: str) -> torch.Tensor:
    """FlashAttention's window, pair by pair: counted from the last row and the last key, -1 is no limit."""
    own = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=device)
    return ((keys >= own - left) | (left < 0)) & ((keys <= own + right) | (right < 0))


def flash_attn(device: str, left: int, right: int, **options: Any) -> None:
    """flash_attn_func [B, S, H, D] next to torch's kernel under the mask written out."""
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = inputs(device, seqlen_q, seqlen_k)
        out = flash_api.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        mask = seen(seqlen_q, seqlen_k, left, right, device)
        close(out.transpose(1, 2), by_torch(q, k, v, attn_mask=mask, scale=options.get("softmax_scale")))


def flash_attn_causal(device: str) -> None:
    flash_attn(device, -1, 0, causal=True)


def flash_attn_window_size(device: str) -> None:
    flash_attn(device, 3, 2, window_size=(3, 2))
    flash_attn(device, 3, 0, window_size=(3, 2), causal=True)
    flash_attn(device, -1, -1, window_size=(-1, -1))


def flash_attn_softmax_scale(device: str) -> None:
    flash_attn(device, -1, -1, softmax_scale=0.3)
    flash_attn(device, -1, -1, softmax_scale=None)


def transformers_layer(device: str, tensors: Tensors, **options: Any) -> torch.Tensor:
    """[B, H, Sq, D] of the function that layers of transformers call."""
    pytest.importorskip("transformers")
    from sdpa_cutlass.integrations import transformers

    served = transformers.register(devices=[device]).served
    out, weights = transformers.attention_forward(torch.nn.Module(), *tensors, None, **options)
    assert weights is None
    assert transformers.register(devices=[device]).served == served + 1
    return out.transpose(1, 2)


def transformers_is_causal(device: str) -> None:
    for seqlen_q, seqlen_k in LENGTHS:
        tensors = inputs(device, seqlen_q, seqlen_k)
        for is_causal in (None, True, False):
            causes = is_causal is not False and seqlen_q > 1
            close(
                transformers_layer(device, tensors, is_causal=is_causal, scaling=0.3),
                by_torch(*tensors, is_causal=causes, scale=0.3),
            )


def transformers_s_aux(device: str) -> None:
    """One more key for each head, whose score is the sink and whose value is 0."""
    q, k, v = inputs(device, 5, 11)
    sinks = torch.tensor([0.5, -1.0], device=device)
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(2, 2, 5, 1)], -1)
    expected = (scores.softmax(-1)[..., :-1] @ v.double()).half()
    close(transformers_layer(device, (q, k, v), is_causal=False, s_aux=sinks), expected)
