"""Attention as a node of torch's graph: what a call is whose query, key, value or sinks require grad.

A node saves the inputs, out, softmax_lse and what dropout drew from; its backward makes dq, dk and dv by the
kernels of `call/backward.py`, and dsinks by torch's own operators. Eager calls launch straight from here.
What torch's dispatcher sees (traced calls, torch.func, the operators themselves) launches operators instead,
backward included, so that compilers can trace both. A second derivative does not exist, and asking for one is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..call import backward, calls, checks, extras, planning, rng
from ..call.planning import Bound, Inputs, Options, Result
from ..errors import UnsupportedError
from ..library.registry import Family
from ..public import varlen
from ..public.varlen import Lengths
from .operators import no_lse, traced_philox


class Call(NamedTuple):
    """What a node has to know besides its tensors."""

    options: Options
    bounds: tuple[Any, Any] | None  # max_seqlen_q and max_seqlen_k of packed sequences
    philox: Any  # two integers; None where it is a tensor or there is none
    is_operator: bool  # the dispatcher has the call


class Rest(NamedTuple):
    """Tensors of which only sinks get a gradient; each may be None."""

    attn_mask: Any = None
    seqlens_q: Any = None
    seqlens_k: Any = None
    philox: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


class Attention(torch.autograd.Function):  # type: ignore[misc]  # which torch does not type
    """forward(call, query, key, value, *rest) → out, softmax_lse."""

    @staticmethod
    def forward(call: Call, query: Any, key: Any, value: Any, *tensors: Any) -> tuple[Any, Any]:
        options, rest = call.options._replace(return_lse=True), Rest(*tensors)
        if call.is_operator:
            with torch._C._AutoDispatchBelowAutograd():
                return _operators().forward(call, options, query, key, value, rest)
        inputs = Inputs(query, key, value, None, *rest[:3], _philox(call, rest), rest.sinks)
        if call.bounds is None:
            result = calls.run_general(*options, *inputs, is_operator=True)
        else:
            lengths = (rest.cu_seqlens_q, rest.cu_seqlens_k, *call.bounds)
            result = varlen.run(
                *options[:7], options.window, *inputs[:4], *lengths, inputs.philox, inputs.sinks,
                is_operator=True,
            )  # fmt: skip
        return result[0], result[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        query, key, value, *tensors, out, lse = ctx.saved_tensors
        call, rest = ctx.call, Rest(*tensors)
        needs = tuple(ctx.needs_input_grad[1:4])
        needs_sinks = ctx.needs_input_grad[_INPUTS + Rest._fields.index("sinks")]
        if dout is None:
            dout = torch.zeros_like(out)
        is_differentiated = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward.Results(out, lse, dout, dlse)
            dsinks = sinks_gradient(call, rest, results) if needs_sinks else None
            grads: Sequence[Any] = (None, None, None)
            if not any(needs):
                pass
            elif call.is_operator:
                grads = _operators().gradients(call, query, key, value, rest, results, needs)
            else:
                bound = _bind(call, query, key, value, rest)
                likes = (query, key, value) if call.bounds is None else (query[None], key[None], value[None])
                grads = backward.gradients(bound, likes, results, _philox(call, rest), needs)
                if call.bounds is not None:
                    grads = tuple(None if grad is None else grad[0] for grad in grads)
        if is_differentiated:
            grounds = (dout, query, key, value, rest.sinks)
            recorded = (None if grad is None else Once.apply(grad, *grounds) for grad in (*grads, dsinks))
            *grads, dsinks = recorded
        return (None, *grads, *Rest(sinks=dsinks))


_INPUTS = 4  # of Attention.forward, before `Rest`


def sinks_gradient(call: Call, rest: Rest, results: backward.Results) -> torch.Tensor:
    """dsinks [Hq] in the dtype of sinks, by torch's operators, in float32 and in an order that is fixed.

    A sink has the weight p = exp(sink - softmax_lse) in each row of its head, and no value:
    dsink = -sum over rows of p · (rowsum(dout ∘ out) - dlse). Dropout's scale is in `out`.
    """
    out, lse, dout, dlse = results
    delta = (dout.float() * out).sum(-1)  # as lse, or [..., S, H]
    is_bshd = call.bounds is not None or checks.tensor_layout(call.options.layout) is checks.Layout.BSHD
    if is_bshd and delta.dim() > 1:
        delta = delta.transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    heads, seqlen = rest.sinks.shape[0], lse.shape[-1]
    batch = math.prod(lse.shape[:-2])
    lse, delta = (tensor.reshape(batch, heads, seqlen) for tensor in (lse, delta))
    sinks = rest.sinks.float()[:, None]
    counts = lse != -math.inf  # what it is in rows beyond a length
    if rest.cu_seqlens_q is not None:
        row = torch.arange(seqlen, device=lse.device)
        counts = counts & (row >= rest.cu_seqlens_q[0]) & (row < rest.cu_seqlens_q[-1])
    terms = torch.where(counts, torch.exp(sinks - lse) * delta, 0)
    return -terms.sum((0, 2)).to(rest.sinks.dtype)


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


def attention(options: Options, inputs: Inputs, lengths: Lengths | None = None) -> Result:
    """`calls.run_general`, or with `lengths` `varlen.run`, of eager inputs that require grad.

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
    check_no_mask_grad(mask)
    packed = () if lengths is None else (lengths.cu_seqlens_q, lengths.cu_seqlens_k)
    bounds = None if lengths is None else (lengths.max_seqlen_q, lengths.max_seqlen_k)
    rest = Rest(mask, inputs.seqlens_q, inputs.seqlens_k, None, inputs.sinks, *packed)
    call = Call(options, bounds, None, is_operator=False)
    with torch.no_grad():
        p_dropout = _checked_dropout(call, query, key, value, rest)
        philox = planning.random_bits(inputs.philox, p_dropout, query)
    if isinstance(philox, torch.Tensor):
        rest = rest._replace(philox=philox)
    else:
        call = call._replace(philox=philox)
    out, lse = Attention.apply(call, query, key, value, *rest)
    return Result(out, lse if options.return_lse else None, philox)


_served: dict[tuple[Any, ...], float] = {}  # signatures that passed the checks, with their p_dropout
_MOST_SERVED = 1024


def _checked_dropout(call: Call, query: Any, key: Any, value: Any, rest: Rest) -> float:
    """p_dropout, 0 for 1, of a call that has a backward kernel. A known signature is not checked again."""
    tensors = (query, key, value, *rest)
    signature: tuple[Any, ...] | None = (
        call, type(call.options.scale),
        *(None if tensor is None else calls.signature_of(tensor) for tensor in tensors),
    )  # fmt: skip
    try:
        known = _served.get(signature) if signature is not None else None
    except TypeError:  # an option that cannot be a key
        known = signature = None
    if known is not None:
        return known
    bound = _bind(call, query, key, value, rest)
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


def transformed(options: Options, inputs: Inputs, lengths: Lengths | None = None) -> Result:
    """`attention` inside torch.func."""
    state = traced_philox(options.p_dropout, inputs.philox, inputs.query)
    out, lse = recorded(options, inputs._replace(philox=state), lengths)
    return Result(out, lse if options.return_lse else None, rng.NO_PHILOX if state is None else state)


def recorded(options: Options, inputs: Inputs, lengths: Lengths | None = None) -> tuple[Any, Any]:
    """A call of the forward's operator: out and softmax_lse, which is empty unless it was asked for."""
    if options.family is not Family.FMHA_FWD:
        raise UnsupportedError(
            f"query, key or value requires grad, and the family {options.family.value} has no backward pass"
        )
    check_no_mask_grad(inputs.attn_mask)
    packed = () if lengths is None else (lengths.cu_seqlens_q, lengths.cu_seqlens_k)
    bounds = None if lengths is None else (lengths.max_seqlen_q, lengths.max_seqlen_k)
    rest = Rest(inputs.attn_mask, inputs.seqlens_q, inputs.seqlens_k, inputs.philox, inputs.sinks, *packed)
    call = Call(options, bounds, None, is_operator=True)
    out, lse = Attention.apply(call, inputs.query, inputs.key, inputs.value, *rest)
    return out, lse if options.return_lse else no_lse(inputs.query)


def check_no_mask_grad(attn_mask: Any) -> None:
    """Raises UnsupportedError for a mask that expects a gradient: this version makes none."""
    if wants_gradient(attn_mask):
        raise UnsupportedError(
            "attn_mask requires grad, and this version makes gradients of query, key, value and sinks alone: "
            "call it under torch.no_grad() or pass attn_mask.detach()"
        )


def _bind(call: Call, query: Any, key: Any, value: Any, rest: Rest) -> Bound:
    inputs = Inputs(query, key, value, None, *rest[:3], None, rest.sinks)
    if call.bounds is None:
        return planning.bind(call.options, inputs)
    lengths = Lengths(rest.cu_seqlens_q, rest.cu_seqlens_k, *call.bounds)
    return varlen.bind(call.options, inputs, lengths)


def _philox(call: Call, rest: Rest) -> Any:
    """What dropout draws from. Without dropout nothing reads it."""
    return call.philox if rest.philox is None else rest.philox


def _operators() -> Any:
    from . import backward_ops

    return backward_ops
