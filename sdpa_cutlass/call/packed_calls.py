"""One call on packed sequences: arguments → plan → launch, as calls.py does it for other batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..arrays.tensors import as_tensor, is_tensor
from ..library.registry import Asked
from ..problem import Causal
from . import call_table, outputs, plan_cache, planning, torch_hooks, torch_inputs
from .arguments import Inputs, Lengths, Options, Result
from .binding import Bound, bind_packed, upper_bound
from .extras import Extras
from .operands import check_no_grad
from .plan_cache import Plans

if TYPE_CHECKING:
    import torch

    from .arguments import ResultTuple

_packed = Plans()


def run(
    family: Asked,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    p_dropout: float,
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
    sinks: torch.Tensor | None = None,
    *,
    is_operator: bool = False,
) -> ResultTuple:
    """`calls.run_general` for packed sequences."""
    is_traced = torch_hooks.is_dynamo_compiling()
    table = None if is_traced else call_table.table  # tracing would make the compiled code depend on it
    if table is not None and philox is None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, "bshd", window,
            query, key, value, out, None, None, None, cu_seqlens_q, cu_seqlens_k, sinks,
            max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        if known_call is not None:
            return known_call
    options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, "bshd", window)
    inputs = Inputs(query, key, value, out, philox=philox, sinks=sinks)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_traced:
        from ..integrations import varlen_ops

        return varlen_ops.traced(options, inputs, lengths)
    if not is_operator and torch_hooks.is_watching():
        return _record(options, inputs, lengths)
    signature: tuple[Any, ...] | None = None
    prepared = None
    try:
        signature = (
            options, type(scale), type(p_dropout),
            type(max_seqlen_q), max_seqlen_q, type(max_seqlen_k), max_seqlen_k,
            *(plan_cache.signature_of(tensor) for tensor in (query, key, value, cu_seqlens_q, cu_seqlens_k)),
            None if out is None else plan_cache.signature_of(out),
            None if sinks is None else plan_cache.signature_of(sinks),
        )  # fmt: skip
        prepared = _packed[signature]
        plan_cache.require_data(cu_seqlens_q, cu_seqlens_k, philox, out, sinks)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (q | k | v) & 15 or not (q and k and v) or (sinks is not None and sinks.is_neg()):
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError):
        prepared = signature = None
    if prepared is None:
        return _run_unprepared(options, inputs, lengths, signature, is_operator=is_operator)
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch_hooks.is_grad_enabled():
        return _differentiable(options, inputs, lengths)
    if sinks is not None and sinks.requires_grad:
        check_no_grad({"sinks": sinks})
    if out is not None:
        outputs.check_known_out(out, _given(inputs, lengths))
        torch_hooks.increment_version((out,))
    if philox is None:
        call_table.add(prepared, *options, *inputs[:7], cu_seqlens_q, cu_seqlens_k, sinks, *lengths[2:])
    state = planning.random_bits(philox, prepared.p_dropout, query)
    given = Extras(
        None, prepared.p_dropout, state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks
    )
    return plan_cache.launch(prepared, query, key, value, out, given)


def _given(inputs: Inputs, lengths: Lengths) -> dict[str, Any]:
    """What is read, by name."""
    named = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    named |= {"cu_seqlens_q": lengths.cu_seqlens_q, "cu_seqlens_k": lengths.cu_seqlens_k}
    if inputs.sinks is not None:
        named["sinks"] = inputs.sinks
    return named | {"philox": inputs.philox} if is_tensor(inputs.philox) else named


def _record(options: Options, inputs: Inputs, lengths: Lengths) -> Result:
    """The call as one of the operator, which torch sees."""
    from ..integrations import torch_autograd, varlen_ops

    tensors = (torch_inputs.recordable_tensor(*named) for named in zip(Inputs._fields, inputs, strict=True))
    packed = Lengths(
        as_tensor("cu_seqlens_q", lengths.cu_seqlens_q),
        as_tensor("cu_seqlens_k", lengths.cu_seqlens_k),
        upper_bound("max_seqlen_q", torch_inputs.number(lengths.max_seqlen_q)),
        upper_bound("max_seqlen_k", torch_inputs.number(lengths.max_seqlen_k)),
    )
    known, options = Inputs(*tensors), torch_inputs.recordable(options)
    if known.out is None and torch_autograd.is_transformed(known.query, known.key, known.value):
        return torch_autograd.transformed(options, known, packed)
    result = varlen_ops.traced(options, known, packed)
    return result if inputs.out is None else result._replace(out=inputs.out)


def _run_unprepared(
    options: Options,
    inputs: Inputs,
    lengths: Lengths,
    signature: tuple[Any, ...] | None,
    *,
    is_operator: bool = False,
) -> Result:
    options = torch_inputs.with_flags(options)
    given = _given(inputs, lengths)
    if not all(map(is_tensor, given.values())) or not (inputs.out is None or is_tensor(inputs.out)):
        tensors = {name: as_tensor(name, value) for name, value in given.items()}
        packed = {name: tensors.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        if inputs.out is not None:
            tensors["out"] = as_tensor("out", inputs.out, writable=True)
        known, sizes = inputs._replace(**tensors), lengths._replace(**packed)
        result = Result(*run(*options[:7], options.window, *known[:4], *sizes, known.philox, known.sinks))
        return result if inputs.out is None else result._replace(out=inputs.out)
    if torch_inputs.needs_dispatcher(given | {"out": inputs.out}, is_operator=is_operator):
        return _record(options, inputs, lengths)
    known = torch_inputs.resolved(inputs)
    if known is not inputs:
        inputs, signature = known, None
    query, key, value = inputs.query, inputs.key, inputs.value
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch_hooks.is_grad_enabled():
        return _differentiable(options, inputs, lengths)
    bound = bind_packed(options, inputs, lengths)
    operands, out = bound.operands, None
    if inputs.out is not None:
        out = inputs.out[None]
        outputs.check_out(out, operands)
        outputs.check_no_overlap(out, given)
    if 0 in (bound.problem.batch, bound.problem.num_heads_q, bound.problem.seqlen_q):
        return _no_rows(bound, options, inputs)
    executed = planning.execute(bound, options, out, inputs.philox)
    result = operands.restore(executed.out)[0] if inputs.out is None else inputs.out
    if inputs.out is not None:
        torch_hooks.increment_version((inputs.out,))
    lse = None if executed.softmax_lse is None else executed.softmax_lse[0]
    prepared = planning.prepare(executed, inputs, bound, result, lse)
    _packed.keep(signature, prepared)
    return Result(result, lse, executed.philox)


def _differentiable(options: Options, inputs: Inputs, lengths: Lengths) -> Result:
    """The call as a node of torch's graph."""
    from ..integrations import torch_autograd

    return torch_autograd.attention(options, inputs, lengths)


def _no_rows(bound: Bound, options: Options, inputs: Inputs) -> Result:
    """There is no sequence, no head, or none that may have a row: `out` stays as it is."""
    operands = bound.operands
    out = inputs.out
    if out is None:
        out = operands.restore(outputs.empty_out(operands).zero_())[0]
    lse = outputs.empty_lse(operands).fill_(-math.inf)[0] if options.return_lse else None
    return Result(out, lse, planning.random_bits(inputs.philox, 0.0, operands.query))
