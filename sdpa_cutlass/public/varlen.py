"""attention_varlen: sequences of different lengths, packed one behind the other without padding.

The packed rows are one long batch for checks.py ([1, total, heads, head_dim] in layout "bshd"); what belongs
to which sequence stands in cu_seqlens, on the device, and only kernels read it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.tensors import as_tensor, is_tensor
from ..call import call_table, calls, extras, outputs, planning, torch_inputs
from ..call.extras import Extras
from ..call.plan_cache import Plans
from ..call.planning import Bound, Inputs, Options, Result, chosen
from ..call.precision import asked_of
from ..errors import ArgumentError, ArgumentTypeError
from ..library.registry import Asked, Family, Precision
from ..problem import Causal

if TYPE_CHECKING:
    import torch

    from ..call.planning import ResultTuple
    from ..dropout import PhiloxState

_INT32_MAX = 2**31 - 1
_FUSED: Asked = Family.FMHA_FWD


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal | str | None = None,
    scale: float | None = None,
    p_dropout: float = 0.0,
    philox: PhiloxState | tuple[int, int] | torch.Tensor | None = None,
    return_lse: bool = False,
    return_philox: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    precision: Precision | str | None = None,
) -> torch.Tensor | tuple[Any, ...]:
    """`attention` of every sequence of a packed batch by itself, in one launch.

    query [total_q, Hq, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv] → out [total_q, Hq, Dv]. Sequence
    b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of query and out, and those of cu_seqlens_k of
    key and value. Sequences may be empty, and one without keys gives 0 and -inf. Rows of out outside every
    sequence are left as they are if `out` is given, and hold anything otherwise.

    cu_seqlens_q, cu_seqlens_k: int32 tensors [B + 1] beside query, contiguous, ascending from 0. Never read
        on the host, so a CUDA graph or compiled code may run again with other lengths.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths; what lies beyond them is cut off. They size the
        launch, so bounds far too large cost time.
    softmax_lse [Hq, total_q] float32. In a dropout mask, rows and columns count within their sequence and
    `b` is its number. "bottom_right" means each sequence's own last row and key. The other arguments, the
    returned tuple and the errors are those of `attention`.
    """
    return_philox = torch_inputs.flag("return_philox", return_philox)
    if window is not None:
        window = extras.checked_window(window)
    asked = _FUSED if precision is None else asked_of(precision)
    result = run(
        asked, causal, scale, enable_gqa, kernel, return_lse, p_dropout, window, query, key, value, out,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, philox, sinks,
    )  # fmt: skip
    return chosen(result, return_lse, return_philox)


class Lengths(NamedTuple):
    """Where the sequences lie, as the caller gave it."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


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
    is_traced = calls.is_dynamo_compiling()
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
    if not is_operator and calls.is_watching():
        return _record(options, inputs, lengths)
    signature: tuple[Any, ...] | None = None
    prepared = None
    try:
        signature = (
            options, type(scale), type(p_dropout),
            type(max_seqlen_q), max_seqlen_q, type(max_seqlen_k), max_seqlen_k,
            *(calls.signature_of(tensor) for tensor in (query, key, value, cu_seqlens_q, cu_seqlens_k)),
            None if out is None else calls.signature_of(out),
            None if sinks is None else calls.signature_of(sinks),
        )  # fmt: skip
        prepared = _packed[signature]
        calls.require_data(cu_seqlens_q, cu_seqlens_k, philox, out, sinks)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (q | k | v) & 15 or not (q and k and v) or (sinks is not None and sinks.is_neg()):
            prepared = signature = None
    except KeyError:
        pass
    except (AttributeError, TypeError, RuntimeError):
        prepared = signature = None
    if prepared is None:
        return _run_unprepared(options, inputs, lengths, signature, is_operator=is_operator)
    if calls.expects_gradients(query, key, value, sinks):
        return _differentiable(options, inputs, lengths)
    if out is not None:
        outputs.check_known_out(out, _given(inputs, lengths))
        calls.increment_version((out,))
    if philox is None:
        call_table.add(prepared, *options, *inputs[:7], cu_seqlens_q, cu_seqlens_k, sinks, *lengths[2:])
    state = planning.random_bits(philox, prepared.p_dropout, query)
    given = Extras(
        None, prepared.p_dropout, state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks
    )
    return calls.launch(prepared, query, key, value, out, given)


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
        _upper_bound("max_seqlen_q", torch_inputs.number(lengths.max_seqlen_q)),
        _upper_bound("max_seqlen_k", torch_inputs.number(lengths.max_seqlen_k)),
    )
    known, options = Inputs(*tensors), torch_inputs.recordable(options)
    if known.out is None and torch_autograd.is_transformed(known.query, known.key, known.value, known.sinks):
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
    if calls.expects_gradients(inputs.query, inputs.key, inputs.value, inputs.sinks):
        return _differentiable(options, inputs, lengths)
    bound = bind(options, inputs, lengths)
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
        calls.increment_version((inputs.out,))
    lse = None if executed.softmax_lse is None else executed.softmax_lse[0]
    prepared = planning.prepare(executed, inputs, bound, result, lse)
    _packed.keep(signature, prepared)
    return Result(result, lse, executed.philox)


def _differentiable(options: Options, inputs: Inputs, lengths: Lengths) -> Result:
    """The call as a node of torch's graph."""
    from ..integrations import torch_autograd

    return torch_autograd.attention(options, inputs, lengths)


def bind(options: Options, inputs: Inputs, lengths: Lengths, *, allow_meta: bool = False) -> Bound:
    """Checks everything but `out` and `philox`, and reads no data: tracing comes here too."""
    tensors = {name: as_tensor(name, getattr(inputs, name)) for name in ("query", "key", "value")}
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}; allowed is [total, heads, head_dim]"
            )
    max_seqlen_q = _upper_bound("max_seqlen_q", lengths.max_seqlen_q)
    max_seqlen_k = _upper_bound("max_seqlen_k", lengths.max_seqlen_k)
    batched = Inputs(**{name: tensor[None] for name, tensor in tensors.items()}, sinks=inputs.sinks)
    bound = planning.bind(options, batched, allow_meta=allow_meta)
    query, key = bound.operands.query, bound.operands.key
    cu_seqlens_q = as_tensor("cu_seqlens_q", lengths.cu_seqlens_q)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
        raise ArgumentError(f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}; allowed is [batch + 1]")
    count = cu_seqlens_q.shape[0]
    given = bound.given._replace(
        cu_seqlens_q=extras.lengths("cu_seqlens_q", cu_seqlens_q, count, query),
        cu_seqlens_k=extras.lengths("cu_seqlens_k", lengths.cu_seqlens_k, count, query),
    )
    if allow_meta:  # sizes may be symbolic, and no kernel is chosen
        return bound._replace(given=given)
    problem = dataclasses.replace(
        bound.problem,
        batch=count - 1,
        seqlen_q=min(max_seqlen_q, query.shape[2]),
        seqlen_k=min(max_seqlen_k, key.shape[2]),
        has_lengths=True,
    )
    bound = bound._replace(problem=problem, given=given)
    return _with_empty_keys(bound) if problem.seqlen_k == 0 else bound


def _with_empty_keys(bound: Bound) -> Bound:
    """No sequence has a key. Only the device knows which rows are to become 0: one key that none may see."""
    operands, given = bound.operands, bound.given
    assert given.cu_seqlens_k is not None
    key, value = (
        tensor.new_zeros((1, tensor.shape[1], 1, tensor.shape[3]))
        for tensor in (operands.key, operands.value)
    )
    return bound._replace(
        operands=operands._replace(key=key, value=value),
        problem=dataclasses.replace(bound.problem, seqlen_k=1),
        given=given._replace(cu_seqlens_k=given.cu_seqlens_k.new_zeros(given.cu_seqlens_k.shape)),
    )


def _no_rows(bound: Bound, options: Options, inputs: Inputs) -> Result:
    """There is no sequence, no head, or none that may have a row: `out` stays as it is."""
    operands = bound.operands
    out = inputs.out
    if out is None:
        out = operands.restore(outputs.empty_out(operands).zero_())[0]
    lse = outputs.empty_lse(operands).fill_(-math.inf)[0] if options.return_lse else None
    return Result(out, lse, planning.random_bits(inputs.philox, 0.0, operands.query))


def _upper_bound(name: str, value: Any) -> Any:
    """`value`, an integer or a symbolic one. A tensor is refused: reading it would wait for the device."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(
            f"{name} is a {type(value).__name__}; allowed is an int, which may be any upper bound"
        )
    size = operator.index(value)
    if not 0 <= size <= _INT32_MAX:
        raise ArgumentError(f"{name}={value!r}; allowed are 0 to {_INT32_MAX}")
    return size
