"""Direct calls while torch records or differentiates: recorded as an operator, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fw
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sdpa_cutlass
from sdpa_cutlass import ArgumentError, UnsupportedError, attention, attention_varlen
from sdpa_cutlass.errors import SdpaError
from tests.library.reference import rand

ENDS = torch.tensor([0, 9, 32], dtype=torch.int32)
LENGTHS = torch.tensor([9], dtype=torch.int32)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor[0].transpose(0, 1)
    return attention_varlen(rows, rows, rows, ENDS, ENDS, 32, 32)[None].transpose(1, 2)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda a: attention(a, a, a),
    "causal": lambda a: attention(a, a, a, causal="top_left", seqlens_k=LENGTHS),
    "function": lambda a: sdpa_cutlass.scaled_dot_product_attention(a, a, a),
    "unfused": lambda a: sdpa_cutlass.unfused_attention(a, a, a),
    "varlen": packed,
}
pytestmark = [
    pytest.mark.parametrize("name", CALLS),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch.func.jvp and torch.jit.trace
]


@pytest.fixture(params=[0, 3], ids=["first", "known"])
def call(request: pytest.FixtureRequest, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    for _ in range(request.param):
        CALLS[name](rand(1, 2, 32, 64))
    return CALLS[name]


Call = Callable[[torch.Tensor], torch.Tensor]


def test_a_trace_computes_with_its_own_inputs(call: Call) -> None:
    traced = torch.jit.trace(call, (rand(1, 2, 32, 64),))
    other = rand(1, 2, 32, 64, seed=1)
    assert torch.equal(traced(other), call(other))


def test_a_graph_of_make_fx_has_the_operator(call: Call) -> None:
    graph = make_fx(call)(rand(1, 2, 32, 64))
    assert "sdpa_cutlass" in graph.code
    other = rand(1, 2, 32, 64, seed=1)
    assert torch.equal(graph(other), call(other))


def test_a_dispatch_mode_sees_the_operator(call: Call) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q = rand(1, 2, 32, 64)
    with Watch():
        out = call(q)
    assert any("sdpa_cutlass" in func for func in seen)
    assert torch.equal(out, call(q))


def test_functionalised_calls_are_right(call: Call) -> None:
    q = rand(1, 2, 32, 64)
    assert torch.equal(torch.func.functionalize(call)(q), call(q))


def test_reverse_mode_is_refused(call: Call) -> None:
    with pytest.raises(UnsupportedError, match="query requires grad"):
        torch.func.grad(lambda a: call(a).float().sum())(rand(1, 2, 32, 64))


def test_forward_mode_is_refused(call: Call) -> None:
    q = rand(1, 2, 32, 64)
    with pytest.raises(UnsupportedError, match="query has a tangent"):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))
    with fw.dual_level(), pytest.raises(UnsupportedError, match="query has a tangent"):
        call(fw.make_dual(q, torch.ones_like(q)))


def test_a_level_without_tangents_changes_nothing(call: Call) -> None:
    q = rand(1, 2, 32, 64)
    with fw.dual_level():
        out = call(q)
    assert torch.equal(out, call(q))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training_is_refused(call: Call) -> None:
    with pytest.raises(UnsupportedError, match="query requires grad"):
        torch.compile(call, backend="aot_eager")(rand(1, 2, 32, 64).requires_grad_())


@pytest.mark.parametrize("repeats", [1, 3])
def test_autograd_notices_what_out_overwrote(name: str, repeats: int) -> None:
    q = rand(1, 2, 32, 64)
    ends = torch.tensor([0, 32], dtype=torch.int32)
    rows = q[0].transpose(0, 1).contiguous()
    out = torch.zeros_like(rows if name == "varlen" else q)
    weight = torch.ones_like(out).requires_grad_()
    loss = (out * weight).float().sum()
    before = out._version
    for _ in range(repeats):
        if name == "varlen":
            attention_varlen(rows, rows, rows, ends, ends, 32, 32, out=out)
        elif name == "unfused":
            sdpa_cutlass.unfused_attention(q, q, q, out=out)
        else:
            attention(q, q, q, out=out, causal="top_left" if name == "causal" else None)
    assert out._version == before + repeats
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_mask_may_be_a_negative_view(name: str, is_known: bool) -> None:
    q = rand(1, 2, 32, 64, seed=3)
    values = torch.randn(32, 32, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    if is_known:
        attention(q, q, q, attn_mask=torch.view_as_real(values)[..., 1])
    mask = values.conj().imag
    assert mask.is_neg()
    assert torch.equal(attention(q, q, q, attn_mask=mask), attention(q, q, q, attn_mask=mask.clone()))


@pytest.mark.parametrize(
    "options",
    [{"scale": 10**400}, {"kernel": 3}, {"p_dropout": np.array([0.1, 0.2])}],
    ids=["scale", "kernel", "p_dropout"],
)
def test_odd_options_are_errors_of_the_package(name: str, options: dict[str, Any]) -> None:
    q = rand(1, 2, 32, 64)
    with pytest.raises(SdpaError, match=next(iter(options))):
        attention(q, q, q, **options)


def test_a_plan_takes_arrays(name: str) -> None:
    q = rand(1, 2, 32, 64)
    assert sdpa_cutlass.plan(q.numpy(), q.numpy(), q.numpy()).problem.seqlen_q == 32
    with pytest.raises(ArgumentError):
        sdpa_cutlass.plan(q.numpy()[0, 0, 0], q.numpy(), q.numpy())
