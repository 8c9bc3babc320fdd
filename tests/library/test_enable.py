"""enable(), disable(), enabled(): what falls through and why; torch's errors stay; everything is undone."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sdpa_cutlass
from sdpa_cutlass.errors import ArgumentError, LaunchError, LibraryNotFoundError
from sdpa_cutlass.integrations import head_dims
from sdpa_cutlass.public import api
from tests.library.torch_calls import ORIGINAL, close, half
from tests.library.torch_features import HAS_ENABLE_GQA

pytestmark = pytest.mark.usefixtures("_torch_is_left_as_found")

Q = half(1, 2, 9, 64)
FALL_THROUGH = {
    "float32": ("dtype torch.float32", lambda: (Q.float(),) * 3, {}),
    "float64": ("dtype torch.float64", lambda: (Q.double(),) * 3, {"is_causal": True}),
    "head_dim": ("head_dim", lambda: (half(1, 2, 9, 264),) * 3, {"scale": 0.5}),
    "grouped heads": (
        "head_dim",
        lambda: (half(1, 4, 9, 264), *(half(1, 2, 9, 264),) * 2),
        {"enable_gqa": True},
    ),
    "value's head_dim": ("head_dim", lambda: (Q, Q, half(1, 2, 9, 264)), {}),
    "masked": ("head_dim", lambda: (half(1, 2, 9, 264),) * 3, {"attn_mask": half(9, 9)}),
    "device": ("device meta", lambda: (Q.to("meta"),) * 3, {}),
}


@pytest.mark.parametrize("case", FALL_THROUGH)
def test_fall_through(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, make, options = FALL_THROUGH[case]
    if "enable_gqa" in options and not HAS_ENABLE_GQA:
        pytest.skip("this torch has no enable_gqa")
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


LARGER = {
    "query and key": lambda: (half(1, 2, 9, 72).requires_grad_(),) * 3,
    "value": lambda: (Q, Q, half(1, 2, 9, 72).requires_grad_()),
    "mask": lambda: (*(half(1, 2, 9, 72),) * 3, half(9, 9).requires_grad_()),
}


@pytest.mark.parametrize("case", LARGER)
def test_gradients_beyond_the_largest_kernels_fall_through(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a library that was built without some; without grad mode they are served."""
    monkeypatch.setattr(head_dims, "largest_head_dim", lambda *_: 64)
    tensors = LARGER[case]()
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(*tensors)
        with torch.no_grad():
            F.scaled_dot_product_attention(*tensors)
    assert torch.equal(out, ORIGINAL(*tensors))
    assert (usage.served, usage.fallbacks) == (1, {"requires grad": 1})


def test_gradients_are_served() -> None:
    """Those of a mask too."""
    inputs = [half(1, 2, 9, 64, seed=seed).requires_grad_() for seed in range(3)]
    expected = torch.autograd.grad(ORIGINAL(*inputs).float().square().sum(), inputs)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(*inputs)
        with torch.no_grad():
            F.scaled_dot_product_attention(*inputs)
        mask = half(9, 9).requires_grad_()
        F.scaled_dot_product_attention(*inputs, attn_mask=mask).float().sum().backward()
    for grad, other in zip(torch.autograd.grad(out.float().square().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(grad, other, atol=2e-2, rtol=2e-2)
    assert mask.grad is not None
    assert (usage.served, usage.fallbacks) == (3, {})


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, about its own vmap
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, about torch.jit
def test_tensor_subclasses_modes_and_vmap_fall_through() -> None:
    class Mine(torch.Tensor):
        pass

    stacked = half(3, 1, 2, 9, 64)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(Q.as_subclass(Mine), Q, Q)
        masked = F.scaled_dot_product_attention(Q, Q, Q, torch.ones(9, 9, dtype=torch.bool).as_subclass(Mine))
        mapped = torch.func.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(stacked)
        graph = torch.fx.experimental.proxy_tensor.make_fx(
            lambda q: F.scaled_dot_product_attention(q, q, q), tracing_mode="real"
        )(Q)
        traced = torch.jit.trace(lambda q: F.scaled_dot_product_attention(q, q, q), (Q,), check_trace=False)
    assert isinstance(out, Mine)
    assert isinstance(masked, Mine)
    close(mapped, ORIGINAL(stacked, stacked, stacked))
    other = half(1, 2, 9, 64, seed=7)
    assert torch.equal(graph(other), ORIGINAL(other, other, other))
    assert torch.equal(traced(other), ORIGINAL(other, other, other))
    assert usage.served == 0
    assert usage.fallbacks["tensor subclass or vmap"] == 3
    assert usage.fallbacks["dispatch mode or tracing"] >= 2


REFUSED_BY_TORCH: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "heads": ("ArgumentError", (Q, half(1, 3, 9, 64), half(1, 3, 9, 64)), {}),
    "mask's shape": ("ArgumentError", (Q, Q, Q, half(3, 1, 9, 9)), {}),
    "mask's dtype": ("attn_mask's dtype torch.float64", (Q, Q, Q, half(9, 9).double()), {}),
    "bfloat16 mask": ("attn_mask's dtype torch.bfloat16", (Q, Q, Q, half(9, 9).bfloat16()), {}),
    "dropout_p": ("ArgumentError", (Q, Q, Q), {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("case", REFUSED_BY_TORCH)
def test_torchs_errors_stay_torchs(case: str) -> None:
    reason, arguments, options = REFUSED_BY_TORCH[case]
    with pytest.raises(RuntimeError) as expected:
        ORIGINAL(*arguments, **options)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage, pytest.raises(RuntimeError) as found:
        F.scaled_dot_product_attention(*arguments, **options)
    assert str(found.value) == str(expected.value)
    assert usage.fallbacks == {reason: 1}


def test_a_mask_together_with_is_causal_is_torchs_business() -> None:
    """Some of its backends raise an error, some combine them."""
    mask = torch.ones(9, 9, dtype=torch.bool)
    results: list[torch.Tensor | str] = []
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        for function in (ORIGINAL, F.scaled_dot_product_attention):
            try:
                results.append(function(Q, Q, Q, mask, is_causal=True))
            except RuntimeError as error:
                results.append(str(error))
    assert usage.fallbacks == {"attn_mask with is_causal": 1}
    assert str(results[0]) == str(results[1])


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_that_is_not_served_reaches_torch(variant: Any) -> None:
    """It recognises only the function that stands in torch.nn.functional, which then is ours."""
    q, k = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 9, 64)
    bias = variant(5, 9)
    expected = ORIGINAL(q, k, k, bias)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        assert torch.equal(F.scaled_dot_product_attention(q, k, k, bias), expected)
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, k, bias, is_causal=True)
    assert (usage.served, usage.fallbacks) == (0, {"dtype torch.float32": 2})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_torchs() -> None:
    nested = torch.nested.nested_tensor([half(n, 4, 64) for n in (5, 9)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    expected = ORIGINAL(nested, nested, nested)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = F.scaled_dot_product_attention(nested, nested, nested)
    assert torch.equal(out.values(), expected.values())
    assert usage.served == 0


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
            F.scaled_dot_product_attention(*(half(1, 2, 9, 264).requires_grad_(),) * 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "dtype torch.float32" in warnings[0]
    assert "requires grad" in warnings[1]


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
        F.scaled_dot_product_attention(Q.float(), Q.float(), Q.float())
    assert (usage.served, usage.fallbacks) == (1, {"dtype torch.float32": 1})
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

    monkeypatch.setattr(head_dims, "library", missing)
    for options in ({}, {"devices": "cpu"}):
        with pytest.raises(RuntimeError, match="nowhere"):
            sdpa_cutlass.enable(**options)
        with pytest.raises(RuntimeError, match="nowhere"), sdpa_cutlass.enabled(**options):
            pass


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
        assert function(q.clone().requires_grad_()).requires_grad
        assert served() == [False, True, True]
    close(function(q), expected)
    with sdpa_cutlass.enabled(devices=[device]):
        close(function(q), expected)
