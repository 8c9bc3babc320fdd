"""This library at torch's swap point for flash attention: offered, activated, restored; its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sdpa_cutlass
from sdpa_cutlass.errors import UnsupportedError
from sdpa_cutlass.integrations import flash_impl
from sdpa_cutlass.integrations.head_dims import HeadDims

HEAD_DIMS = HeadDims(plain=frozenset({64}), general=64, dropout=64)


def half(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16)


swap_point = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch has no swap point"
)


@swap_point
def test_the_swap_point_is_registered_not_activated() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]):
        assert flash_impl.NAME in torch.nn.attention.list_flash_attention_impls()
        assert torch.nn.attention.current_flash_attention_impl() is None


@swap_point
def test_the_swap_point_is_activated_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_registered() -> tuple[bool, ...]:
        name = "aten::_scaled_dot_product_flash_attention"
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return tuple(has_kernel(operator, "CUDA") for operator in (name, name + "_backward"))

    monkeypatch.setattr(flash_impl, "cuda_head_dims", lambda: {torch.device("cuda", 0): HEAD_DIMS})
    had_a_kernel = is_registered()  # torch's own, in a CUDA build
    torch.nn.attention.activate_flash_attention_impl(flash_impl.NAME)
    try:
        assert torch.nn.attention.current_flash_attention_impl() == flash_impl.NAME
        assert is_registered() == (True, True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert is_registered() == had_a_kernel
    handle = flash_impl.activate()
    assert is_registered() == (True, True)
    handle.remove()
    assert is_registered() == had_a_kernel


class FakeOriginal:
    """Stands in for torch's kernel."""

    def call_boxed(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        return args, options


@swap_point
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_for_the_swap_point(is_causal: bool, device: str) -> None:
    """On tensors of any device: results, their order and their layout as the aten operator's."""
    q, k = half(2, 4, 9, 64, device=device), half(2, 4, 11, 64, device=device)
    inputs = [tensor.float() for tensor in (q, k, k)]
    lower_right = causal_lower_right(9, 11)._materialize(q.device) if is_causal else None
    expected = F.scaled_dot_product_attention(*inputs, lower_right, scale=0.3)
    kernel = flash_impl.make_kernel({q.device: HEAD_DIMS}, FakeOriginal())
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        results = kernel("keys", q, k, k, 0.0, is_causal, scale=0.3)
        torch.testing.assert_close(results[0].float(), expected, atol=3e-3, rtol=3e-3)
        fake = [tensor.to("meta") for tensor in (q, k, k)]
        like = torch.ops.aten._scaled_dot_product_flash_attention(*fake, 0.0, is_causal, scale=0.3)
        for got, wanted in zip(results, like, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            else:
                assert got == wanted
        assert usage.served == 1
        left = kernel("keys", q, k, k, 0.1, is_causal, scale=0.3)
        assert left == (("keys", q, k, k, 0.1, is_causal, False), {"scale": 0.3})
        kernel("keys", q, k, k, 0.0, is_causal, True)
        kernel("keys", q.clone().requires_grad_(), k, k)
        wide = half(2, 4, 9, 72, device=device)
        kernel("keys", wide, wide, wide)
        for refused in ((q[0], k[0], k[0]), (q, k[:1], k[:1]), (q, k, k[..., :32])):
            kernel("keys", *refused)
        with torch.autocast(device, dtype=torch.float16):
            kernel("keys", q.float(), k.float(), k.float())
            kernel("keys", q, k.float(), k.float())
    assert usage.served == 1
    assert usage.fallbacks == {
        "dropout_p": 1, "debug mask": 1, "requires grad": 1, "head_dim": 1, "shapes or dtypes": 5
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="dropout_p"):
        flash_impl.make_kernel({q.device: HEAD_DIMS}, None)("keys", q, k, k, 0.1)


@swap_point
@pytest.mark.parametrize(("seqlens", "is_causal"), [((9, 11), True), ((11, 9), True), ((70, 70), False)])
def test_the_kernel_of_the_backward(seqlens: tuple[int, int], is_causal: bool, device: str) -> None:
    """The gradients of `attention`, bit for bit; rows without keys have a softmax_lse of +inf there."""
    served = {half(1, device=device).device: HEAD_DIMS._replace(backward=64)}
    seqlen_q, seqlen_k = seqlens
    q, k, v = (
        half(2, 4, n, 64, device=device, seed=i).requires_grad_()
        for i, n in enumerate((seqlen_q, seqlen_k, seqlen_k))
    )
    dout = half(2, 4, seqlen_q, 64, device=device, seed=3)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        out, lse, *_, seed, offset, _ = flash_impl.make_kernel(served, None)(
            "keys", q, k, v, 0.0, is_causal, scale=0.3
        )
        assert usage.served == 1
        assert not out.requires_grad
        backward = flash_impl.make_backward_kernel(served, FakeOriginal())
        given = (dout, q, k, v, out, lse, None, None, seqlen_q, seqlen_k)
        found = backward("keys", *given, 0.0, is_causal, seed, offset, scale=0.3)
        causal = "bottom_right" if is_causal else None
        same = sdpa_cutlass.attention(q, k, v, causal=causal, scale=0.3)
        expected = torch.autograd.grad(same, (q, k, v), dout)
        assert all(map(torch.equal, found, expected))
        left = backward("keys", *given, 0.1, is_causal, seed, offset, scale=0.3)
        assert left == (("keys", *given, 0.1, is_causal, seed, offset), {"scale": 0.3})
        assert usage.fallbacks == {"dropout_p": 1}
        elsewhere = flash_impl.make_backward_kernel({}, None)
        with pytest.raises(UnsupportedError, match="device"):
            elsewhere("keys", *given, 0.0, is_causal, seed, offset)


@swap_point
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_activated_it_trains(compiled: bool) -> None:
    """With torch's gradients, and the same bits in every run."""
    leaves = [half(2, 4, 300, 64, device="cuda", seed=i).requires_grad_() for i in range(3)]
    dout = half(2, 4, 300, 64, device="cuda", seed=3)

    def run() -> tuple[torch.Tensor, ...]:
        torch._dynamo.reset()

        def function(*tensors: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

        chosen = torch.compile(function, backend="aot_eager") if compiled else function
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return torch.autograd.grad(chosen(*leaves), leaves, dout)

    expected = run()
    torch.nn.attention.activate_flash_attention_impl(flash_impl.NAME)
    try:
        found, again = run(), run()
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    ours = sdpa_cutlass.attention(*leaves, causal="top_left")
    for one, same, own, wanted in zip(
        found, again, torch.autograd.grad(ours, leaves, dout), expected, strict=True
    ):
        assert torch.equal(one, same)
        assert torch.equal(one, own)
        torch.testing.assert_close(one.float(), wanted.float(), atol=5e-3, rtol=5e-3)


@swap_point
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head_dim", [64, 36])
def test_activated_it_gives_what_torchs_own_kernel_gives(compiled: bool, head_dim: int) -> None:
    """Every way to the operator: is_causal, both biases, more and fewer keys than rows, a padded head_dim."""
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
    for seqlen_q, seqlen_k in ((23, 56), (56, 56), (1, 130), (200, 200)):
        q = half(2, 4, seqlen_q, head_dim, device="cuda")
        k = half(2, 4, seqlen_k, head_dim, device="cuda", seed=1)
        calls.append(((q, k, k), {}))
        calls.append(((q, k, k), {"attn_mask": causal_lower_right(seqlen_q, seqlen_k)}))
        calls.append(((q, k, k), {"attn_mask": causal_upper_left(seqlen_q, seqlen_k)}))
        calls.append(((q, k, k), {"is_causal": True, "scale": 0.3}))

    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()

        def function(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(*tensors, **options)

        chosen = torch.compile(function, backend="aot_eager") if compiled else function
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return [chosen(*tensors, **options) for tensors, options in calls]

    expected = run()
    torch.nn.attention.activate_flash_attention_impl(flash_impl.NAME)
    try:
        found = run()
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for out, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(out.float(), wanted.float(), atol=3e-3, rtol=3e-3)
