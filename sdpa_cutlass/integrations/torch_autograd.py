"""Attention as a node of torch's graph: what a call is if query, key, value, attn_mask or sinks require grad.

A node saves the inputs, out, softmax_lse and what dropout drew from; its backward makes dq, dk, dv and dbias
by the kernels of `call/backward.py`, and dsinks by torch's own operators. Eager calls launch from here. What
torch's dispatcher sees (traced calls, torch.func, the operators themselves) launches operators instead,
backward included, so that compilers can trace both. A second derivative does not exist, and asking for one is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..call import backward, binding, calls, checks, extras, plan_cache, planning, rng
from ..call.arguments import Form, Inputs, Options, Result
from ..call.operands import Layout
from ..errors import UnsupportedError
from ..library.registry import Family
from . import backward_ops
from .operators import no_lse, traced_philox


class Call(NamedTuple):
    """What a node has to know besides its tensors."""

    options: Options
    bounds: tuple[Any, Any] | None  # max_seqlen_q and max_seqlen_k of packed sequences
    philox: Any  # two integers; None where it is a tensor or there is none
    is_operator: bool  # the dispatcher has the call


_SAVED = tuple(
    name
    for name in Inputs._fields
    if name not in ("query", "key", "value", "out", "max_seqlen_q", "max_seqlen_k")
)
"""The other tensors of a call, in the order of a node's arguments. attn_mask and sinks may get a gradient."""

_FIRST_SAVED = 4  # among the arguments of a node


class Attention(torch.autograd.Function):  # type: ignore[misc]  # which torch does not type
    """forward(call, query, key, value, *the tensors of _SAVED) → out, softmax_lse."""

    @staticmethod
    def forward(call: Call, query: Any, key: Any, value: Any, *tensors: Any) -> tuple[Any, Any]:
        options = call.options._replace(return_lse=True)
        inputs = _inputs(call, query, key, value, *tensors)
        if call.is_operator:
            from . import torch_ops

            with torch._C._AutoDispatchBelowAutograd():
                out, lse, _ = torch_ops.traced(options, inputs)
        else:
            out, lse, _ = calls.run_call(options, inputs, is_operator=True)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        query, key, value, *tensors, out, lse = ctx.saved_tensors
        call = ctx.call
        asked = dict(zip(_SAVED, ctx.needs_input_grad[_FIRST_SAVED:], strict=True))
        needs = (*ctx.needs_input_grad[1:_FIRST_SAVED], asked["attn_mask"])
        if dout is None:
            dout = torch.zeros_like(out)
        is_differentiated = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward.Results(out, lse, dout, dlse)
            inputs = _inputs(call, query, key, value, *tensors)
            dsinks = sinks_gradient(call.options, inputs, results) if asked["sinks"] else None
            grads: Sequence[Any] = (None,) * len(needs)
            if not any(needs):
                pass
            elif call.is_operator:
                grads = backward_ops.gradients(call.options, inputs, results, needs)
            else:
                bound = binding.bind(call.options, inputs)
                likes = (query, key, value, inputs.attn_mask)
                grads = backward.gradients(bound, likes, results, inputs.philox, needs)
        if is_differentiated:
            grounds = (dout, query, key, value, inputs.attn_mask, inputs.sinks)
            recorded = (None if grad is None else Once.apply(grad, *grounds) for grad in (*grads, dsinks))
            *grads, dsinks = recorded
        of_saved = {"attn_mask": grads[3], "sinks": dsinks}
        return (None, *grads[:3], *(of_saved.get(name) for name in _SAVED))


def sinks_gradient(options: Options, inputs: Inputs, results: backward.Results) -> torch.Tensor:
    """dsinks [Hq] in the dtype of sinks, by torch's operators, in float32 and in an order that is fixed.

    A sink has the weight p = exp(sink - softmax_lse) in each row of its head, and no value:
    dsink = -sum over rows of p · (rowsum(dout ∘ out) - dlse). Dropout's scale is in `out`.
    """
    out, lse, dout, dlse = results
    delta = (dout.float() * out).sum(-1)  # as lse, or [..., S, H]
    is_packed = inputs.form is Form.PACKED
    is_bshd = is_packed or checks.tensor_layout(options.layout) is Layout.BSHD
    if is_bshd and delta.dim() > 1:
        delta = delta.transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    heads, seqlen = inputs.sinks.shape[0], lse.shape[-1]
    batch = math.prod(lse.shape[:-2])
    lse, delta = (tensor.reshape(batch, heads, seqlen) for tensor in (lse, delta))
    sinks = inputs.sinks.float()[:, None]
    counts = lse != -math.inf  # what it is in rows beyond a length
    if is_packed:
        row = torch.arange(seqlen, device=lse.device)
        counts = counts & (row >= inputs.cu_seqlens_q[0]) & (row < inputs.cu_seqlens_q[-1])
    terms = torch.where(counts, torch.exp(sinks - lse) * delta, 0)
    return -terms.sum((0, 2)).to(inputs.sinks.dtype)


class Once(torch.autograd.Function):  # type: ignore[misc]
    """A gradient that depends on `grounds` in a way that this version cannot differentiate."""

    @staticmethod
    def forward(grad: Any, *grounds: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(SECOND_DERIVATIVE)


SECOND_DERIVATIVE = (
    "the gradient of attention is differentiated again, and this version has no second derivative: leave out "
    "create_graph=True, or take F.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


def wants_gradient(*tensors: Any) -> bool:
    """Whether torch would record what is computed from these."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def attention(options: Options, inputs: Inputs) -> Result:
    """`calls.run_call` of eager inputs that require grad.

    Raises UnsupportedError, before anything is launched, for what has no gradient or no backward kernel.
    """
    if inputs.out is not None:
        raise UnsupportedError("out is given and an input requires grad: what is written cannot be recorded")
    if options.family is not Family.FMHA_FWD:
        raise UnsupportedError(
            f"query, key or value requires grad, and the family {options.family.value} has no backward pass"
        )
    query, key, value = checks.autocast_inputs(inputs.query, inputs.key, inputs.value)
    mask = inputs.attn_mask
    if mask is not None:
        mask = extras.autocast_mask(mask, query)
    known = inputs._replace(query=query, key=key, value=value, attn_mask=mask, philox=None)
    call = Call(options, _bounds(inputs), None, is_operator=False)
    with torch.no_grad():
        p_dropout = _checked_dropout(call, known)
        philox = planning.random_bits(inputs.philox, p_dropout, query)
    if isinstance(philox, torch.Tensor):
        known = known._replace(philox=philox)
    else:
        call = call._replace(philox=philox)
    out, lse = Attention.apply(call, *_tensors(known))
    return Result(out, lse if options.return_lse else None, philox)


_served: dict[tuple[Any, ...], float] = {}  # signatures that passed the checks, with their p_dropout
_MOST_SERVED = 1024


def _checked_dropout(call: Call, inputs: Inputs) -> float:
    """p_dropout, 0 for 1, of a call that has a backward kernel. A known signature is not checked again."""
    signature: tuple[Any, ...] | None = (
        call, type(call.options.scale),
        *(None if tensor is None else plan_cache.signature_of(tensor) for tensor in _tensors(inputs)),
    )  # fmt: skip
    try:
        known = _served.get(signature) if signature is not None else None
    except TypeError:  # an option that cannot be a key
        known = signature = None
    if known is not None:
        return known
    bound = binding.bind(call.options, inputs)
    backward.check_served(bound)
    if signature is not None:
        if len(_served) >= _MOST_SERVED:
            _served.clear()
        _served[signature] = bound.given.p_dropout
    return bound.given.p_dropout


def is_transformed(*tensors: Any) -> bool:
    """Whether torch.func differentiates a call of these. It takes a node, and no operator that makes one.

    Under vmap it takes neither, and the operator says so.
    """
    if not torch._C._are_functorch_transforms_active() or not wants_gradient(*tensors):
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return all(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def transformed(options: Options, inputs: Inputs) -> Result:
    """`attention` inside torch.func."""
    state = traced_philox(options.p_dropout, inputs.philox, inputs.query)
    out, lse = recorded(options, inputs._replace(philox=state))
    return Result(out, lse if options.return_lse else None, rng.NO_PHILOX if state is None else state)


def recorded(options: Options, inputs: Inputs) -> tuple[Any, Any]:
    """A call of the forward's operator: out and softmax_lse, which is empty unless it was asked for."""
    if options.family is not Family.FMHA_FWD:
        raise UnsupportedError(
            f"query, key or value requires grad, and the family {options.family.value} has no backward pass"
        )
    call = Call(options, _bounds(inputs), None, is_operator=True)
    out, lse = Attention.apply(call, *_tensors(inputs))
    return out, lse if options.return_lse else no_lse(inputs.query)


def _bounds(inputs: Inputs) -> tuple[Any, Any] | None:
    return None if inputs.form is Form.PADDED else (inputs.max_seqlen_q, inputs.max_seqlen_k)


def _tensors(inputs: Inputs) -> tuple[Any, ...]:
    return (*inputs[:3], *(getattr(inputs, name) for name in _SAVED))


def _inputs(call: Call, query: Any, key: Any, value: Any, *tensors: Any) -> Inputs:
    """A node's call again. Without dropout nothing reads its philox."""
    max_seqlen_q, max_seqlen_k = call.bounds or (None, None)
    saved = dict(zip(_SAVED, tensors, strict=True))
    if saved["philox"] is None:
        saved["philox"] = call.philox
    return Inputs(query, key, value, **saved, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
