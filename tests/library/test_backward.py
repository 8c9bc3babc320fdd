"""Gradients through torch: eager, compiled, checkpointed; strides, refusals; a model trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import sdpa_cutlass
import sdpa_cutlass.integrations.torch_ops  # registers the operators
from sdpa_cutlass import attention, attention_varlen, scaled_dot_product_attention, unfused_attention
from sdpa_cutlass.call import backward
from sdpa_cutlass.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("_gradient_kernels")

D = 64


def inputs(
    *shape: int, device: str = "cpu", dtype: torch.dtype = torch.float16, count: int = 3
) -> list[torch.Tensor]:
    """Seeded leaves that require grad."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(count)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's result in float64, differentiable with respect to the same leaves."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=4e-3, rtol=4e-3)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of a sum with fixed weights."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.device)
    return torch.autograd.grad((out.double() * weights).sum(), leaves)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [D, 256])
def test_eager_gradients(device: str, head_dim: int, is_causal: bool) -> None:
    leaves = inputs(2, 3, 70, head_dim, device=device)
    wanted = gradients(exact(*leaves, is_causal=is_causal), leaves)
    causal = "top_left" if is_causal else None
    close(gradients(attention(*leaves, causal=causal), leaves), wanted)
    close(gradients(scaled_dot_product_attention(*leaves, is_causal=is_causal), leaves), wanted)


def test_gradients_have_the_strides_of_their_inputs(device: str) -> None:
    leaves = inputs(2, 70, 3, D, device=device)
    heads_first = [leaf.transpose(1, 2) for leaf in leaves]
    views = [view.detach().requires_grad_() for view in heads_first]
    found = gradients(attention(*views), views)
    assert [grad.stride() for grad in found] == [view.stride() for view in views]
    close(
        gradients(attention(*leaves, layout="bshd").transpose(1, 2), leaves),
        [g.transpose(1, 2) for g in found],
    )


def test_expanded_and_odd_shapes(device: str) -> None:
    """Broadcast heads and batches are summed; ranks below 4 and padded head dims keep their shapes."""
    q, k, v = inputs(2, 3, 17, 60, device=device)
    k, v = (tensor[:1, :1].detach().requires_grad_() for tensor in (k, v))
    wanted = gradients(exact(q, k.expand(2, 3, 17, 60), v.expand(2, 3, 17, 60)), [q, k, v])
    found = gradients(attention(q, k, v), [q, k, v])
    assert [grad.shape for grad in found] == [q.shape, k.shape, v.shape]
    close(found, wanted)
    flat = inputs(17, D, device=device)
    close(gradients(attention(*flat), flat), gradients(exact(*flat), flat))


def test_a_gradient_of_one_number_and_of_lse(device: str) -> None:
    """out.sum() hands a gradient without strides; softmax_lse is differentiable as well."""
    leaves = inputs(1, 2, 33, D, device=device)
    close(
        torch.autograd.grad(attention(*leaves).sum(), leaves),
        torch.autograd.grad(exact(*leaves).sum(), leaves),
    )
    lse = attention(*leaves, return_lse=True)[1]
    q, k, _ = (leaf.double() for leaf in leaves)
    wanted = torch.logsumexp(q @ k.transpose(-1, -2) / 8, -1)
    close(gradients(lse, leaves[:2]), gradients(wanted, leaves[:2]))


def exact_with_sinks(
    tensors: list[torch.Tensor],
    sinks: torch.Tensor,
    seen: torch.Tensor,
    keep: Any = None,
    p_dropout: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) in float64 of q, k and v [B, H, S, D] as many heads each; `seen` [..., Sq, Sk]."""
    q, k, v = (tensor.double() for tensor in tensors)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :-1]
    if keep is not None:
        weights = weights * torch.as_tensor(keep).to(weights) / (1 - p_dropout)
    return weights @ v, scores.logsumexp(-1)


SINKS = (0.5, -2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_sinks(device: str, dtype: torch.dtype, with_lse: bool) -> None:
    """Seven rows see no key: their softmax_lse is the sink."""
    q, k, v = inputs(2, 2, 40, D, device=device)
    k, v = (tensor[:, :, :33].detach().requires_grad_() for tensor in (k, v))
    sinks = torch.tensor(SINKS, device=device, dtype=dtype, requires_grad=True)
    leaves = [q, k, v, sinks]
    seen = torch.ones(40, 33, dtype=torch.bool, device=device).tril(-7)
    wanted = exact_with_sinks(leaves[:3], sinks, seen)[: 1 + with_lse]
    found = attention(*leaves[:3], causal="bottom_right", sinks=sinks, return_lse=True)[: 1 + with_lse]
    grads, exact_grads = (
        torch.autograd.grad([of_sum(one) for one in both], leaves) for both in (found, wanted)
    )
    assert grads[3].dtype is dtype
    close(grads, exact_grads)


def of_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every element."""
    return (tensor.double() * torch.linspace(-1, 1, tensor.numel()).reshape(tensor.shape).to(tensor)).sum()


def test_gradients_of_sinks_alone(device: str) -> None:
    """No kernel runs in the backward; layouts, ranks and repeats give the same bits."""
    q, k, v = (leaf.detach() for leaf in inputs(2, 2, 33, D, device=device))
    sinks = torch.tensor(SINKS, device=device, requires_grad=True)
    (wanted,) = torch.autograd.grad(exact_with_sinks([q, k, v], sinks, torch.tensor(True))[0].sum(), sinks)
    found = []
    for _ in range(2):  # the second time the signature is known
        found += torch.autograd.grad(attention(q, k, v, sinks=sinks).sum(), sinks)
        with torch.no_grad():
            attention(q, k, v, sinks=sinks)
    close(found[:1], [wanted])
    bshd = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    (grad,) = torch.autograd.grad(attention(*bshd, layout="bshd", sinks=sinks).sum(), sinks)
    five = [tensor[None] for tensor in (q, k, v)]
    (of_five,) = torch.autograd.grad(attention(*five, sinks=sinks).sum(), sinks)
    assert all(torch.equal(found[0], other) for other in (found[1], grad, of_five))


def test_gradients_of_sinks_with_lengths_and_dropout(device: str) -> None:
    """Rows beyond a length count nothing, whatever their gradient is; nor do rows of no sequence."""
    q, k, v = (leaf.detach() for leaf in inputs(2, 2, 40, D, device=device))
    sinks = torch.tensor(SINKS, device=device, requires_grad=True)
    lengths_q, lengths_k = [31, 40], [40, 7]
    rows, keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths_q, lengths_k))
    given = {"sinks": sinks, "p_dropout": 0.3, "return_lse": True, "return_philox": True}
    out, lse, philox = attention(q, k, v, seqlens_q=rows, seqlens_k=keys, **given)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    keep = torch.as_tensor(sdpa_cutlass.dropout_mask(2, 2, 40, 40, 0.3, philox)).to(device)
    column = torch.arange(40, device=device)
    seen = (column < keys[:, None])[:, None, None]
    exact_out, exact_lse = exact_with_sinks([q, k, v], sinks, seen, keep, 0.3)
    counts = (column < rows[:, None])[:, None]
    grads_of = ((dout * counts[..., None]).double(), (dlse * counts).double())
    wanted = torch.autograd.grad((exact_out, exact_lse), sinks, grads_of)
    dout[0, :, 31:], dlse[0, :, 31:] = torch.nan, torch.nan
    close(torch.autograd.grad((out, lse), sinks, (dout, dlse)), wanted)

    cu = torch.tensor([2, 10, 10, 30], dtype=torch.int32, device=device)
    packed = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    out, lse = attention_varlen(*packed, cu, cu, 40, 40, sinks=sinks, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    owner = torch.bucketize(column, cu[1:], right=True)
    counts = (column >= 2) & (column < 30)
    seen = (owner[:, None] == owner) & counts & counts[:, None]
    exact_out, exact_lse = exact_with_sinks([tensor[0] for tensor in (q, k, v)], sinks, seen)
    grads_of = ((dout * counts[:, None, None]).transpose(0, 1).double(), (dlse * counts).double())
    wanted = torch.autograd.grad((exact_out, exact_lse), sinks, grads_of)
    dout[30:], dlse[:, 30:], dout[:2], dlse[:, :2] = (torch.nan,) * 4
    close(torch.autograd.grad((out, lse), sinks, (dout, dlse)), wanted)


def test_compiled_gradients_of_sinks(device: str) -> None:
    leaves = inputs(1, 2, 40, D, device=device)
    leaves.append(torch.tensor(SINKS, device=device, requires_grad=True))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal="top_left", sinks=sinks) * 2

    def run_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        cu = torch.tensor([0, 5, 40], dtype=torch.int32, device=device)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        return attention_varlen(q, k, v, cu, cu, 40, 40, sinks=sinks)

    for function in (run, run_packed):
        wanted = gradients(function(*leaves), leaves)
        found = gradients(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), leaves)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    (of_operator,) = torch.autograd.grad(
        torch.ops.sdpa_cutlass.attention_forward(
            *leaves[:3], None, None, None, None, leaves[3], return_lse=True
        )[0].sum(),
        leaves[3],
    )
    (eager,) = torch.autograd.grad(attention(*leaves[:3], sinks=leaves[3]).sum(), leaves[3])
    assert torch.equal(of_operator, eager)
    q, k, v = (leaf.detach() for leaf in leaves[:3])
    found = torch.func.grad(lambda sinks: attention(q, k, v, sinks=sinks).sum())(leaves[3].detach())
    assert torch.equal(found, eager)


def test_only_what_is_asked_for(device: str) -> None:
    q, k, v = inputs(1, 2, 33, D, device=device)
    wanted = gradients(exact(q, k, v), [v])
    frozen = attention(q.detach(), k.detach(), v)
    close(gradients(frozen, [v]), wanted)


def test_calls_without_gradients_stay_what_they_were(device: str) -> None:
    q, k, v = inputs(1, 2, 33, D, device=device)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad
    assert torch.equal(attention(q, k, v), attention(q.detach(), k.detach(), v.detach()))


def test_dropout_uses_the_forwards_mask(device: str) -> None:
    """Draws between forward and backward change nothing."""
    leaves = inputs(1, 2, 40, D, device=device)
    out, philox = attention(*leaves, p_dropout=0.3, return_philox=True)
    attention(*leaves, p_dropout=0.5)
    keep = torch.as_tensor(sdpa_cutlass.dropout_mask(1, 2, 40, 40, 0.3, philox)).to(device)
    q, k, v = (leaf.double() for leaf in leaves)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 8, -1) * keep / 0.7
    close(gradients(out, leaves), gradients(weights @ v, leaves))


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_again(device: str, use_reentrant: bool) -> None:
    leaves = inputs(1, 2, 40, D, device=device)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, p_dropout=0.3)

    found = []
    for wrapped in (run, lambda *tensors: checkpoint(run, *tensors, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        out = wrapped(*leaves)
        for leaf in leaves:
            leaf.grad = None
        out.float().square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_packed_sequences(device: str) -> None:
    """Gradients are those of the sequences one by one; rows of no sequence get zeros."""
    bounds = (0, 5, 5, 60)
    cu = torch.tensor(bounds, dtype=torch.int32, device=device)
    leaves = inputs(70, 2, D, device=device)
    out = attention_varlen(*leaves, cu, cu, 70, 70, causal="bottom_right")
    found = gradients(out[:60], leaves)
    parts = [
        exact(*(leaf[first:end].transpose(0, 1) for leaf in leaves), is_causal=True).transpose(0, 1)
        for first, end in ((0, 5), (5, 60))
    ]
    close(found, gradients(torch.cat(parts), leaves))
    assert not any(grad[60:].any() for grad in found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("p_dropout", [0.0, 0.25])
def test_compiled_gradients(device: str, backend: str, p_dropout: float) -> None:
    leaves = inputs(1, 2, 40, D, device=device)
    philox = torch.tensor([3, 4], device=device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal="top_left", p_dropout=p_dropout, philox=philox) * 2

    wanted = gradients(run(*leaves), leaves)
    found = gradients(torch.compile(run, backend=backend, fullgraph=True)(*leaves), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_compiled_packed_gradients(device: str) -> None:
    cu = torch.tensor([0, 5, 40], dtype=torch.int32, device=device)
    leaves = inputs(40, 2, D, device=device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_varlen(q, k, v, cu, cu, 40, 40)

    wanted = gradients(run(*leaves), leaves)
    found = gradients(torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14's own
def test_operators_pass_opcheck(device: str) -> None:
    leaves = inputs(1, 2, 33, D, device=device)
    torch.library.opcheck(
        torch.ops.sdpa_cutlass.attention_forward.default, tuple(leaves), {"return_lse": True}
    )
    q, k, v = (leaf.detach() for leaf in leaves)
    out, lse = attention(q, k, v, return_lse=True)
    torch.library.opcheck(
        torch.ops.sdpa_cutlass.attention_backward.default,
        (torch.randn_like(out), q, k, v, out, lse),
        {"needs": [True, False, True, False]},
    )


def test_torch_func(device: str) -> None:
    q, k, v = inputs(1, 2, 33, D, device=device)
    wanted = gradients(exact(q, k, v), [q])
    weights = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).reshape(q.shape).to(device)
    found = torch.func.grad(lambda q: (attention(q, k.detach(), v.detach()).double() * weights).sum())(
        q.detach()
    )
    close([found], wanted)


def test_autocast_casts_gradients_back(device: str) -> None:
    leaves = inputs(1, 2, 33, D, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(*leaves)
    assert out.dtype is torch.bfloat16
    found = gradients(out, leaves)
    assert {grad.dtype for grad in found} == {torch.float32}
    for one, other in zip(found, gradients(exact(*leaves), leaves), strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=5e-2, rtol=5e-2)


def test_what_has_no_gradient_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, 9, D, device=device)
    plain = [tensor.detach() for tensor in (q, k, v)]
    with pytest.raises(UnsupportedError, match="out is given and an input requires grad"):
        attention(q, k, v, out=torch.empty_like(plain[0]))
    with pytest.raises(UnsupportedError, match="unfused has no backward pass"):
        unfused_attention(q, k, v)
    monkeypatch.setattr(backward, "legal_kernels", lambda *_: ())  # as in a library without this head_dim
    with pytest.raises(UnsupportedError, match=r"no backward kernel can run .*head_dim=248"):
        attention(*inputs(1, 1, 9, 248, device=device))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_second_derivatives_are_refused_by_name(device: str, is_compiled: bool) -> None:
    q, k, v = inputs(1, 2, 9, D, device=device)
    run = torch.ops.sdpa_cutlass.attention_forward if is_compiled else lambda *tensors: (attention(*tensors),)
    out = run(q, k, v)[0]
    (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(first.float().sum(), q)


class Block(torch.nn.Module):
    """One attention layer as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(128, 384)
        self.out = torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).unbind(-3)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p=0.1, is_causal=True
        )
        return x + self.out(attended.transpose(1, 2).flatten(2))


def train(model: torch.nn.Module, x: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_trains_to_the_same_bits(device: str) -> None:
    torch.manual_seed(0)
    model = Block().to(device, torch.bfloat16)
    x = torch.randn(2, 33, 128, device=device, dtype=torch.bfloat16)
    runs = []
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        for _ in range(2):
            trained = copy.deepcopy(model)
            losses = train(trained, x, 5)
            runs.append((losses, [parameter.detach().clone() for parameter in trained.parameters()]))
    assert (usage.served, usage.fallbacks) == (10, {})
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[0][0][-1] < runs[0][0][0]
