"""Gradients of an attn_mask that is added, through torch: shapes, eager and compiled calls, enable()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import sdpa_cutlass
import sdpa_cutlass.integrations.torch_ops  # registers the operators
from sdpa_cutlass import attention, plan, scaled_dot_product_attention
from sdpa_cutlass.call import backward
from sdpa_cutlass.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.usefixtures("_gradient_kernels")

D = 64


def leaf(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Seeded, and requires grad."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()


def leaves(*shape: int, device: str, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [leaf(*shape, device=device, dtype=dtype, seed=seed) for seed in range(3)]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, seen: Any = None, keep: Any = None
) -> torch.Tensor:
    """In float64, differentiable with respect to the same leaves. `keep`: dropout's mask over p_keep."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5 + mask.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    return (weights if keep is None else weights * keep) @ v.double()


def gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.device)
    return torch.autograd.grad((out.double() * weights).sum(), tensors)


def close(found: Any, wanted: Any, atol: float = 4e-3) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other.double(), atol=atol, rtol=6e-3)


SHAPES = [
    (40, 33), (33,), (1, 33), (40, 1), (1,), (4, 40, 33), (1, 40, 33), (4, 1, 33), (4, 1, 1), (2, 1, 40, 33),
    (1, 4, 40, 33), (2, 4, 40, 33), (1, 4, 1, 33), (2, 1, 1, 33), (2, 4, 40, 1), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_that_broadcasts(
    device: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels write is as large as the bias, and has its type."""
    dtype = (torch.float32, torch.float16, torch.bfloat16)[len(shape) % 3]
    q, k, v = leaves(2, 4, 40, D, device=device)
    k, v = (tensor[:, :, :33].detach().requires_grad_() for tensor in (k, v))
    mask = leaf(*shape, device=device, dtype=dtype, seed=9)
    written = []
    original = backward.make_bwd_params

    def noted(*given: Any) -> Any:
        written.append(given[3][3])
        return original(*given)

    monkeypatch.setattr(backward, "make_bwd_params", noted)
    found = gradients(attention(q, k, v, attn_mask=mask), [q, k, v, mask])
    assert (found[3].dtype, found[3].shape) == (dtype, shape)
    assert [(tensor.numel(), tensor.dtype) for tensor in written] == [(mask.numel(), dtype)]
    wanted = gradients(exact(q, k, v, mask), [q, k, v, mask])
    close(found[:3], wanted[:3])
    close(found[3:], wanted[3:], atol=4e-3 if shape[-1] > 1 else 2e-2)  # a sum of all that is rounded in out


FIVE = [
    (2, 3, 2, 9, 7),
    (1, 1, 2, 9, 7),
    (2, 1, 2, 9, 7),
    (1, 3, 1, 1, 7),
    (3, 2, 9, 7),
    (2, 9, 7),
    (3, 1, 1, 7),
]


@pytest.mark.parametrize("shape", FIVE, ids=str)
def test_more_batch_dimensions(device: str, shape: tuple[int, ...]) -> None:
    """Also where only some of them are broadcast: those are summed afterwards, from float32."""
    q, k, v = leaves(2, 3, 2, 9, D, device=device)
    k, v = (tensor[..., :7, :].detach().requires_grad_() for tensor in (k, v))
    mask = leaf(*shape, device=device, seed=9)
    found = gradients(attention(q, k, v, attn_mask=mask), [q, mask])
    assert found[1].dtype is torch.float16
    close(found, gradients(exact(q, k, v, mask), [q, mask]))


def test_fewer_dimensions_and_other_layouts(device: str) -> None:
    mask = leaf(9, 9, device=device, seed=9)
    for shape in ((9, D), (2, 9, D)):
        q, k, v = leaves(*shape, device=device)
        close(
            gradients(attention(q, k, v, attn_mask=mask), [mask]),
            gradients(exact(q, k, v, mask), [mask]),
        )
    q, k, v = leaves(2, 3, 9, D, device=device)
    wanted = gradients(attention(q, k, v, attn_mask=mask), [mask])
    bshd = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out = attention(*bshd, attn_mask=mask, layout="bshd").transpose(1, 2)
    assert torch.equal(gradients(out, [mask])[0], wanted[0])


def test_only_the_bias(device: str) -> None:
    """Parameters of a frozen model: no other kernel runs, and the bits are the same."""
    q, k, v = leaves(2, 4, 40, D, device=device)
    mask = leaf(4, 40, 40, device=device, seed=9)
    wanted = gradients(attention(q, k, v, attn_mask=mask), [q, mask])
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    for _ in range(3):  # the signature is known then
        assert torch.equal(gradients(attention(q, k, v, attn_mask=mask), [mask])[0], wanted[1])
        assert torch.equal(gradients(scaled_dot_product_attention(q, k, v, mask), [mask])[0], wanted[1])
        with torch.no_grad():
            assert not attention(q, k, v, attn_mask=mask).requires_grad
        assert not attention(q, k, v, attn_mask=mask.detach()).requires_grad


@pytest.mark.parametrize("shape", [(4, 40, 33), (2, 1, 1, 33)], ids=str)
def test_with_causal_masks_dropout_lengths_and_grouped_heads(device: str, shape: tuple[int, ...]) -> None:
    q, k, v = leaves(2, 4, 40, D, device=device)
    k, v = (tensor[:, :2, :33].detach().requires_grad_() for tensor in (k, v))
    mask = leaf(*shape, device=device, dtype=torch.float32, seed=9)
    keys = torch.tensor([33, 20], dtype=torch.int32, device=device)
    out, philox = attention(
        q, k, v, attn_mask=mask, causal="top_left", p_dropout=0.3, seqlens_k=keys, return_philox=True
    )
    keep = torch.as_tensor(sdpa_cutlass.dropout_mask(2, 4, 40, 33, 0.3, philox)).to(device).double() / 0.7
    column = torch.arange(33, device=device)
    seen = (column <= torch.arange(40, device=device)[:, None]) & (column < keys[:, None])[:, None, None]
    many = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    close(gradients(out, [q, mask]), gradients(exact(q, *many, mask, seen, keep), [q, mask]))


def test_rows_that_see_nothing_and_calls_without_keys(device: str) -> None:
    q, k, v = leaves(1, 2, 9, D, device=device)
    mask = leaf(9, 9, device=device, seed=9)
    hidden = mask.masked_fill(torch.arange(9, device=device)[:, None] == 4, -torch.inf)
    (grad,) = gradients(attention(q, k, v, attn_mask=hidden), [mask])
    assert grad.isfinite().all()
    assert not grad[4].any()
    assert grad[3].any()
    for keys, p_dropout in ((0, 0.0), (9, 1.0)):
        other = leaf(9, 1, device=device, seed=9)
        out = attention(q, k[:, :, :keys], v[:, :, :keys], attn_mask=other, p_dropout=p_dropout)
        assert torch.equal(gradients(out, [other])[0], torch.zeros_like(other))


def test_a_bias_that_is_expanded_or_strided(device: str) -> None:
    """autograd sums what the caller expanded; gradients of views reach what they are views of."""
    q, k, v = leaves(2, 4, 40, D, device=device)
    table = leaf(40, 40, 4, device=device, seed=9)
    mask = table.permute(2, 0, 1)
    found = gradients(attention(q, k, v, attn_mask=mask), [table])
    close(found, gradients(exact(q, k, v, mask), [table]))
    row = leaf(1, 40, device=device, seed=9)
    found = gradients(attention(q, k, v, attn_mask=row.expand(2, 4, 40, 40)), [row])
    close(found, gradients(exact(q, k, v, row), [row]))
    relative = leaf(79, device=device, seed=9)
    place = torch.arange(40, device=device)
    distance = place[:, None] - place + 39
    found = gradients(attention(q, k, v, attn_mask=relative[distance]), [relative])
    wanted = gradients(exact(q, k, v, relative[distance]), [relative])
    torch.testing.assert_close(found[0].double(), wanted[0].double(), atol=2e-2, rtol=2e-2)


def test_autocast_casts_the_gradient_back(device: str) -> None:
    q, k, v = leaves(1, 2, 33, D, device=device, dtype=torch.float32)
    mask = leaf(33, 33, device=device, dtype=torch.float32, seed=9)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, v, attn_mask=mask)
    (found,) = gradients(out, [mask])
    assert found.dtype is torch.float32
    (wanted,) = gradients(exact(q, k, v, mask), [mask])
    torch.testing.assert_close(found.double(), wanted.double(), atol=5e-2, rtol=5e-2)


@pytest.mark.filterwarnings("ignore:.*cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint
def test_repeats_and_checkpointing_give_the_same_bits(device: str) -> None:
    q, k, v = leaves(2, 2, 40, D, device=device)
    mask = leaf(2, 40, 40, device=device, seed=9)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors[:3], attn_mask=tensors[3], p_dropout=0.3)

    found = []
    for _ in range(3):
        for wrapped in (run, lambda *tensors: checkpoint(run, *tensors, use_reentrant=False)):
            torch.manual_seed(7)
            found.append(gradients(wrapped(q, k, v, mask), [q, k, v, mask]))
    for other in found[1:]:
        assert all(torch.equal(one, grad) for one, grad in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_compiled_gradients(device: str, backend: str, is_frozen: bool) -> None:
    q, k, v = leaves(2, 2, 40, D, device=device)
    mask = leaf(2, 1, 40, device=device, dtype=torch.float32, seed=9)
    if is_frozen:
        q, k, v = (tensor.detach() for tensor in (q, k, v))
    asked = [mask] if is_frozen else [q, k, v, mask]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, attn_mask=mask * 2, causal="top_left") * 2

    wanted = gradients(run(q, k, v, mask), asked)
    found = gradients(torch.compile(run, backend=backend, fullgraph=True)(q, k, v, mask), asked)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14's own
@pytest.mark.parametrize("shape", [(33, 33), (2, 1, 33)], ids=str)
def test_operators_pass_opcheck(device: str, shape: tuple[int, ...]) -> None:
    q, k, v = leaves(1, 2, 33, D, device=device)
    mask = leaf(*shape, device=device, dtype=torch.float32, seed=9)
    torch.library.opcheck(
        torch.ops.sdpa_cutlass.attention_forward.default, (q, k, v, mask), {"return_lse": True}
    )
    given = [tensor.detach() for tensor in (q, k, v)]
    out, lse = attention(*given, attn_mask=mask.detach(), return_lse=True)
    torch.library.opcheck(
        torch.ops.sdpa_cutlass.attention_backward.default,
        (torch.randn_like(out), *given, out, lse, None, mask.detach()),
        {"needs": [False, True, False, True]},
    )


def test_the_operators_give_the_same_bits(device: str) -> None:
    q, k, v = leaves(1, 2, 33, D, device=device)
    mask = leaf(2, 33, 33, device=device, seed=9)
    wanted = gradients(attention(q, k, v, attn_mask=mask), [q, mask])
    found = gradients(torch.ops.sdpa_cutlass.attention_forward(q, k, v, mask)[0], [q, mask])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    weights = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).reshape(q.shape).to(device)
    of_func = torch.func.grad(lambda m: (attention(q, k, v, attn_mask=m).double() * weights).sum())
    assert torch.equal(of_func(mask.detach()), wanted[1])


def test_enable_serves_a_bias_that_requires_grad(device: str) -> None:
    q, k, v = leaves(2, 2, 40, D, device=device)
    mask = leaf(2, 40, 40, device=device, seed=9)
    asked = [q, k, v, mask]

    def run() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with sdpa_cutlass.enabled(devices=[device]) as usage:
        found = gradients(run(), asked)
        compiled = gradients(torch.compile(run, backend="aot_eager", fullgraph=True)(), asked)
    assert usage.served >= 1
    assert usage.fallbacks == {}
    assert all(torch.equal(one, other) for one, other in zip(found, compiled, strict=True))
    close(found, gradients(exact(q, k, v, mask), asked))


def test_what_has_no_gradient_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(1, 2, 9, D, device=device))
    mask = leaf(9, 9, device=device, seed=9)
    wide = torch.zeros(1, 2, 9, 248, device=device, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(backward, "legal_kernels", lambda *_: ())  # as in a library without this head_dim
        with pytest.raises(UnsupportedError, match=r"no backward kernel can run .*head_dim=248"):
            attention(wide, wide, wide, attn_mask=mask)
    with pytest.raises(UnsupportedError, match="out is given and an input requires grad"):
        attention(q, k, v, attn_mask=mask, out=torch.empty_like(q))
    with pytest.raises(UnsupportedError, match="attn_mask requires grad"):
        plan(q, k, v, attn_mask=mask)
    (first,) = torch.autograd.grad(attention(q, k, v, attn_mask=mask).sum(), mask, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(first.float().sum(), mask)
    out, lse = attention(q, k, v, attn_mask=mask.detach(), return_lse=True)
    given = (torch.ones_like(out), q, k, v, out, lse)
    for other, message in ((None, "attn_mask is None"), (mask.detach() > 0, "whose dtype is torch.bool")):
        with pytest.raises(ArgumentError, match=message):
            torch.ops.sdpa_cutlass.attention_backward(*given, None, other, needs=[False] * 3 + [True])
    with pytest.raises(ArgumentError, match="needs has 3 values; there must be 4"):
        torch.ops.sdpa_cutlass.attention_backward(*given, needs=[True] * 3)
