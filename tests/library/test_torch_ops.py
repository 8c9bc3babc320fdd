"""torch.ops.sdpa_cutlass, and the public functions under torch.compile, export, vmap and autocast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sdpa_cutlass.integrations.torch_ops  # noqa: F401  registers the operators
from sdpa_cutlass import Causal, attention, scaled_dot_product_attention, unfused_attention

FORWARD = torch.ops.sdpa_cutlass.attention_forward.default
FORWARD_OUT = torch.ops.sdpa_cutlass.attention_forward_out.default


def rand(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def count_graphs(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A torch.compile backend that keeps the graphs it is given and runs them as they are."""

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    return backend


def calls_of(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "sdpa_cutlass" in str(node.target)]


INPUTS = {
    "plain": lambda device: (rand(2, 4, 9, 64, device=device), rand(2, 4, 11, 64, device=device, seed=1)),
    "grouped heads": lambda device: (rand(1, 4, 9, 64, device=device), rand(1, 2, 7, 64, device=device)),
    "batch, seqlen, heads order": lambda device: (
        rand(2, 9, 4, 64, device=device).transpose(1, 2),
        rand(2, 11, 4, 64, device=device).transpose(1, 2),
    ),
    "3-D": lambda device: (rand(4, 9, 64, device=device), rand(4, 11, 64, device=device)),
    "2-D": lambda device: (rand(9, 64, device=device), rand(11, 64, device=device)),
    "5-D broadcast": lambda device: (
        rand(2, 1, 4, 9, 64, device=device),
        rand(1, 3, 4, 11, 64, device=device),
    ),
    "strided last dimension": lambda device: (
        rand(1, 4, 64, 9, device=device).mT,
        rand(1, 4, 11, 64, device=device),
    ),
    "misaligned rows": lambda device: (
        rand(1, 4, 9, 67, device=device)[..., :64],
        rand(1, 4, 11, 64, device=device),
    ),
    "misaligned address": lambda device: (
        rand(2305, device=device)[1:].view(1, 4, 9, 64).transpose(1, 2).contiguous().transpose(1, 2),
        rand(2817, device=device)[1:].view(1, 4, 11, 64),
    ),
    "no keys": lambda device: (rand(1, 4, 9, 64, device=device), rand(1, 4, 0, 64, device=device)),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right", "return_lse": True}, {"family": "unfused"}], ids=str
)
def test_opcheck(inputs: str, options: dict[str, Any], device: str) -> None:
    q, k = INPUTS[inputs](device)
    torch.library.opcheck(FORWARD, (q, k, k), options)
    out = torch.empty_like(FORWARD(q, k, k, **options)[0])
    torch.library.opcheck(FORWARD_OUT, (q, k, k, out), options)


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_operators_are_the_public_functions(inputs: str, device: str) -> None:
    q, k = INPUTS[inputs](device)
    for function, family in ((attention, "fmha_fwd"), (unfused_attention, "unfused")):
        expected, expected_lse = function(q, k, k, causal="top_left", scale=0.3, return_lse=True)
        out, lse = FORWARD(q, k, k, causal="top_left", scale=0.3, return_lse=True, family=family)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert FORWARD(q, k, k, family=family)[1].shape == (0,)
        written = torch.full_like(expected, torch.nan, memory_format=torch.contiguous_format)
        lse = FORWARD_OUT(q, k, k, written, causal="top_left", scale=0.3, return_lse=True, family=family)
        assert torch.equal(written, expected)
        assert torch.equal(lse, expected_lse)


def test_meta_tensors_have_shapes() -> None:
    q, k = torch.empty(2, 4, 9, 64, device="meta"), torch.empty(2, 2, 11, 64, device="meta")
    out, lse = FORWARD(q.half(), k.half(), k.half(), return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, torch.float16)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    with pytest.raises(TypeError, match=r"query has dtype torch\.float32"):
        FORWARD(q, k, k)


def _all_functions(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(q)
    attention(q * 2, k, k, out=out)
    lse = attention(q, k, k, out=torch.zeros_like(q), return_lse=True)[1]
    return (
        out + 1,
        lse,
        scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True) * 2,
        *attention(q, k, k, causal=Causal.BOTTOM_RIGHT, return_lse=True, scale=1),
        unfused_attention(q, k, k, causal="top_left"),
    )


def _expect_equal(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_has_no_graph_break(backend: str, device: str) -> None:
    q, k = INPUTS["grouped heads"](device)
    compiled = torch.compile(_all_functions, fullgraph=True, backend=backend)
    _expect_equal(compiled(q, k), _all_functions(q, k))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    _expect_equal(compiled(q, k), _all_functions(q, k))


def test_the_graph_holds_the_operator(device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    q, k = INPUTS["grouped heads"](device)
    torch.compile(_all_functions, fullgraph=True, backend=count_graphs(graphs))(q, k)
    (graph,) = graphs
    assert len(calls_of(graph)) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles C++
def test_inductor(device: str) -> None:
    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        attention(q * 2, k, k, out=out)
        return scaled_dot_product_attention(q.mT.contiguous().mT + 1, k, k, enable_gqa=True) + out

    q, k = INPUTS["grouped heads"](device)
    got = torch.compile(function, fullgraph=True)(q, k)
    torch.testing.assert_close(got, function(q, k), atol=2e-3, rtol=2e-3)


def test_dynamic_shapes_make_one_graph(device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(_all_functions, fullgraph=True, dynamic=True, backend=count_graphs(graphs))
    for batch, seqlen_q, seqlen_k in ((3, 9, 11), (6, 7, 12), (5, 2, 40)):
        q, k = rand(batch, 4, seqlen_q, 64, device=device), rand(batch, 2, seqlen_k, 64, device=device)
        _expect_equal(compiled(q, k), _all_functions(q, k))
    assert len(graphs) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return attention(q, k, k, causal="top_left")

    q, k = INPUTS["plain"](device)
    attention(q, k, k, causal="top_left")  # a known signature must not run instead of being traced
    program = torch.export.export(Module(), (q, k), strict=strict)
    assert len(calls_of(program.graph_module)) == 1
    assert torch.equal(program.module()(q, k), attention(q, k, k, causal="top_left"))


def test_a_signature_that_autocast_cast_leaves_no_plan(device: str) -> None:
    q, k = (tensor.float() for tensor in INPUTS["plain"](device))
    with torch.autocast(device, dtype=torch.float16):
        expected = attention(q.half(), k.half(), k.half())
        for _ in range(2):
            assert torch.equal(attention(q, k, k), expected)
    with pytest.raises(TypeError, match=r"query has dtype torch\.float32"):
        attention(q, k, k)


def test_fake_tensors_behind_a_known_signature_do_not_run(device: str) -> None:
    q, k = INPUTS["plain"](device)
    attention(q, k, k, return_lse=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_q, fake_k = mode.from_tensor(q), mode.from_tensor(k)
        out, lse = attention(fake_q, fake_k, fake_k, return_lse=True)
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])


def test_vmap(device: str) -> None:
    q, k = rand(3, 2, 4, 9, 64, device=device), rand(3, 2, 4, 11, 64, device=device)
    got = torch.func.vmap(lambda q, k: attention(q, k, k))(q, k)
    assert torch.equal(got, attention(q, k, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    q, k = (tensor.float() for tensor in INPUTS["plain"](device))
    expected = attention(q.to(dtype), k.to(dtype), k.to(dtype))
    written = torch.empty_like(expected)
    functions = {
        "eager": lambda: attention(q, k, k),
        "mixed": lambda: attention(q.to(dtype), k, k),
        "operator": lambda: FORWARD(q, k, k)[0],
        "out": lambda: (FORWARD_OUT(q, k, k, written), written)[1],
        "compiled": torch.compile(lambda: attention(q, k, k), fullgraph=True, backend="aot_eager"),
    }
    for name, function in functions.items():
        with torch.autocast(device, dtype=dtype):
            assert torch.equal(function(), expected), name
    with pytest.raises(TypeError, match=r"query has dtype torch\.float32"):
        attention(q, k, k)
    with (
        torch.autocast(device, dtype=dtype),
        pytest.raises(TypeError, match=r"query has dtype torch\.float64"),
    ):
        attention(q.double(), k, k)


def test_autocast_leaves_usable_inputs_alone(device: str) -> None:
    q, k = INPUTS["plain"](device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert attention(q, k, k).dtype is FORWARD(q, k, k)[0].dtype is torch.float16


def test_grad_is_recorded_and_not_under_no_grad(device: str) -> None:
    q, k = INPUTS["plain"](device)
    expected = attention(q, k, k)
    q.requires_grad_()

    def without_grad(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, k)

    for backend in ("eager", "aot_eager"):
        recorded = torch.compile(lambda q, k: attention(q, k, k), backend=backend)(q, k)
        assert recorded.requires_grad
        assert torch.equal(recorded, expected)
        compiled = torch.compile(without_grad, fullgraph=True, backend=backend)
        assert torch.equal(compiled(q, k), expected)
    assert FORWARD(q, k, k)[0].requires_grad
    with torch.no_grad():
        assert torch.equal(FORWARD(q, k, k)[0], expected)
        assert torch.equal(torch.compile(attention, backend="aot_eager", fullgraph=True)(q, k, k), expected)


def test_errors_come_while_tracing() -> None:
    q = rand(1, 4, 9, 64)
    with pytest.raises(Exception, match="causal='left'; allowed is"):
        torch.compile(lambda q: attention(q, q, q, causal="left"), fullgraph=True, backend="eager")(q)
    with pytest.raises(Exception, match=r"2 heads .* enable_gqa=True"):
        torch.compile(
            lambda q: scaled_dot_product_attention(q, q[:, :2], q[:, :2]), fullgraph=True, backend="eager"
        )(q)


def test_nothing_is_registered_before_it_is_needed() -> None:
    """Importing the package loads no torch; an eager call registers no operator; compiling first works."""
    code = """
import sys, sdpa_cutlass
assert "torch" not in sys.modules and "numpy" not in sys.modules
import torch
q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
original = torch.nn.functional.scaled_dot_product_attention
if "eager" in sys.argv:
    sdpa_cutlass.attention(q, q, q)
    assert "sdpa_cutlass.integrations.torch_ops" not in sys.modules
    assert not hasattr(torch.ops.sdpa_cutlass, "attention_forward")
torch.compile(lambda q: sdpa_cutlass.attention(q, q, q), fullgraph=True, backend="eager")(q)
assert hasattr(torch.ops.sdpa_cutlass, "attention_forward")
assert torch.nn.functional.scaled_dot_product_attention is original
"""
    for mode in ("eager", "compiled"):
        subprocess.run([sys.executable, "-W", "error", "-c", code, mode], check=True, timeout=120)
