"""enable(), disable(), enabled(): what is served, what falls through and why, and that all is undone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdpa_cutlass
from sdpa_cutlass import api, torch_sdpa
from sdpa_cutlass.errors import ArgumentError, LaunchError, LibraryNotFoundError

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """Every test leaves torch as it found it."""
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is ORIGINAL
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch_sdpa._state.watchers == ()


def half(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0, "attn_mask": None}], ids=str
)
def test_served_calls(options: dict[str, Any], device: str) -> None:
    q, k, v = (
        half(2, 4, 9, 64, device=device),
        half(2, 4, 11, 64, device=device),
        half(2, 4, 11, 64).to(device),
    )
    expected = ORIGINAL(q, k, v, **options)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        close(F.scaled_dot_product_attention(q, k, v, **options), expected)
        close(F.scaled_dot_product_attention(query=q, key=k, value=v, **options), expected)
    assert (usage.served, usage.fallbacks) == (2, {})


def test_grouped_heads_are_served(device: str) -> None:
    q, k = half(2, 4, 9, 64, device=device), half(2, 2, 11, 64, device=device)
    expected = ORIGINAL(q, k, k, enable_gqa=True)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        close(F.scaled_dot_product_attention(q, k, k, enable_gqa=True), expected)
    assert usage.served == 1


Q = half(1, 2, 9, 64)
FALL_THROUGH = {
    "mask": ("attn_mask", lambda: (Q, Q, Q, torch.ones(9, 9, dtype=torch.bool).tril()), {}),
    "bias": ("attn_mask", lambda: (Q, Q, Q), {"attn_mask": torch.zeros(9, 9, dtype=torch.float16)}),
    "dropout": ("dropout_p", lambda: (Q, Q, Q, None, 1.0), {}),
    "float32": ("dtype torch.float32", lambda: (Q.float(),) * 3, {}),
    "float64": ("dtype torch.float64", lambda: (Q.double(),) * 3, {"is_causal": True}),
    "head_dim": (
        "head_dim",
        lambda: (half(1, 4, 9, 24), half(1, 2, 9, 24), half(1, 2, 9, 24)),
        {"enable_gqa": True},
    ),
    "value's head_dim": ("value's head_dim", lambda: (Q, Q, Q[..., :32]), {"scale": 0.5}),
    "query's grad": ("requires grad", lambda: (Q.clone().requires_grad_(), Q, Q), {}),
    "value's grad": ("requires grad", lambda: (Q, Q, Q.clone().requires_grad_()), {}),
    "device": ("device meta", lambda: (Q.to("meta"),) * 3, {}),
}


@pytest.mark.parametrize("case", FALL_THROUGH)
def test_fall_through(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, make, options = FALL_THROUGH[case]
    tensors = make()
    expected = ORIGINAL(*tensors, **options)
    with caplog.at_level(logging.DEBUG, "sdpa_cutlass"), sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(*tensors, **options)
    assert (usage.served, usage.fallbacks) == (0, {reason: 1})
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert reason in caplog.text
    assert out.requires_grad == expected.requires_grad
    assert (out.shape, out.dtype, out.device) == (expected.shape, expected.dtype, expected.device)
    if out.device.type != "meta":
        assert torch.equal(out, expected)


def test_gradients_are_torchs() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        inputs = [half(1, 2, 9, 64, seed=seed).requires_grad_() for seed in range(3)]
        F.scaled_dot_product_attention(*inputs).float().sum().backward()
        with torch.no_grad():
            F.scaled_dot_product_attention(*inputs)
    assert all(tensor.grad is not None for tensor in inputs)
    assert (usage.served, usage.fallbacks) == (1, {"requires grad": 1})


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, about its own vmap
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, about torch.jit
def test_tensor_subclasses_modes_and_vmap_fall_through() -> None:
    class Mine(torch.Tensor):
        pass

    stacked = half(3, 1, 2, 9, 64)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(Q.as_subclass(Mine), Q, Q)
        mapped = torch.func.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(stacked)
        graph = torch.fx.experimental.proxy_tensor.make_fx(
            lambda q: F.scaled_dot_product_attention(q, q, q), tracing_mode="real"
        )(Q)
        traced = torch.jit.trace(lambda q: F.scaled_dot_product_attention(q, q, q), (Q,), check_trace=False)
    assert isinstance(out, Mine)
    close(mapped, ORIGINAL(stacked, stacked, stacked))
    other = half(1, 2, 9, 64, seed=7)
    assert torch.equal(graph(other), ORIGINAL(other, other, other))
    assert torch.equal(traced(other), ORIGINAL(other, other, other))
    assert usage.served == 0
    assert usage.fallbacks["tensor subclass or vmap"] == 2
    assert usage.fallbacks["dispatch mode or tracing"] >= 2


def test_torchs_errors_stay_torchs() -> None:
    k = half(1, 3, 9, 64)
    with pytest.raises(RuntimeError) as expected:
        ORIGINAL(Q, k, k)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage, pytest.raises(RuntimeError) as found:
        F.scaled_dot_product_attention(Q, k, k)
    assert str(found.value) == str(expected.value)
    assert usage.fallbacks == {"ArgumentError": 1}


def test_a_failed_launch_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LaunchError("broken")

    monkeypatch.setattr(api, "scaled_dot_product_attention", fail)
    with sdpa_cutlass.enabled(devices=["cpu"]), pytest.raises(LaunchError, match="broken"):
        F.scaled_dot_product_attention(Q, Q, Q)


def test_log_fallbacks_warns_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    with sdpa_cutlass.enabled(devices=["cpu"], log_fallbacks=True):
        for _ in range(3):
            F.scaled_dot_product_attention(Q.float(), Q.float(), Q.float())
            F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "dtype torch.float32" in warnings[0]
    assert "dropout_p" in warnings[1]


def test_enable_and_disable() -> None:
    usage = sdpa_cutlass.enable(devices="cpu")
    try:
        assert F.scaled_dot_product_attention is not ORIGINAL
        assert sdpa_cutlass.enable(devices="cpu") is usage
        F.scaled_dot_product_attention(Q, Q, Q)
        assert usage.served == 1
    finally:
        sdpa_cutlass.disable()
    assert F.scaled_dot_product_attention is ORIGINAL
    sdpa_cutlass.disable()
    F.scaled_dot_product_attention(Q, Q, Q)
    assert usage.served == 1


def test_blocks_nest_and_end_by_exceptions() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as outer:
        with contextlib.suppress(ZeroDivisionError), sdpa_cutlass.enabled(devices=["cpu"]) as inner:
            F.scaled_dot_product_attention(Q, Q, Q)
            raise ZeroDivisionError
        F.scaled_dot_product_attention(Q, Q, Q)
        sdpa_cutlass.disable()
        F.scaled_dot_product_attention(Q, Q, Q)
    assert (outer.served, inner.served) == (3, 1)
    sdpa_cutlass.enable(devices=["cpu"])
    with sdpa_cutlass.enabled(devices=["cpu"]):
        pass
    assert F.scaled_dot_product_attention is not ORIGINAL
    sdpa_cutlass.disable()


def test_blocks_of_threads_may_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with sdpa_cutlass.enabled(devices=["cpu"]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    with sdpa_cutlass.enabled(devices=["cpu"]):
        thread.start()
        assert entered.wait(10)
    try:
        assert F.scaled_dot_product_attention is not ORIGINAL
    finally:
        leave.set()
        thread.join()


def test_a_replacement_of_ours_by_others_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone wraps the replacement: theirs stays, ours becomes transparent, and enabling again works."""
    kept = None
    with sdpa_cutlass.enabled(devices=["cpu"]):
        ours = F.scaled_dot_product_attention

        def theirs(*args: Any, **options: Any) -> torch.Tensor:
            return ours(*args, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        kept = ours
    assert F.scaled_dot_product_attention is theirs
    assert torch.equal(theirs(Q, Q, Q), ORIGINAL(Q, Q, Q))
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        F.scaled_dot_product_attention(Q, Q, Q)
        F.scaled_dot_product_attention(Q, Q, Q, dropout_p=1.0)
    assert (usage.served, usage.fallbacks) == (1, {"dropout_p": 1})
    assert F.scaled_dot_product_attention is theirs
    assert torch.equal(kept(Q, Q, Q), ORIGINAL(Q, Q, Q))
    monkeypatch.undo()
    F.scaled_dot_product_attention = ORIGINAL  # what undo put back was ours, by then transparent


def test_enabling_again_puts_back_what_others_took_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as outer:
        monkeypatch.setattr(F, "scaled_dot_product_attention", ORIGINAL)
        with sdpa_cutlass.enabled(devices=["cpu"]) as inner:
            F.scaled_dot_product_attention(Q, Q, Q)
        F.scaled_dot_product_attention(Q, Q, Q)
    assert (outer.served, inner.served) == (2, 1)
    assert F.scaled_dot_product_attention is ORIGINAL
    monkeypatch.undo()
    F.scaled_dot_product_attention = ORIGINAL


def test_devices() -> None:
    for wrong in ("tpu", ["cpu", "tpu"], []):
        with pytest.raises(ArgumentError, match="allowed are 'cuda' and 'cpu'"):
            sdpa_cutlass.enable(devices=wrong)


def test_without_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise LibraryNotFoundError("nowhere")

    monkeypatch.setattr(torch_sdpa, "library", missing)
    for options in ({}, {"devices": "cpu"}):
        with pytest.raises(RuntimeError, match="nowhere"):
            sdpa_cutlass.enable(**options)
        with pytest.raises(RuntimeError, match="nowhere"), sdpa_cutlass.enabled(**options):
            pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(dtype: torch.dtype, device: str) -> None:
    q = half(1, 2, 9, 64, device=device)
    for tensors in ((q.float(),) * 3, (q, q.float(), q), (q,) * 3):
        with torch.autocast(device, dtype=dtype):
            expected = ORIGINAL(*tensors)
            with sdpa_cutlass.enabled(devices=[device]) as usage:
                out = F.scaled_dot_product_attention(*tensors)
        assert usage.served == 1
        assert out.dtype is expected.dtype is dtype
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


def test_compile_follows_the_switch(device: str) -> None:
    """One compiled function across enable, a fall-through and disable: the right operator each time."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def served() -> list[bool]:
        return ["sdpa_cutlass" in graph.code for graph in graphs]

    q = half(1, 2, 9, 64, device=device)
    expected = ORIGINAL(q, q, q) * 2
    function = torch.compile(
        lambda q, **options: F.scaled_dot_product_attention(q, q, q, **options) * 2,
        fullgraph=True,
        backend=backend,
    )
    close(function(q), expected)
    assert served() == [False]
    with sdpa_cutlass.enabled(devices=[device]):
        close(function(q), expected)
        assert served() == [False, True]
        function(q, dropout_p=0.5)
        assert served() == [False, True, False]
        assert function(q.clone().requires_grad_()).requires_grad
        assert served() == [False, True, False, False]
    close(function(q), expected)
    with sdpa_cutlass.enabled(devices=[device]):
        close(function(q), expected)


class Block(nn.Module):
    """A GPT block: causal self-attention over fused QKV projections, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seqlen, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seqlen, width))
        return x + self.mlp(self.norm_2(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpt_gives_the_same(compiled: bool, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 128), Block(128, 2), Block(128, 2), nn.Linear(128, 50))
    model = model.to(device, torch.float16).eval()
    tokens = torch.randint(50, (2, 21), device=device)
    with torch.no_grad():
        expected = model(tokens)
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            close(run(tokens), expected)
    assert (usage.served, usage.fallbacks) == (0 if compiled else 2, {})


def test_multihead_attention_gives_the_same(device: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(128, 2).to(device, torch.float16).eval()
    x, memory = half(9, 2, 128, device=device), half(13, 2, 128, device=device)
    padding = torch.zeros(2, 13, dtype=torch.bool, device=device)
    padding[1, 7:] = True
    calls = {"plain": {}, "padded": {"key_padding_mask": padding}}
    with torch.no_grad():
        expected = {name: module(x, memory, memory, need_weights=False, **o)[0] for name, o in calls.items()}
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            for name, options in calls.items():
                close(module(x, memory, memory, need_weights=False, **options)[0], expected[name])
    assert (usage.served, usage.fallbacks) == (1, {"attn_mask": 1})
