"""Arguments → a checked call in canonical form, without data or a library: tracing comes here too.

Packed sequences are one long batch
for checks.py ([1, total, heads, head_dim] in layout "bshd"), and what belongs to which sequence stands
in cu_seqlens, on the device, where only kernels read it.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.tensors import as_tensor
from ..errors import ArgumentError, ArgumentTypeError
from ..problem import NO_MASK, Problem
from . import checks, extras, shard
from .arguments import Inputs, Options
from .extras import Extras
from .operands import INT32_MAX, Operands

if TYPE_CHECKING:
    import torch


class Bound(NamedTuple):
    """A checked call in canonical form. `drops_everything`: p_dropout is 1, and `given` says 0 instead."""

    operands: Operands
    problem: Problem
    scale: float
    given: Extras
    drops_everything: bool


def bind(options: Options, inputs: Inputs, *, allow_meta: bool = False) -> Bound:
    """Checks everything but `out` and `philox`, and reads no data: tracing comes here too."""
    is_packed = inputs.cu_seqlens_q is not None
    query, key, value = (
        as_tensor("query", inputs.query), as_tensor("key", inputs.key), as_tensor("value", inputs.value)
    )  # fmt: skip
    if is_packed:
        query, key, value = (
            _batch_of_one("query", query), _batch_of_one("key", key), _batch_of_one("value", value)
        )  # fmt: skip
        max_seqlen_q = upper_bound("max_seqlen_q", inputs.max_seqlen_q)
        max_seqlen_k = upper_bound("max_seqlen_k", inputs.max_seqlen_k)
    query, key, value = checks.autocast_inputs(query, key, value)
    operands = checks.canonical_operands(
        query,
        key,
        value,
        enable_gqa=options.enable_gqa,
        allow_meta=allow_meta,
        layout=checks.tensor_layout(options.layout),
    )
    causal, diagonal = checks.alignment(options.causal)
    p_dropout = extras.dropout_probability(options.p_dropout)
    if diagonal is not None:
        shard.check_no_dropout(p_dropout)
    mask, count = inputs.attn_mask, operands.query.shape[0]
    if mask is not None:
        mask = extras.canonical_mask(extras.autocast_mask(mask, operands.query), operands)
    seqlens_q, seqlens_k = inputs.seqlens_q, inputs.seqlens_k
    if seqlens_q is not None:
        seqlens_q = extras.lengths("seqlens_q", seqlens_q, count, operands.query)
    if seqlens_k is not None:
        seqlens_k = extras.lengths("seqlens_k", seqlens_k, count, operands.query)
    window = None if options.window is None else extras.checked_window(options.window)
    sinks = None if inputs.sinks is None else extras.head_sinks(inputs.sinks, operands.query)
    given = Extras(mask, p_dropout if p_dropout < 1 else 0.0, None, seqlens_q, seqlens_k, sinks=sinks)
    scale = checks.softmax_scale(options.scale, operands.query.shape[3])
    if allow_meta:  # sizes may be symbolic, and what is left out compares them
        problem = checks.problem_of(operands, causal, given)
    else:
        reading = NO_MASK if mask is None else extras.reading(mask)
        problem = checks.problem_of(operands, causal, given, window, diagonal, reading)
    bound = Bound(operands, problem, scale, given, p_dropout == 1)
    if not is_packed:
        return bound
    # With sizes that may be symbolic, no kernel is chosen.
    return _with_sequences(bound, inputs, None if allow_meta else (max_seqlen_q, max_seqlen_k))


def _batch_of_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 3:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed is [total, heads, head_dim]")
    return tensor[None]


def _with_sequences(bound: Bound, inputs: Inputs, bounds: tuple[int, int] | None) -> Bound:
    """`bound`, whose batch is that of `_batch_of_one`, with what belongs to which sequence.

    `bounds` are max_seqlen_q and max_seqlen_k; without them, the problem stays that of the batch.
    """
    (query, key, value, batch_shape, _, layout), problem, scale, given, drops_everything = bound
    cu_seqlens_q = as_tensor("cu_seqlens_q", inputs.cu_seqlens_q)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
        raise ArgumentError(f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}; allowed is [batch + 1]")
    count = cu_seqlens_q.shape[0]
    given = Extras(
        p_dropout=given.p_dropout,
        cu_seqlens_q=extras.lengths("cu_seqlens_q", cu_seqlens_q, count, query),
        cu_seqlens_k=extras.lengths("cu_seqlens_k", inputs.cu_seqlens_k, count, query),
        sinks=given.sinks,
    )
    operands = Operands(query, key, value, batch_shape, 3, layout)
    if bounds is None:
        return Bound(operands, problem, scale, given, drops_everything)
    rows, keys = min(bounds[0], problem.seqlen_q), min(bounds[1], problem.seqlen_k)
    problem = dataclasses.replace(problem, batch=count - 1, seqlen_q=rows, seqlen_k=keys, has_lengths=True)
    bound = Bound(operands, problem, scale, given, drops_everything)
    return _with_empty_keys(bound) if keys == 0 else bound


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


def upper_bound(name: str, value: Any) -> Any:
    """`value`, an integer or a symbolic one. A tensor is refused: reading it would wait for the device."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(
            f"{name} is a {type(value).__name__}; allowed is an int, which may be any upper bound"
        )
    size = operator.index(value)
    if not 0 <= size <= INT32_MAX:
        raise ArgumentError(f"{name}={value!r}; allowed are 0 to {INT32_MAX}")
    return size
