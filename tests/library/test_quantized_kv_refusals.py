"""What quantize_kv, append and calls with a QuantizedKV refuse by name; and what goes on around them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from sdpa_cutlass import NoKernelError, attention, plan, quantize_kv
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.library.test_lengths import int32
from tests.library.test_quantized_kv import inputs


def _made(**changes: Any) -> dict[str, Any]:
    return {"key": torch.zeros(2, 2, 5, 64).half(), "value": torch.zeros(2, 2, 5, 64).half()} | changes


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"key": 3}, ArgumentTypeError, ("key is a int",)),
        (
            {"key": torch.zeros(2, 5, 64).half()},
            ArgumentError,
            ("key has shape", "[batch, num_heads_kv"),
        ),
        ({"key": torch.zeros(2, 2, 5, 64)}, ArgumentTypeError, ("key has dtype torch.float32", "bfloat16")),
        (
            {"value": torch.zeros(2, 2, 5, 64).bfloat16()},
            ArgumentTypeError,
            ("value has dtype torch.bfloat16", "key has"),
        ),
        (
            {"value": torch.zeros(2, 2, 4, 64).half()},
            ArgumentError,
            ("value has shape", "seqlen"),
        ),
        ({"key": torch.zeros(2, 2, 5, 64, device="meta").half()}, ArgumentTypeError, ("key is on meta",)),
        ({"precision": "exact"}, ArgumentError, ("precision='exact'", "'int8_qk' and 'int8'")),
        ({"precision": None}, ArgumentError, ("precision=None", "'int8_qk' and 'int8'")),
        ({"precision": "fp8"}, ArgumentError, ("precision='fp8'",)),
        ({"precision": 8}, ArgumentTypeError, ("precision=8",)),
        ({"seqlens_k": torch.zeros(3, dtype=torch.int32)}, ArgumentError, ("seqlens_k has shape (3,)",)),
        ({"seqlens_k": torch.zeros(2)}, ArgumentTypeError, ("seqlens_k has dtype",)),
        (
            {"key": torch.zeros(2, 2, 5, 136).half(), "value": torch.zeros(2, 2, 5, 136).half()},
            NoKernelError,
            ("head_dim is at most 128",),
        ),
        ({"key": torch.zeros(2, 2, 5, 64).half().requires_grad_()}, UnsupportedError, ("key requires grad",)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_quantised(
    arguments: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        quantize_kv(**_made(**arguments))
    assert all(word in str(caught.value) for word in words), caught.value


def test_calls_that_are_refused(device: str) -> None:
    q, k, v = inputs(device)
    kept = quantize_kv(k, v)
    for name, given in {
        "p_dropout": 0.5,
        "philox": (1, 2),
        "seqlens_k": int32((1, 2), device),
        "softmax_lse": torch.empty(2, 4, 70, device=device),
        "stream": 0,
        "accumulate": (q, q),
        "out_dtype": torch.float32,
    }.items():
        with pytest.raises(UnsupportedError, match=f"{name} is given and key is a QuantizedKV"):
            attention(q, kept, **{name: given})
    for precision in ("exact", "int8_qk"):
        with pytest.raises(ArgumentError, match=f"precision.*{precision}"):
            attention(q, kept, precision=precision)
    assert torch.equal(attention(q, kept, precision="int8"), attention(q, kept))
    with pytest.raises(ArgumentTypeError, match=r"query has dtype .*; key is a QuantizedKV of"):
        attention(q.bfloat16(), kept)
    with pytest.raises(ArgumentError, match="key has head_dim 64"):
        attention(q[..., :32], kept)
    with pytest.raises(ArgumentError, match="query has 3; allowed is a divisor"):
        attention(q[:, :3], kept)
    with pytest.raises(ArgumentError, match="neither agree nor broadcast"):
        attention(q[:1].expand(3, -1, -1, -1), kept)
    with pytest.raises(ArgumentError, match="of batch 1 and 2 heads, which do not broadcast"):
        attention(q, quantize_kv(k[:1], v[:1]))
    with pytest.raises(ArgumentTypeError, match="value is a NoneType; allowed"):
        attention(q, k)
    with pytest.raises(ArgumentError, match="attn_mask has shape"):
        attention(q, kept, attn_mask=torch.ones(70, 129, dtype=torch.bool, device=device))
    with pytest.raises(ArgumentTypeError, match="attn_mask is a CausalBias"):
        attention(q, kept, attn_mask=causal_lower_right(70, 130))
    with pytest.raises(UnsupportedError, match="attn_mask requires grad"):
        attention(q, kept, attn_mask=torch.zeros(70, 130, device=device, requires_grad=True))
    for function in (attention, plan):
        with pytest.raises(ArgumentTypeError, match="key is a QuantizedKV"):
            function(q, kept, v)


def test_appends_that_are_refused_change_nothing(device: str) -> None:
    q, k, v = inputs(device)
    kept = quantize_kv(k, v)
    want = attention(q, kept)
    for key, value, error, word in (
        (k[:1], v[:1], ArgumentError, "key has shape"),
        (k[:, :1], v[:, :1], ArgumentError, "key has shape"),
        (k[..., :32], v, ArgumentError, "key has shape"),
        (k, v[..., :32], ArgumentError, "value has shape"),
        (k, v[:, :, 1:], ArgumentError, "value has shape"),
        (k.bfloat16(), v.bfloat16(), ArgumentTypeError, "key has dtype torch.bfloat16; the QuantizedKV has"),
        (k, None, ArgumentTypeError, "value is a NoneType"),
        (k.clone().requires_grad_(), v, UnsupportedError, "key requires grad"),
    ):
        with pytest.raises(error, match=word):
            kept.append(key, value)
    with_lengths = quantize_kv(k, v, seqlens_k=int32((5, 6), device))
    with pytest.raises(UnsupportedError, match="was made with seqlens_k"):
        with_lengths.append(k, v)
    assert kept.seqlen_k == 130
    assert torch.equal(attention(q, kept), want)


def test_around_a_call(device: str) -> None:
    """Gradients and tracing are refused by name, and modes of torch's change nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = inputs(device)
    want = attention(q, k, v, precision="int8")
    with torch.inference_mode():
        kept = quantize_kv(k[:, :, :100].clone(), v[:, :, :100].clone())
    with torch.no_grad():
        kept.append(k[:, :, 100:].clone().requires_grad_(), v[:, :, 100:])
    with torch.inference_mode():
        inside = attention(q, kept)
    assert torch.equal(inside, attention(q, kept))
    assert not attention(q, kept).requires_grad
    kept = quantize_kv(k, v)
    with torch.autocast(device, torch.float16):
        assert torch.equal(attention(q.float(), kept), want)
    needs_grad = q.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="query requires grad"):
        attention(needs_grad, kept)
    with torch.no_grad():
        assert torch.equal(attention(needs_grad, kept), want)
    with pytest.raises(UnsupportedError, match="key: torch does not see what becomes of a QuantizedKV"):
        make_fx(lambda q: attention(q, kept))(q)
    with pytest.raises(UnsupportedError, match="key: torch does not see what becomes of a QuantizedKV"):
        make_fx(lambda k: quantize_kv(k, v))(k)
    with pytest.raises(UnsupportedError, match="query has no memory"):
        torch.func.vmap(lambda q: attention(q, kept))(q[None])
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
            copied(kept)


def test_compiled_code_leaves_it_out(device: str) -> None:
    """Of its graphs; where there has to be one graph, torch says what is in the way."""
    q, k, v = inputs(device)
    kept = quantize_kv(k, v)
    want = attention(q, kept)

    def steps(q: torch.Tensor) -> torch.Tensor:
        made = quantize_kv(k[:, :, :70], v[:, :, :70])
        made.append(k[:, :, 70:], v[:, :, 70:])
        return attention(q, made) - attention(q, grown) + attention(q, kept)

    grown = quantize_kv(k[:, :, :70], v[:, :, :70])
    grown.append(k[:, :, 70:], v[:, :, 70:])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(steps, backend="eager")(q), want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(steps, backend="eager", fullgraph=True)(q)
    torch._dynamo.reset()


def test_arrays_and_views(device: str) -> None:
    """Queries of other libraries, keys in any layout and with the negative bit."""
    q, k, v = inputs(device)
    want = attention(q, k, v, precision="int8")
    negative = torch._neg_view(-k)
    assert negative.is_neg()
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    for key in (strided, negative, k.repeat_interleave(2, -1)[..., ::2]):
        assert torch.equal(attention(q, quantize_kv(key, v)), want)
    if device == "cpu":
        assert torch.equal(attention(q.numpy(), quantize_kv(k.numpy(), v.numpy())), want)
