"""One call: arguments → plan → launch.

A call whose signature (sizes, strides, dtypes, devices, options) was seen before goes straight to its plan;
any other one is checked and planned first (see planning.py). Where there is a compiled launcher, it has a
table of the latest signatures, which is asked first (see call_table.py). `run` is the path of plain calls and
looks at nothing else; without a table it tries the latest signature, which spares it a hash. Of a known
signature's tensors, masks alone are asked for the negative bit: views that have it, such as x.conj().imag,
start at an odd element, so no other one that is aligned can be such a view, unless as_strided moved it.
`run_general` takes masks, dropout, lengths and layouts as well.
Arrays of other libraries are read as tensors first (tensors.py); where torch is not installed, as they are
(array_calls.py). While torch records or differentiates, the call is an operator (see torch_ops.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..arrays.tensors import as_tensor, has_torch, is_tensor
from ..library.registry import Asked
from ..problem import Causal
from . import array_calls, call_table, checks, outputs, rng, torch_inputs
from .checks import Layout
from .extras import Extras
from .plan_cache import Plans
from .planning import Inputs, Options, Prepared, Result, bind, execute, prepare, random_bits

if TYPE_CHECKING:
    import torch

    from .planning import ResultTuple


_plain = Plans()  # of `run`
_general = Plans()  # of `run_general`
_latest: tuple[Plans, tuple[Any, ...], Prepared | None] = Plans(), (None,), None  # where `run` found what


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
    if is_dynamo_compiling():
        from ..integrations import torch_ops

        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return torch_ops.traced(options, Inputs(query, key, value, out))
    table = call_table.table
    if table is not None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, 0.0, "bhsd", None, query, key, value, out
        )
        if known_call is not None:
            return known_call
    if is_watching():
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _record(options, Inputs(query, key, value, out))
    signature: tuple[Any, ...] | None = None
    prepared = None
    is_latest = True
    try:
        signature = (
            type(query), query.shape, query.stride(), query.dtype, query.device,
            type(key), key.shape, key.stride(), key.dtype, key.device,
            type(value), value.shape, value.stride(), value.dtype, value.device,
            family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        )  # fmt: skip
        cache, known, found = _latest  # one read: another thread may replace it at any time
        may_be_known = cache is _plain and known[0] is type(query)
        if may_be_known:  # what has no address may have symbolic sizes, which a comparison would specialise
            q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if may_be_known and known == signature:
            prepared = found
        else:
            prepared = _plain[signature]
            q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
            _latest = _plain, signature, prepared
            is_latest = False
        if (q | k | v) & 15 or not (q and k and v) or not (out is None or out.data_ptr()):
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError, ValueError):
        prepared = signature = None  # not tensors, or without data, or options that cannot be keys
    if prepared is None:
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _run_unprepared(options, Inputs(query, key, value, out), _plain, signature)
    if (query.requires_grad or key.requires_grad or value.requires_grad) and is_grad_enabled():
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _differentiable(options, Inputs(query, key, value, out))
    if not is_latest:
        call_table.add(
            prepared, family, causal, scale, enable_gqa, kernel, return_lse, 0.0, "bhsd", None,
            query, key, value, out,
        )  # fmt: skip
    plan, empty_like, make_lse, out_stride, out_shape, _, _, spans = prepared
    if out is not None:
        outputs.check_known_spans(out, q, k, v, spans)
        increment_version((out,))
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
    sinks: torch.Tensor | None = None,
    *,
    is_operator: bool = False,
) -> ResultTuple:
    """Any call: the options and inputs in the order of `Options` and `Inputs`.

    `is_operator`: torch has seen the call, and this is the operator's kernel.
    """
    if is_dynamo_compiling():
        from ..integrations import torch_ops

        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks)
        return torch_ops.traced(options, inputs)
    table = call_table.table
    if table is not None and philox is None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window,
            query, key, value, out, attn_mask, seqlens_q, seqlens_k, None, None, sinks,
        )  # fmt: skip
        if known_call is not None:
            return known_call
    if not is_operator and is_watching():
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks)
        return _record(options, inputs)
    signature: tuple[Any, ...] | None = None
    prepared = None
    try:
        signature = (
            family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
            type(p_dropout), p_dropout, layout, window,
            type(query), query.shape, query.stride(), query.dtype, query.device,
            type(key), key.shape, key.stride(), key.dtype, key.device,
            type(value), value.shape, value.stride(), value.dtype, value.device,
            None if out is None else signature_of(out),
            None if attn_mask is None else signature_of(attn_mask),
            None if seqlens_q is None else signature_of(seqlens_q),
            None if seqlens_k is None else signature_of(seqlens_k),
            None if sinks is None else signature_of(sinks),
        )  # fmt: skip
        prepared = _general[signature]
        require_data(attn_mask, seqlens_q, seqlens_k, philox, out, sinks)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (
            (q | k | v) & 15
            or not (q and k and v)
            or (attn_mask is not None and attn_mask.is_neg())
            or (sinks is not None and sinks.is_neg())
            or (prepared.casts_mask and _is_autocast_enabled(query))
        ):
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError):
        prepared = signature = None
    if prepared is None:
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks)
        return _run_unprepared(options, inputs, _general, signature, is_operator=is_operator)
    if expects_gradients(query, key, value, sinks):
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks)
        return _differentiable(options, inputs)
    if attn_mask is not None and attn_mask.requires_grad:
        checks.check_no_grad({"attn_mask": attn_mask})
    if out is not None:
        outputs.check_known_out(
            out, _given(Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, philox, sinks))
        )
        increment_version((out,))
    if philox is None:
        call_table.add(
            prepared, family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window,
            query, key, value, out, attn_mask, seqlens_q, seqlens_k, None, None, sinks,
        )  # fmt: skip
    state = random_bits(philox, prepared.p_dropout, query)
    extras = Extras(attn_mask, prepared.p_dropout, state, seqlens_q, seqlens_k, sinks=sinks)
    return launch(prepared, query, key, value, out, extras)


def signature_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on. Raises what a value that is no tensor raises."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def require_data(*values: Any) -> None:
    """Raises RuntimeError for a tensor without memory: FakeTensor, a functional tensor, inside torch.func."""
    for value in values:
        if value is not None and not isinstance(value, (tuple, list)) and not value.data_ptr():
            raise RuntimeError("a tensor has no memory")


def launch(
    prepared: Prepared,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    given: Extras,
) -> Result:
    """Runs a known signature on tensors as the caller gave them; `given` has its random bits."""
    plan, empty_like, make_lse, out_stride, out_shape, _, _, _ = prepared
    if out is None:
        out = empty_like(query) if out_stride is None else query.new_empty_strided(out_shape, out_stride)
    lse = None if make_lse is None else make_lse()
    plan.launch(query, key, value, out, lse, given)
    return Result(out, lse, given.philox)


def _is_autocast_enabled(query: torch.Tensor) -> bool:
    return bool(sys.modules["torch"].is_autocast_enabled(query.device.type))


def _given(inputs: Inputs) -> dict[str, Any]:
    """The arrays and tensors that a call reads; q, k and v even if they are None."""
    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.attn_mask is not None:
        given["attn_mask"] = inputs.attn_mask
    if inputs.seqlens_q is not None:
        given["seqlens_q"] = inputs.seqlens_q
    if inputs.seqlens_k is not None:
        given["seqlens_k"] = inputs.seqlens_k
    if inputs.philox is not None and is_tensor(inputs.philox):
        given["philox"] = inputs.philox
    if inputs.sinks is not None:
        given["sinks"] = inputs.sinks
    return given


def _record(options: Options, inputs: Inputs) -> Result:
    """The call as one of the operator, which torch sees."""
    from ..integrations import torch_autograd, torch_ops

    tensors = (torch_inputs.recordable_tensor(*named) for named in zip(Inputs._fields, inputs, strict=True))
    known, options = Inputs(*tensors), torch_inputs.recordable(options)
    if known.out is None and torch_autograd.is_transformed(known.query, known.key, known.value, known.sinks):
        return torch_autograd.transformed(options, known)
    result = torch_ops.traced(options, known)
    return result if inputs.out is None else result._replace(out=inputs.out)


def _run_unprepared(
    options: Options,
    inputs: Inputs,
    cache: Plans,
    signature: tuple[Any, ...] | None,
    *,
    is_operator: bool = False,
) -> Result:
    """Checks everything; what can serve the next call of its kind is kept in `cache`."""
    options = torch_inputs.with_flags(options)
    given = _given(inputs)
    if not all(map(is_tensor, given.values())) or not (inputs.out is None or is_tensor(inputs.out)):
        if not has_torch():
            return array_calls.run(options, inputs)
        tensors = {name: as_tensor(name, value) for name, value in given.items()}
        if inputs.out is not None:
            tensors["out"] = as_tensor("out", inputs.out, writable=True)
        known = inputs._replace(**tensors)
        if cache is _plain:
            result = Result(*run(*options[:6], *known[:4]))
        else:
            result = Result(*run_general(*options, *known))
        return result if inputs.out is None else result._replace(out=inputs.out)
    if torch_inputs.needs_dispatcher(given | {"out": inputs.out}, is_operator=is_operator):
        return _record(options, inputs)
    known = torch_inputs.resolved(inputs)
    if known is not inputs:
        inputs, signature = known, None
    query, key, value = inputs.query, inputs.key, inputs.value
    if (  # as expects_gradients, without a call
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (inputs.sinks is not None and inputs.sinks.requires_grad)
    ) and is_grad_enabled():
        return _differentiable(options, inputs)
    bound = bind(options, inputs)
    operands = bound.operands
    if inputs.out is not None:
        outputs.check_out(inputs.out, operands)
        outputs.check_no_overlap(inputs.out, given)
    executed = execute(bound, options, inputs.out, inputs.philox)
    out = operands.restore(executed.out) if inputs.out is None else inputs.out
    if inputs.out is not None:
        increment_version((inputs.out,))
    lse = None if executed.softmax_lse is None else operands.restore_lse(executed.softmax_lse)
    cache.keep(signature, prepare(executed, inputs, bound, out, lse))
    return Result(out, lse, executed.philox)


def _differentiable(options: Options, inputs: Inputs) -> Result:
    """The call as a node of torch's graph."""
    from ..integrations import torch_autograd

    return torch_autograd.attention(options, inputs)


def expects_gradients(query: Any, key: Any, value: Any, sinks: Any) -> bool:
    """Whether torch records what is computed from these."""
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ) and is_grad_enabled()


def is_grad_enabled() -> bool:
    """Whether torch records what is computed: only asked about inputs that require grad."""
    return bool(sys.modules["torch"].is_grad_enabled())


def _find_is_dynamo_compiling() -> bool:
    """Stands in for torch's function where torch was imported after this package, until the first eager call.

    Not while tracing: compiled code depends on the global and would be compiled again.
    """
    global is_dynamo_compiling, is_watching, increment_version
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    from ..library import torch_state

    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    is_watching, increment_version = torch_state.is_watching, torch_state.increment_version
    return False


def _without_torch(*_: object) -> bool:
    return False


# Those of torch_state.py, once torch is there.
is_watching: Callable[[], bool] = _without_torch
increment_version: Callable[[tuple[Any, ...]], object] = _without_torch
is_dynamo_compiling: Callable[[], bool] = _find_is_dynamo_compiling
if sys.modules.get("torch"):  # found now, so that code compiled before the first eager call stays valid
    _find_is_dynamo_compiling()
