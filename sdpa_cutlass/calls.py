"""One call: arguments → plan → launch.

A call whose signature (sizes, strides, dtypes, devices, options) was seen before goes straight to its plan;
any other one is checked and planned first (see planning.py). Where there is a compiled launcher, it has a
table of the latest signatures, which is asked first (see call_table.py). `run` is the path of plain calls and
looks at nothing else; without a table it tries the latest signature, which spares it a hash. `run_general`
takes masks, dropout, lengths and layouts as well.
Arrays of other libraries are read as tensors first (see arrays.py); where torch is not installed, as they are
(see array_calls.py). While torch traces, records or differentiates, the call is an operator (see
torch_ops.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import array_calls, call_table, checks, results, rng
from .arrays import as_tensor, has_torch, is_tensor
from .checks import Layout
from .extras import Extras
from .plan_cache import Plans
from .planning import Inputs, Options, Prepared, Result, bind, execute, prepare, random_bits
from .problem import Causal
from .registry import Family

if TYPE_CHECKING:
    import torch

    from .planning import ResultTuple


_plain = Plans()  # of `run`
_general = Plans()  # of `run_general`
_latest: tuple[Plans, tuple[Any, ...], Prepared | None] = Plans(), (None,), None  # where `run` found what


def run(
    family: Family,
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
    if is_dynamo_compiling() or is_watched():
        from . import torch_ops

        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return torch_ops.traced(options, Inputs(query, key, value, out))
    table = call_table.table
    if table is not None:
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, 0.0, "bhsd", query, key, value, out
        )
        if known_call is not None:
            if out is not None:
                results.mark_written(out)
            return known_call
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
        if (q | k | v) & 15 or not q:  # functionalised tensors have the address 0
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError, ValueError):
        prepared = signature = None  # not tensors, or without data, or options that cannot be keys
    if prepared is None:
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse)
        return _run_unprepared(options, Inputs(query, key, value, out), _plain, signature)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        checks.check_no_grad({"query": query, "key": key, "value": value})
    if not is_latest:
        call_table.add(
            prepared, family, causal, scale, enable_gqa, kernel, return_lse, 0.0, "bhsd",
            query, key, value, out,
        )  # fmt: skip
    plan, _, empty_like, make_lse, out_stride, out_shape, _, _, spans = prepared
    is_written = out is not None
    if out is not None:
        results.check_known_spans(out, q, k, v, spans)
    elif out_stride is None:
        out = empty_like(query)
    else:
        out = query.new_empty_strided(out_shape, out_stride)
    lse = None if make_lse is None else make_lse()
    plan.launch_at(q, k, v, out, lse)
    if is_written:
        results.mark_written(out)
    return out, lse, rng.NO_PHILOX


def run_general(
    family: Family,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    p_dropout: float,
    layout: Layout | str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    seqlens_q: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    philox: Any,
) -> ResultTuple:
    """Any call: the options and inputs in the order of `Options` and `Inputs`."""
    if is_dynamo_compiling() or is_watched():
        from . import torch_ops

        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox)
        return torch_ops.traced(options, inputs)
    table = call_table.table
    if table is not None and philox is None and (attn_mask is None or not _is_negative(attn_mask)):
        known_call = table.call(
            family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout,
            query, key, value, out, attn_mask, seqlens_q, seqlens_k,
        )  # fmt: skip
        if known_call is not None:
            if out is not None:
                results.mark_written(out)
            return known_call
    signature: tuple[Any, ...] | None = None
    prepared = None
    try:
        signature = (
            family, causal, type(scale), scale, enable_gqa, kernel, return_lse,
            type(p_dropout), p_dropout, layout,
            type(query), query.shape, query.stride(), query.dtype, query.device,
            type(key), key.shape, key.stride(), key.dtype, key.device,
            type(value), value.shape, value.stride(), value.dtype, value.device,
            None if out is None else signature_of(out),
            None if attn_mask is None else signature_of(attn_mask),
            None if seqlens_q is None else signature_of(seqlens_q),
            None if seqlens_k is None else signature_of(seqlens_k),
        )  # fmt: skip
        prepared = _general[signature]
        for given in (attn_mask, seqlens_q, seqlens_k):
            if given is not None:
                given.data_ptr()
        if philox is not None:
            require_data(philox)
        if (
            (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
            or not query.data_ptr()
            or (prepared.casts_mask and _is_autocast_enabled(query))
            or (attn_mask is not None and attn_mask.is_neg())
        ):
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError):
        prepared = signature = None
    if prepared is None:
        options = Options(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout)
        inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox)
        return _run_unprepared(options, inputs, _general, signature)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        checks.check_no_grad({"query": query, "key": key, "value": value})
    if attn_mask is not None and attn_mask.requires_grad:
        checks.check_no_grad({"attn_mask": attn_mask})
    if out is not None:
        results.check_known_out(
            out, _given(Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, philox))
        )
    if philox is None:
        call_table.add(
            prepared, family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout,
            query, key, value, out, attn_mask, seqlens_q, seqlens_k,
        )  # fmt: skip
    state = random_bits(philox, prepared.p_dropout, query)
    extras = Extras(attn_mask, prepared.p_dropout, state, seqlens_q, seqlens_k)
    return launch(prepared, query, key, value, out, extras)


def signature_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on. Raises what a value that is no tensor raises."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def require_data(*values: Any) -> None:
    """Raises RuntimeError for a tensor without memory: FakeTensor, or inside torch.func.vmap."""
    for value in values:
        if value is not None and not isinstance(value, (tuple, list)):
            value.data_ptr()


def launch(
    prepared: Prepared,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    given: Extras,
) -> Result:
    """Runs a known signature on tensors as the caller gave them; `given` has its random bits."""
    is_written = out is not None
    plan, _, empty_like, make_lse, out_stride, out_shape, _, _, _ = prepared
    if out is None:
        out = empty_like(query) if out_stride is None else query.new_empty_strided(out_shape, out_stride)
    lse = None if make_lse is None else make_lse()
    plan.launch(query, key, value, out, lse, given)
    if is_written:
        results.mark_written(out)
    return Result(out, lse, given.philox)


def is_watched() -> bool:
    """True while torch records calls or differentiates them forward, so that they must go through operators.

    These are dispatch modes (make_fx, FakeTensorMode, a user's own), torch.jit.trace and dual levels. Inside
    an operator's kernel none of them is left.
    """
    if _dispatch_depth():
        return True
    if _tracing_state() is not None and not _is_excluded("Tracer"):
        return True
    return _forward_ad._current_level >= 0 and not _is_excluded("AutogradOther")


def _is_excluded(key: str) -> bool:
    """Whether a dispatch key was handled already: the call comes from an operator's kernel."""
    torch = sys.modules["torch"]
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C._dispatch_key_parse(key)))


def _is_negative(tensor: Any) -> bool:
    return is_tensor(tensor) and tensor.is_neg()


def _is_autocast_enabled(query: torch.Tensor) -> bool:
    return bool(sys.modules["torch"].is_autocast_enabled(query.device.type))


def _given(inputs: Inputs) -> dict[str, Any]:
    """The arrays and tensors that a call reads; q, k and v even if they are None."""
    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    for name in ("attn_mask", "seqlens_q", "seqlens_k"):
        value = getattr(inputs, name)
        if value is not None:
            given[name] = value
    if is_tensor(inputs.philox):
        given["philox"] = inputs.philox
    return given


def _run_unprepared(
    options: Options, inputs: Inputs, cache: Plans, signature: tuple[Any, ...] | None
) -> Result:
    """Checks everything; what can serve the next call of its kind is kept in `cache`."""
    given = _given(inputs)
    if not all(is_tensor(value) for value in given.values()) or not (
        inputs.out is None or is_tensor(inputs.out)
    ):
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
    if any(checks.is_virtual(value) for value in given.values()):
        from . import torch_ops

        return torch_ops.traced(options, inputs)
    bound = bind(options, inputs)
    operands = bound.operands
    if inputs.out is not None:
        results.check_out(inputs.out, operands)
        results.check_no_overlap(inputs.out, given)
    executed = execute(bound, options, inputs.out, inputs.philox)
    if inputs.out is not None:
        results.mark_written(inputs.out)
    out = operands.restore(executed.out) if inputs.out is None else inputs.out
    lse = None if executed.softmax_lse is None else operands.restore_lse(executed.softmax_lse)
    cache.keep(signature, prepare(executed, inputs, bound, out, lse))
    return Result(out, lse, executed.philox)


def _find_is_dynamo_compiling() -> bool:
    """Stands in for torch's function where torch was imported after this package, until the first eager call.

    Not while tracing: compiled code depends on the global and would be compiled again.
    """
    global is_dynamo_compiling, _dispatch_depth, _tracing_state, _forward_ad
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    _dispatch_depth = torch._C._len_torch_dispatch_stack
    _tracing_state = torch._C._get_tracing_state
    _forward_ad = torch.autograd.forward_ad
    return False


is_dynamo_compiling: Callable[[], bool] = _find_is_dynamo_compiling
_dispatch_depth: Callable[[], int] = int
_tracing_state: Callable[[], Any] = type(None)
_forward_ad: Any = SimpleNamespace(_current_level=-1)
if sys.modules.get("torch"):  # found now, so that code compiled before the first eager call stays valid
    _find_is_dynamo_compiling()
