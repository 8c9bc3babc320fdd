"""One call: arguments → plan → launch.

A call whose signature (sizes, strides, dtypes, devices, options) was seen before goes straight to its plan;
any other one is checked and planned first (see planning.py). Where there is a compiled launcher, it has a
table of the latest signatures, which is asked first (see call_table.py). `run` is the path of plain calls and
looks at nothing else; without a table it tries the latest signature, which spares it a hash. Of a known
signature's tensors, masks alone are asked for the negative bit: views that have it, such as x.conj().imag,
start at an odd element, so no other one that is aligned can be such a view, unless as_strided moved it.
`run_general` takes masks, dropout, lengths and layouts as well, `run_packed` packed sequences.
Arrays of other libraries are read as tensors first (tensors.py); where torch is not installed, as they are
(array_calls.py). While torch records or differentiates, the call is an operator (see torch_ops.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays.tensors import as_tensor, has_torch, is_tensor
from ..library.registry import Asked
from ..problem import Causal
from . import array_calls, call_table, growing, outputs, rng, torch_hooks, torch_inputs
from .arguments import Form, Inputs, Options, Result
from .binding import bind
from .extras import Extras, dense_copy, refuse_causal_bias
from .operands import Layout
from .plan_cache import Plans, Signature, launch, require_data, signature_of
from .planning import Prepared, execute, prepare, random_bits

if TYPE_CHECKING:
    import torch

    from .arguments import ResultTuple


_plain = Plans()  # of `run`
_general = Plans()  # of `run_general`
_packed = Plans()  # of `run_packed`
_latest: tuple[Plans, tuple[Any, ...], Prepared | None] = Plans(), (None,) * 8, None  # where `run` found what


def run(
    family: Asked,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
) -> ResultTuple:
    """A plain call, as `run_general` makes it."""
    global _latest
    is_seen = torch_hooks.is_dynamo_compiling()  # by torch, which gets it as an operator
    table = None if is_seen else call_table.table
    if table is not None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, 0.0, "bhsd", None, query, key, value, out
        )
        if known_call is not None:
            return known_call
    signature: Signature | None = None
    prepared = None
    is_latest = True
    is_seen = is_seen or torch_hooks.is_watching()
    if not is_seen:
        try:
            signature = (  # as far as it goes, all have this order: growing.py reads them by place
                family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
                type(query), query.shape, query.stride(), query.dtype, query.device,
                type(key), key.shape, key.stride(), key.dtype, key.device,
                type(value), value.shape, value.stride(), value.dtype, value.device,
                None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            )  # fmt: skip
            cache, known, found = _latest  # one read: another thread may replace it at any time
            may_be_known = cache is _plain and known[7] is type(query)
            if may_be_known:  # what has no address may have symbolic sizes: comparing would specialise them
                q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
            if may_be_known and known == signature:
                prepared = found
            else:
                q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
                prepared = _plain[signature]
                if prepared is None:
                    prepared = growing.plan_and_keep(_plain, signature, query, key, value, Layout.BHSD)
                else:
                    _latest = _plain, signature, prepared
                    is_latest = False
            if (q | k | v) & 15 or not (q and k and v) or not (out is None or out.data_ptr()):
                prepared = signature = None
        except (AttributeError, TypeError, RuntimeError, ValueError):
            prepared = signature = None  # not tensors, or without data, or options that cannot be keys
    if prepared is None or (
        (query.requires_grad or key.requires_grad or value.requires_grad) and torch_hooks.is_grad_enabled()
    ):
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _run_in_full(
            options, Inputs(query, key, value, out), _plain, signature, prepared, is_seen=is_seen
        )
    if not is_latest:
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        call_table.add(prepared, options, Inputs(query, key, value, out))
    plan, empty_like, make_lse, out_stride, out_shape, _, _, spans, _ = prepared
    if out is not None:
        outputs.check_known_spans(out, q, k, v, spans)
        torch_hooks.increment_version((out,))
    elif out_stride is None:
        out = empty_like(query)
    else:
        out = query.new_empty_strided(out_shape, out_stride)
    lse = None if make_lse is None else make_lse()
    plan.launch_at(q, k, v, out, lse)
    return out, lse, rng.NO_PHILOX


def run_general(
    family: Asked,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    p_dropout: float,
    layout: Layout | str,
    window: tuple[int, int] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    philox: Any,
    sinks: torch.Tensor | None,
    *,
    is_operator: bool = False,
) -> ResultTuple:
    """Any call of Form.PADDED: the fields of `Options` and `Inputs` in their order.

    `is_operator`: torch has seen the call, and this is the operator's kernel.
    """
    is_seen = torch_hooks.is_dynamo_compiling()
    table = None if is_seen else call_table.table
    if table is not None and philox is None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window,
            query, key, value, out, attn_mask, seqlens_q, seqlens_k, None, None, sinks,
        )  # fmt: skip
        if known_call is not None:
            return known_call
    signature: Signature | None = None
    prepared = None
    is_resized = False
    is_seen = is_seen or (not is_operator and torch_hooks.is_watching())
    if not is_seen:
        try:
            signature = (
                family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
                type(query), query.shape, query.stride(), query.dtype, query.device,
                type(key), key.shape, key.stride(), key.dtype, key.device,
                type(value), value.shape, value.stride(), value.dtype, value.device,
                type(p_dropout), p_dropout, layout, window,
                None if out is None else signature_of(out),
                None if attn_mask is None else signature_of(attn_mask),
                None if seqlens_q is None else signature_of(seqlens_q),
                None if seqlens_k is None else signature_of(seqlens_k),
                None if sinks is None else signature_of(sinks),
            )  # fmt: skip
            prepared = _general[signature]
            if prepared is None and attn_mask is None:
                prepared = growing.plan_and_keep(_general, signature, query, key, value, layout)
                is_resized = prepared is not None
            if prepared is not None:
                require_data(attn_mask, seqlens_q, seqlens_k, philox, out, sinks)
                q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
                if (
                    (q | k | v) & 15
                    or not (q and k and v)
                    or (attn_mask is not None and attn_mask.is_neg())
                    or (sinks is not None and sinks.is_neg())
                    or (prepared.casts_mask and torch_hooks.is_autocast_enabled(query))
                ):
                    prepared = signature = None
        except (AttributeError, TypeError, RuntimeError):
            prepared = signature = None
    if prepared is None or torch_hooks.expects_gradients(query, key, value, attn_mask, sinks):
        return _run_in_full(
            Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window),
            Inputs(
                query, key, value, out, attn_mask, seqlens_q, seqlens_k, None, None, None, None, philox, sinks
            ),
            _general,
            signature,
            prepared,
            is_seen=is_seen,
            is_operator=is_operator,
        )
    is_new = philox is None and prepared is not call_table.latest and not is_resized
    if out is not None or is_new:
        inputs = Inputs(
            query, key, value, out, attn_mask, seqlens_q, seqlens_k, None, None, None, None, philox, sinks
        )
        if out is not None:
            outputs.check_known_out(out, torch_inputs.read_arrays(inputs))
            torch_hooks.increment_version((out,))
        if is_new:
            options = Options(
                family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window
            )
            call_table.add(prepared, options, inputs)
    state = random_bits(philox, prepared.p_dropout, query)
    if attn_mask is not None and prepared.copied_mask is not None:
        attn_mask = dense_copy(attn_mask.expand(prepared.copied_mask))
    extras = Extras(attn_mask, prepared.p_dropout, state, seqlens_q, seqlens_k, sinks=sinks)
    return launch(prepared, query, key, value, out, extras)


def run_packed(
    family: Asked,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    p_dropout: float,
    layout: Layout | str,
    window: tuple[int, int] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    philox: Any,
    sinks: torch.Tensor | None,
    *,
    is_operator: bool = False,
) -> ResultTuple:
    """`run_general` for packed sequences, Form.PACKED. `layout` is "bshd"."""
    is_seen = torch_hooks.is_dynamo_compiling()
    table = None if is_seen else call_table.table  # tracing would make the compiled code depend on it
    if table is not None and philox is None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window,
            query, key, value, out, None, None, None, cu_seqlens_q, cu_seqlens_k, sinks,
            max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        if known_call is not None:
            return known_call
    options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
    inputs = Inputs(
        query, key, value, out, None, None, None,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, philox, sinks,
    )  # fmt: skip
    signature: Signature | None = None
    prepared = None
    is_resized = False
    is_seen = is_seen or (not is_operator and torch_hooks.is_watching())
    if not is_seen:
        try:
            signature = (
                family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
                type(query), query.shape, query.stride(), query.dtype, query.device,
                type(key), key.shape, key.stride(), key.dtype, key.device,
                type(value), value.shape, value.stride(), value.dtype, value.device,
                type(p_dropout), p_dropout, window,
                None if out is None else signature_of(out),
                None if sinks is None else signature_of(sinks),
                type(max_seqlen_q), type(max_seqlen_k),
                type(cu_seqlens_q), cu_seqlens_q.dtype, cu_seqlens_q.device,
                type(cu_seqlens_k), cu_seqlens_k.dtype, cu_seqlens_k.device,
                (
                    max_seqlen_q, max_seqlen_k, cu_seqlens_q.shape, cu_seqlens_q.stride(),
                    cu_seqlens_k.shape, cu_seqlens_k.stride(),
                ),
            )  # fmt: skip
            prepared = _packed[signature]
            if prepared is None:
                prepared = growing.plan_and_keep(_packed, signature, query, key, value, None)
                is_resized = prepared is not None
            if prepared is not None:
                require_data(cu_seqlens_q, cu_seqlens_k, philox, out, sinks)
                q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
                if (q | k | v) & 15 or not (q and k and v) or (sinks is not None and sinks.is_neg()):
                    prepared = signature = None
        except (AttributeError, TypeError, RuntimeError):
            prepared = signature = None
    if prepared is None or torch_hooks.expects_gradients(query, key, value, None, sinks):
        if cu_seqlens_q is None:  # else it would be a call without lengths
            as_tensor("cu_seqlens_q", None)
        return _run_in_full(
            options, inputs, _packed, signature, prepared, is_seen=is_seen, is_operator=is_operator
        )
    if out is not None:
        outputs.check_known_out(out, torch_inputs.read_arrays(inputs))
        torch_hooks.increment_version((out,))
    if philox is None and prepared is not call_table.latest and not is_resized:
        call_table.add(prepared, options, inputs)
    state = random_bits(philox, prepared.p_dropout, query)
    extras = Extras(
        None, prepared.p_dropout, state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks
    )
    return launch(prepared, query, key, value, out, extras)


def run_call(options: Options, inputs: Inputs, *, is_operator: bool = False) -> ResultTuple:
    """Any call, by its records."""
    if inputs.form is Form.PADDED:
        return run_general(*options, *inputs[:7], *inputs[11:], is_operator=is_operator)
    return run_packed(*options, *inputs[:4], *inputs[7:], is_operator=is_operator)


def _run_in_full(
    options: Options,
    inputs: Inputs,
    cache: Plans,
    signature: Signature | None,
    prepared: Prepared | None,
    *,
    is_seen: bool,
    is_operator: bool = False,
) -> ResultTuple:
    """A call that does not launch a known plan: torch sees it or differentiates it, or it is a new one.

    Checks everything; what can serve the next call of its kind is kept in `cache`.
    """
    if is_seen:
        return _record(options, inputs)
    if prepared is not None:  # known, but an input requires grad
        return _differentiable(options, inputs)
    options = torch_inputs.with_flags(options)
    if not torch_inputs.are_plain_tensors(inputs):
        refuse_causal_bias(inputs.attn_mask)
        given = torch_inputs.read_arrays(inputs)
        if not all(map(is_tensor, given.values())) or not (inputs.out is None or is_tensor(inputs.out)):
            if inputs.form is Form.PADDED and not has_torch():
                return array_calls.run(options, inputs)
            tensors = {name: as_tensor(name, value) for name, value in given.items()}
            if inputs.out is not None:
                tensors["out"] = as_tensor("out", inputs.out, writable=True)
            known = inputs._replace(**tensors)
            result = Result(*(run(*options[:6], *known[:4]) if cache is _plain else run_call(options, known)))
            return result if inputs.out is None else result._replace(out=inputs.out)
        if torch_inputs.needs_dispatcher(given | {"out": inputs.out}, is_operator=is_operator):
            return _record(options, inputs)
        known = torch_inputs.resolved(inputs)
        if known is not inputs:
            inputs, signature = known, None
    if torch_hooks.expects_gradients(inputs.query, inputs.key, inputs.value, inputs.attn_mask, inputs.sinks):
        return _differentiable(options, inputs)
    bound = bind(options, inputs)
    operands = bound.operands
    if inputs.out is not None:
        outputs.check_out(inputs.out, operands)
        outputs.check_no_overlap(inputs.out, torch_inputs.read_arrays(inputs))
    executed = execute(bound, options, inputs.out, inputs.philox)
    out = operands.restore(executed.out) if inputs.out is None else inputs.out
    if inputs.out is not None:
        torch_hooks.increment_version((inputs.out,))
    lse = None if executed.softmax_lse is None else operands.restore_lse(executed.softmax_lse)
    prepared = prepare(executed, inputs, bound, out, lse)
    cache.keep(signature, prepared)
    if options.window is None and inputs.attn_mask is None and inputs.out is None:
        growing.keep(signature, prepared, None if cache is _packed else options.layout)
    return Result(out, lse, executed.philox)


def _record(options: Options, inputs: Inputs) -> Result:
    """The call as one of the operator, which torch sees."""
    from ..integrations import torch_autograd, torch_ops

    if torch_hooks.is_dynamo_compiling():
        return torch_ops.traced(options, inputs)
    options, known = torch_inputs.recordable(options), torch_inputs.recordable_inputs(inputs)
    differentiable = (known.query, known.key, known.value, known.attn_mask, known.sinks)
    if known.out is None and torch_autograd.is_transformed(*differentiable):
        return torch_autograd.transformed(options, known)
    result = torch_ops.traced(options, known)
    return result if inputs.out is None else result._replace(out=inputs.out)


def _differentiable(options: Options, inputs: Inputs) -> Result:
    """The call as a node of torch's graph."""
    from ..integrations import torch_autograd

    return torch_autograd.attention(options, inputs)
