"""Other sizes of known calls: plans for signatures that are known but for sizes and strides.

Every token of a decoder brings a signature of its own, and so does every prompt and every pack of sequences.
What does not depend on sizes was checked with the calls before; the sizes are compared, a kernel is chosen
and bound for them, and nothing else is asked again. So a token costs half of what an unknown signature does.
Calls with a mask, a window or out are checked in full.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..choice.select import choose
from ..library.structs import Params
from ..problem import Causal
from .checks import sizes_agree
from .launch import Plan, strides
from .operands import INT32_MAX, Layout, is_aligned

if TYPE_CHECKING:
    import torch

    from .plan_cache import Plans, Signature
    from .planning import Prepared

_MAX_KNOWN = 64
# ctypes' arrays and fields would cost 1 µs more
_write_sizes = struct.Struct("5i").pack_into  # from batch on
_write_strides = struct.Struct("6q").pack_into  # of key and value
_write_all_strides = struct.Struct("14q").pack_into  # of query, key, value, out and softmax_lse
_write_totals = struct.Struct("2i").pack_into
# Places in the signatures of calls.py, which begin alike; the last one of packed sequences has their sizes.
_FAMILY, _CAUSAL, _ENABLE_GQA, _KERNEL = 0, 1, 4, 5
_QUERY, _KEY, _VALUE = 8, 13, 18  # shape, and behind it strides, dtype and device
_OF_QUERY, _OF_KEY, _OF_VALUE = (slice(at, at + 2) for at in (_QUERY, _KEY, _VALUE))  # shape and strides
_IS_SHAPE = (1, 0, 1, 0, 1, 0)  # of those: what stands for the batch of packed sequences
_WHOLE = (None, *Causal)  # what `causal` says of a problem that is no shard

assert [name for name, *_ in Params._fields_[2:7]] == [
    "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k",
]  # fmt: skip
assert Params.mask.offset - Params.q_stride.offset == 14 * 8
assert Params.total_k.offset - Params.total_q.offset == 4


_known: dict[tuple[Any, ...], tuple[Signature, Prepared]] = {}
"""The latest call, by all of its signature but sizes and strides."""


def keep(signature: Signature | None, prepared: Prepared | None, layout: Layout | str | None) -> None:
    """Lets calls of other sizes take after one without mask, window and out. `layout`: None if it is packed.

    Not where query is broadcast, nor after a shard: its mask may hide none of these keys.
    """
    if signature is None or prepared is None or signature[_CAUSAL] not in _WHOLE:
        return
    views = _views(signature, layout)
    if views is None:
        return
    problem = prepared.plan.problem
    batch, heads, *_ = views[0]
    if (batch, heads) == (1 if layout is None else problem.batch, problem.num_heads_q):
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[_without_sizes(signature, layout)] = signature, prepared


def plan_and_keep(
    cache: Plans,
    signature: Signature,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout | str | None,
) -> Prepared | None:
    """A plan of an unknown signature, made from that of a known call, which `cache` keeps.

    It is met once, perhaps: call_table.py gets to know it when it comes again.
    """
    q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not (q and k and v) or (q | k | v) & 15:
        return None
    prepared = plan_next(signature, query, key, value, layout)
    cache.keep(signature, prepared)
    return prepared


def plan_next(
    signature: Signature,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout | str | None,
) -> Prepared | None:
    """A plan for these tensors, of `signature`, if one is known that differs in sizes and strides alone.

    They have memory, at multiples of 16 bytes, and come without mask, window and out. `layout`: as in `keep`.
    """
    views = _views(signature, layout)
    if views is None:
        return None
    kind = _without_sizes(signature, layout)
    found = _known.get(kind)
    if found is None or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    of_query, stride_of_query, of_key, stride_of_key, of_value, stride_of_value = views
    if not sizes_agree(of_query, of_key, of_value, signature[_ENABLE_GQA]):
        return None
    if not is_aligned(stride_of_key) or not is_aligned(stride_of_value):
        return None
    latest, known = found
    plan = known.plan
    batch, heads_q, rows, _ = of_query
    keys = of_key[2]
    if layout is None:
        longest_q, longest_k, starts_q, stride_of_starts_q, starts_k, stride_of_starts_k = signature[-1]
        if starts_q != starts_k or not (stride_of_starts_q == stride_of_starts_k == (1,)):
            return None
        if not (0 <= longest_q <= INT32_MAX and 0 <= longest_k <= INT32_MAX):
            return None
        sizes = starts_q[0] - 1, heads_q, of_key[1], min(longest_q, rows), min(longest_k, keys)
    else:
        sizes = batch, heads_q, of_key[1], rows, keys
    problem = plan.problem.resized(*sizes)
    if problem.is_empty or (problem.has_sinks and heads_q != plan.problem.num_heads_q):
        return None
    if layout is not None and problem.has_lengths and batch != plan.problem.batch:
        return None
    image = bytearray(plan.params)
    _write_sizes(image, Params.batch.offset, *sizes)
    of_keys = *strides(of_key, stride_of_key), *strides(of_value, stride_of_value)
    shape, make_lse = known.out_shape, known.make_lse
    if latest[_OF_QUERY] == signature[_OF_QUERY]:  # so are those of the results
        _write_strides(image, Params.k_stride.offset, *of_keys)
    else:
        if known.out_stride is not None or not is_aligned(stride_of_query):
            return None
        stride_of_out = stride_of_query
        if not query.is_contiguous():  # else empty_like would say the same
            stride_of_out = _arranged(known.empty_like(query).stride(), layout, 0)
            if stride_of_out[3] != 1:
                return None
        _write_all_strides(
            image,
            Params.q_stride.offset,
            *strides(of_query, stride_of_query),
            *of_keys,
            *strides(of_query, stride_of_out),
            heads_q * rows,
            rows,
        )
        shape = tuple(query.shape)
        make_lse = _resized(make_lse, of_query[1:3] if layout is None else of_query[:3])
    if layout is None:
        _write_totals(image, Params.total_q.offset, rows, keys)
    params = Params.from_buffer(image)
    params.causal_offset = problem.causal_offset
    choice = choose(plan.library, problem, signature[_FAMILY], plan.device, params, name=signature[_KERNEL])
    params.num_splits = choice.num_splits
    made = known._replace(
        plan=Plan(plan.library, choice.kernel, problem, params, plan.device),
        out_shape=shape,
        make_lse=make_lse,
    )
    _known[kind] = signature, made
    return made


def _resized(make_lse: Any, shape: Sequence[int]) -> Any:
    """What makes a softmax_lse [B, Hq, Sq] or [Hq, Sq] as `make_lse` makes one of another size."""
    if make_lse is None:
        return None
    *_, heads, rows = shape
    dense = (heads * rows, rows, 1)
    return functools.partial(make_lse.func, tuple(shape), dense[-len(shape) :])


def _views(signature: Signature, layout: Layout | str | None) -> tuple[Sequence[int], ...] | None:
    """Shape and strides of query, of key and of value in the order [B, H, S, D].

    None where one has not as many dimensions.
    """
    rank = 3 if layout is None else 4
    if not len(signature[_QUERY]) == len(signature[_KEY]) == len(signature[_VALUE]) == rank:
        return None
    views = (*signature[_OF_QUERY], *signature[_OF_KEY], *signature[_OF_VALUE])
    if layout == Layout.BHSD:
        return views
    return tuple(_arranged(sizes, layout, is_shape) for sizes, is_shape in zip(views, _IS_SHAPE, strict=True))


def _arranged(sizes: Sequence[int], layout: Layout | str | None, of_batch: int) -> Sequence[int]:
    """A shape or strides in the order [B, H, S, D]; `of_batch` is put where packed sequences have nothing."""
    if layout is None:
        rows, heads, head_dim = sizes
        return of_batch, heads, rows, head_dim
    if layout == Layout.BHSD:
        return sizes
    batch, rows, heads, head_dim = sizes
    return batch, heads, rows, head_dim


def _without_sizes(signature: Signature, layout: Layout | str | None) -> tuple[Any, ...]:
    last = len(signature) if layout is not None else -1
    return (
        *signature[:_QUERY], signature[_QUERY][-1],
        *signature[_QUERY + 2 : _KEY], signature[_KEY][-1],
        *signature[_KEY + 2 : _VALUE], signature[_VALUE][-1],
        *signature[_VALUE + 2 : last],
    )  # fmt: skip
