"""torch.ops.sdpa_cutlass with masks, dropout and lengths, packed sequences, and both under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sdpa_cutlass.integrations.torch_ops  # noqa: F401  registers the operators
from sdpa_cutlass import PhiloxState, attention, attention_varlen, scaled_dot_product_attention
from tests.library.reference import rand

OPS = torch.ops.sdpa_cutlass
FORWARD, FORWARD_OUT = OPS.attention_forward.default, OPS.attention_forward_out.default
VARLEN, VARLEN_OUT = OPS.attention_varlen_forward.default, OPS.attention_varlen_forward_out.default


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def int32(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = ((4, 9), (2, 11), (2, 11))
    q, k, v = (rand(2, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes))
    return q, k, v


def packed(device: str) -> tuple[Any, ...]:
    q, k = rand(9, 4, 64, device=device), rand(11, 2, 64, device=device)
    return q, k, k, int32([0, 4, 9], device), int32([0, 11, 11], device), 5, 11


TENSORS: dict[str, Callable[[str], dict[str, torch.Tensor]]] = {
    "boolean mask": lambda device: {"attn_mask": rand(9, 11, device=device) > -0.5},
    "bias": lambda device: {"attn_mask": rand(2, 1, 9, 11, device=device)},
    "expanded mask": lambda device: {"attn_mask": (rand(11, device=device) > -0.5).expand(2, 4, 9, 11)},
    "lengths": lambda device: {"seqlens_q": int32([9, 3], device), "seqlens_k": int32([0, 11], device)},
    "philox": lambda device: {"philox": torch.tensor([1, 2], device=device)},
}
OPTIONS: list[dict[str, Any]] = [{}, {"causal": "bottom_right", "return_lse": True, "scale": 0.3}]


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck(tensors: str, options: dict[str, Any], device: str) -> None:
    q, k, v = inputs(device)
    given = TENSORS[tensors](device)
    if "philox" in given:
        options = {**options, "p_dropout": 0.3}
    torch.library.opcheck(FORWARD, (q, k, v), {**given, **options})
    out = torch.empty_like(q)
    torch.library.opcheck(FORWARD_OUT, (q, k, v, out), {**given, **options})


SHAPES = {
    "head_dim 72": ((2, 4, 9, 72), (2, 4, 11, 72), (2, 4, 11, 72)),
    "head_dim 33": ((2, 4, 9, 33), (2, 4, 11, 33), (2, 4, 11, 33)),
    "value's head_dim": ((2, 4, 9, 64), (2, 4, 11, 64), (2, 4, 11, 32)),
    "bshd": ((2, 9, 4, 64), (2, 11, 4, 64), (2, 11, 4, 64)),
    "bshd 3-D": ((9, 4, 64), (11, 4, 64), (11, 4, 64)),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_opcheck_of_shapes(shapes: str, device: str) -> None:
    q, k, v = (rand(*shape, device=device, seed=seed) for seed, shape in enumerate(SHAPES[shapes]))
    options = {"layout": "bshd" if "bshd" in shapes else "bhsd", "return_lse": True}
    torch.library.opcheck(FORWARD, (q, k, v), options)
    swapped = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k, v)]
    torch.library.opcheck(FORWARD, tuple(swapped), options)
    expected = attention(*swapped, **options)
    for got, wanted in zip(FORWARD(*swapped, **options), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"p_dropout": 0.3, "philox": torch.tensor([1, 2])}], ids=["plain", "lse", "dropout"]
)
def test_opcheck_of_packed_sequences(options: dict[str, Any], device: str) -> None:
    options = {name: x.to(device) if name == "philox" else x for name, x in options.items()}
    arguments = packed(device)
    torch.library.opcheck(VARLEN, arguments, options)
    out = torch.empty_like(arguments[0])
    torch.library.opcheck(VARLEN_OUT, (*arguments[:3], out, *arguments[3:]), options)
    expected, lse = VARLEN(*arguments, **options)
    assert torch.equal(attention_varlen(*arguments, **{**options, "return_lse": False}), expected)
    assert lse.shape == ((4, 9) if options.get("return_lse") else (0,))


def test_the_operators_draw_no_random_numbers(device: str) -> None:
    before = torch.get_rng_state()
    for call in (
        lambda: FORWARD(*inputs(device), p_dropout=0.3),
        lambda: VARLEN(*packed(device), p_dropout=0.3),
        lambda: FORWARD(*(x.to("meta") for x in inputs(device)), p_dropout=0.3),
    ):
        with pytest.raises(
            ValueError, match=r"philox is None and p_dropout=0.3; the operator needs a tensor"
        ):
            call()
    assert (FORWARD(*inputs(device), p_dropout=1.0)[0] == 0).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_tensors_have_shapes() -> None:
    q, k = torch.empty(2, 9, 4, 72, device="meta"), torch.empty(2, 11, 2, 72, device="meta")
    mask = torch.empty(9, 11, device="meta", dtype=torch.bool)
    out, lse = FORWARD(q.half(), k.half(), k.half()[..., :40], mask, layout="bshd", return_lse=True)
    assert (out.shape, lse.shape) == ((2, 9, 4, 40), (2, 4, 9))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(9, 11\)"):
        FORWARD(q.half(), k.half()[:, 1:], k.half()[:, 1:], mask, layout="bshd")
    with pytest.raises(TypeError, match="seqlens_k has dtype"):
        FORWARD(q.half(), k.half(), k.half(), seqlens_k=torch.empty(2, device="meta"), layout="bshd")


def everything(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(q)
    attention(q * 2, k, v, attn_mask=mask, out=out)
    return (
        out + 1,
        scaled_dot_product_attention(q, k, v, mask, enable_gqa=True) * 2,
        *attention(q, k, v, seqlens_k=lengths, causal="bottom_right", return_lse=True),
        attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, layout="bshd"),
        attention(q[..., :40], k[..., :40], v[..., :33], seqlens_q=lengths),
        attention(q, k, v, p_dropout=0.3, philox=PhiloxState(1, 2**63 + 2), attn_mask=mask),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_compile_has_no_graph_break(backend: str, kind: torch.dtype, device: str) -> None:
    arguments = (*inputs(device), (rand(9, 11, device=device) + 0.5).to(kind), int32([4, 11], device))
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


def test_dynamic_shapes_make_one_graph(device: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=backend)
    for batch, rows, keys in ((3, 9, 11), (6, 7, 12), (5, 3, 40)):
        q, k = rand(batch, 4, rows, 64, device=device), rand(batch, 2, keys, 64, device=device)
        arguments = (q, k, k, rand(rows, keys, device=device) > -0.5, int32([2] * batch, device))
        for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1


def drop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, philox = attention(q, k, v, p_dropout=0.5, return_philox=True)
    return first, scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True), philox


def check_drops(function: Callable[..., Any], device: str) -> None:
    """New weights are dropped in every call, as the returned tensor says, and a seed brings them back."""
    tensors = inputs(device)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results += [function(*tensors), function(*tensors)]
    outs = [out for first, second, _ in results for out in (first, second)]
    assert [torch.equal(outs[0], out) for out in outs] == [True, *[False] * 3, True, *[False] * 7]
    for first, _, philox in results:
        assert (philox.shape, philox.dtype) == ((2,), torch.int64)
        assert torch.equal(attention(*tensors, p_dropout=0.5, philox=philox), first)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_is_drawn_in_front_of_the_operator(backend: str, device: str) -> None:
    check_drops(torch.compile(drop, fullgraph=True, backend=backend), device)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles C++
def test_inductor(device: str) -> None:
    arguments = (*inputs(device), rand(9, 11, device=device), int32([4, 11], device))
    compiled = torch.compile(everything, fullgraph=True)
    for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    check_drops(torch.compile(drop, fullgraph=True), device)


def pack(*arguments: Any) -> tuple[torch.Tensor, ...]:
    written = torch.zeros_like(arguments[0])
    attention_varlen(*arguments, out=written)
    dropped = attention_varlen(*arguments, p_dropout=0.3, philox=(1, 2))
    return written, dropped, *attention_varlen(*arguments, causal="top_left", return_lse=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_sequences_compile(backend: str, device: str) -> None:
    compiled = torch.compile(pack, fullgraph=True, backend=backend)
    arguments = packed(device)
    others = (*arguments[:3], int32([0, 5, 9], device), int32([0, 3, 11], device), 5, 11)
    for inputs_now in (arguments, others, (*others[:5], 6, 12), (*others[:5], 7, 13)):
        for got, expected in zip(compiled(*inputs_now), pack(*inputs_now), strict=True):
            assert torch.equal(got, expected)


def test_packed_sequences_draw_when_compiled(device: str) -> None:
    function = torch.compile(
        lambda *a: attention_varlen(*a, p_dropout=0.5, return_philox=True),
        fullgraph=True,
        backend="aot_eager",
    )
    arguments = packed(device)
    first, philox = function(*arguments)
    assert torch.equal(attention_varlen(*arguments, p_dropout=0.5, philox=philox), first)
    assert not torch.equal(function(*arguments)[0], first)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return attention(q, k, k, attn_mask=mask)

    q, k, _ = inputs(device)
    mask = rand(9, 11, device=device) > -0.5
    attention(q, k, k, attn_mask=mask)  # a known signature must not run instead of being traced
    program = torch.export.export(Module(), (q, k, mask), strict=strict)
    assert torch.equal(program.module()(q, k, mask), attention(q, k, k, attn_mask=mask))


def test_fake_tensors_behind_a_known_signature_do_not_run(device: str) -> None:
    q, k, v = inputs(device)
    mask, lengths = rand(9, 11, device=device) > -0.5, int32([4, 11], device)
    arguments = packed(device)
    attention(q, k, v, attn_mask=mask, seqlens_k=lengths, p_dropout=0.5)
    attention_varlen(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (q, k, v, mask, lengths)]
        out, philox = attention(
            *fake[:3], attn_mask=fake[3], seqlens_k=fake[4], p_dropout=0.5, return_philox=True
        )
        fake_packed = [mode.from_tensor(tensor) for tensor in arguments[:5]]
        packed_out, lse = attention_varlen(*fake_packed, 5, 11, return_lse=True)
    for tensor, shape in (
        (out, q.shape),
        (philox, (2,)),
        (packed_out, arguments[0].shape),
        (lse, (4, 9)),
    ):
        assert isinstance(tensor, torch._subclasses.FakeTensor)
        assert tensor.shape == shape


def test_vmap(device: str) -> None:
    """Also behind signatures that are known: what vmap hands over looks like a tensor without memory."""
    q, k, v = inputs(device)
    arguments = packed(device)
    masks = rand(3, 9, 11, device=device) > -0.5
    states = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)
    cu_seqlens = torch.stack([arguments[3]] * 3)
    cases: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = [
        (lambda mask: attention(q, k, v, attn_mask=mask), masks),
        (lambda state: attention(q, k, v, p_dropout=0.5, philox=state), states),
        (lambda cu_seqlens_q: attention_varlen(*arguments[:3], cu_seqlens_q, *arguments[4:]), cu_seqlens),
        (lambda state: attention_varlen(*arguments, p_dropout=0.5, philox=state), states),
    ]
    for function, values in cases:
        expected = [function(value) for value in values]
        for out, wanted in zip(torch.func.vmap(function)(values), expected, strict=True):
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32], ids=str)
def test_autocast(mask_dtype: torch.dtype, device: str) -> None:
    q, k, v = (tensor.float() for tensor in inputs(device))
    mask = (rand(9, 11, device=device, dtype=torch.float32) + 1e-4).to(mask_dtype)
    cast_mask = mask if mask_dtype is torch.bool else mask.half()
    expected = attention(q.half(), k.half(), v.half(), attn_mask=cast_mask)
    written = torch.empty_like(expected)
    functions = {
        "eager": lambda: attention(q, k, v, attn_mask=mask),
        "operator": lambda: FORWARD(q, k, v, mask)[0],
        "operator by name": lambda: FORWARD(q, k, v, attn_mask=mask)[0],
        "out": lambda: (FORWARD_OUT(q, k, v, written, mask), written)[1],
        "compiled": torch.compile(
            lambda: attention(q, k, v, attn_mask=mask), fullgraph=True, backend="aot_eager"
        ),
    }
    for name, function in functions.items():
        with torch.autocast(device, dtype=torch.float16):
            assert torch.equal(function(), expected), name


def test_autocast_of_packed_sequences(device: str) -> None:
    q, k, v, *rest = packed(device)
    expected = attention_varlen(q, k, v, *rest)
    wide = [tensor.float() for tensor in (q, k, v)]
    with torch.autocast(device, dtype=torch.float16):
        for _ in range(2):
            assert torch.equal(attention_varlen(*wide, *rest), expected)
        assert torch.equal(VARLEN(*wide, *rest)[0], expected)


def test_errors_come_while_tracing(device: str) -> None:
    q, k, v = inputs(device)
    mask = torch.ones(9, 10, dtype=torch.bool, device=device)
    calls: dict[str, Callable[[], Any]] = {
        r"attn_mask has shape \(9, 10\)": lambda: attention(q, k, v, attn_mask=mask),
        "p_dropout=1.5": lambda: attention(q, k, v, p_dropout=1.5),
        "layout='x'": lambda: attention(q, k, v, layout="x"),
        "Explicit attn_mask should not": lambda: scaled_dot_product_attention(q, k, v, mask, is_causal=True),
    }
    for message, call in calls.items():
        with pytest.raises(Exception, match=message):
            torch.compile(call, fullgraph=True, backend="eager")()
