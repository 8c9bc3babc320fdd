"""What torch is told of a call, and what a call asks of torch and of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch.fx.experimental.proxy_tensor import make_fx

import sdpa_cutlass.integrations.torch_ops  # noqa: F401  registers the operators
from sdpa_cutlass import (
    ArgumentError,
    UnsupportedError,
    attention,
    attention_varlen,
    plan,
    scaled_dot_product_attention,
    unfused_attention,
)
from tests.library.launchers import qkv
from tests.library.reference import rand

pytestmark = [
    pytest.mark.usefixtures("_call_path"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning"),
]


def packed(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=q.device)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))
    attention_varlen(q, k, v, lengths, lengths, 5, 5, out=out[0].transpose(0, 1))


WRITERS: dict[str, Callable[..., Any]] = {
    "attention": lambda out, *tensors: attention(*tensors, out=out),
    "with a mask": lambda out, q, k, v: attention(
        q, k, v, out=out, attn_mask=torch.zeros_like(q[0, 0, :, :9])
    ),
    "unfused_attention": lambda out, *tensors: unfused_attention(*tensors, out=out),
    "attention_varlen": packed,
    "without keys": lambda out, q, k, v: attention(q, k[:, :, :0], v[:, :, :0], out=out),
    "operator": lambda out, *tensors: torch.ops.sdpa_cutlass.attention_forward_out(*tensors, out),
    "array path": lambda out, q, k, v: attention(
        q, k, v, out=out, softmax_lse=torch.empty(q.shape[:3], device=q.device)
    ),
    "plan": lambda out, *tensors: plan(*tensors).run(*tensors, out),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_backward_through_an_overwritten_out_is_refused_by_torch(writer: str, device: str) -> None:
    tensors = qkv(device)
    for _ in range(4):  # the first makes the signature known, the later ones use it
        buffer, weight = torch.ones_like(tensors[0]), torch.ones_like(tensors[0], requires_grad=True)
        product = (buffer * weight).float().sum()
        with torch.no_grad():
            WRITERS[writer](buffer, *tensors)
        assert buffer._version > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_an_out_of_inference_mode_counts_no_versions(device: str) -> None:
    tensors = qkv(device)
    with torch.inference_mode():
        out = torch.empty_like(tensors[0])
    for _ in range(4):
        assert attention(*tensors, out=out) is out
    assert torch.equal(out + 0, attention(*tensors))


@pytest.mark.parametrize("is_known", [False, True])
def test_a_bias_with_the_negative_bit_counts_as_its_values(is_known: bool, device: str) -> None:
    tensors, plain = qkv(device), torch.randn(9, 9, dtype=torch.complex64, device=device).imag
    negative = torch.complex(plain, plain).conj().imag
    assert negative.is_neg()
    assert negative.stride() == plain.stride()
    expected = attention(*tensors, attn_mask=negative.resolve_neg())
    for _ in range(3 if is_known else 0):
        attention(*tensors, attn_mask=plain)
    assert torch.equal(attention(*tensors, attn_mask=negative), expected)
    assert torch.equal(scaled_dot_product_attention(*tensors, attn_mask=negative), expected)
    with pytest.raises(ArgumentError, match="attn_mask has the negative bit"):
        plan(*tensors, attn_mask=negative)


def aligned_negative(values: torch.Tensor) -> torch.Tensor:
    """The negatives of `values`, contiguous: a view with the negative bit whose memory holds `values`."""
    pairs = torch.zeros(*values.shape, 2, dtype=values.dtype, device=values.device)
    pairs.view(-1)[: values.numel()] = values.flatten()
    return torch.view_as_complex(pairs).conj().imag.as_strided(values.shape, values.stride(), 0)


@pytest.mark.parametrize("place", range(3))
def test_inputs_with_the_negative_bit_count_as_their_values(
    place: int, device: str, forget: Callable[[], None]
) -> None:
    tensors = qkv(device)
    given = list(tensors)
    pairs = torch.stack([tensors[place], -tensors[place]], -1)
    for view in (torch.view_as_complex(pairs).conj().imag, aligned_negative(-tensors[place])):
        assert view.is_neg()
        given[place] = view
        forget()
        got = attention(*given)
        assert torch.equal(got, attention(*tensors))


def test_views_with_the_negative_bit_are_never_aligned(device: str) -> None:
    """What known signatures rely on, which look at addresses only. `as_strided` alone makes aligned ones."""
    numbers = torch.view_as_complex(torch.randn(2, 9, 64, 2, device=device).half())
    for view in (numbers, numbers[1:, ::2], numbers.mT, numbers[..., 3:]):
        assert view.conj().imag.data_ptr() % 4 == 2


def test_an_out_with_the_negative_bit_is_refused(device: str) -> None:
    tensors = qkv(device)
    out = torch.empty(*tensors[0].shape, 2, dtype=torch.float16, device=device)
    view = torch.view_as_complex(out).conj().imag
    for refused in (view, aligned_negative(tensors[0])):
        with pytest.raises(ArgumentError, match=r"^out "):
            attention(*tensors, out=refused)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_trace_with_out_writes_it(is_known: bool, device: str) -> None:
    q, k, v = qkv(device)
    expected = attention(q * 2, k, v)
    for _ in range(3 if is_known else 0):
        attention(q, k, v, out=torch.empty_like(q))
    traced = torch.jit.trace(lambda q, out: attention(q, k, v, out=out), (q, torch.empty_like(q)))
    for function in (traced, make_fx(lambda q, out: attention(q, k, v, out=out))(q, torch.empty_like(q))):
        out = torch.zeros_like(q)
        assert torch.equal(function(q * 2, out), expected)
        assert torch.equal(out, expected)


def test_sizes_that_a_trace_made_tensors_are_numbers_again(device: str) -> None:
    def function(rows: torch.Tensor) -> Any:
        lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
        size = rows.shape[0]
        return attention_varlen(rows, rows, rows, lengths, lengths, size, size, scale=rows.shape[-1] ** -0.5)

    rows = rand(9, 2, 64, device=device)
    assert torch.equal(torch.jit.trace(function, (rows,))(rows * 2), function(rows * 2))


def test_a_bias_with_a_tangent_is_refused(device: str) -> None:
    tensors, bias = qkv(device), torch.zeros(9, 9, device=device)
    for _ in range(3):
        attention(*tensors, attn_mask=bias)
    with fw.dual_level():
        dual = fw.make_dual(bias, torch.ones_like(bias))
        for function in (attention, scaled_dot_product_attention):
            with pytest.raises(UnsupportedError, match="attn_mask has a forward-mode gradient"):
                function(*tensors, attn_mask=dual)
        attention(*tensors, attn_mask=dual.detach())
        with torch.inference_mode():  # where torch computes none either
            attention(*tensors, attn_mask=dual)


def test_out_inside_a_transform_is_refused(device: str) -> None:
    tensors = qkv(device)
    for _ in range(3):
        attention(*tensors, out=torch.empty_like(tensors[0]))

    def function(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        attention(*tensors, out=out)
        return out

    for transform in (torch.func.functionalize, torch.func.vmap):
        with pytest.raises(UnsupportedError, match="out is given and out has no memory"):
            transform(function)(tensors[0] if transform is torch.func.functionalize else tensors[0][None])


def test_calls_that_torch_does_not_see_are_refused_where_it_would_have_to(device: str) -> None:
    tensors = qkv(device)
    out, lse = torch.empty_like(tensors[0]), torch.empty(tensors[0].shape[:3], device=device)

    def function(q: torch.Tensor) -> Any:
        return attention(q, *tensors[1:], out=out, softmax_lse=lse)

    function(tensors[0])
    for trace in (make_fx(function), lambda q: torch.jit.trace(function, (q,))):
        with pytest.raises(UnsupportedError, match="torch does not see calls with stream or softmax_lse"):
            trace(tensors[0])


def test_freed_storage_is_refused(device: str) -> None:
    q, k, v = qkv(device)
    for _ in range(3):
        attention(q, k, v)
    k.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="key has no memory"):
        attention(q, k, v)
