"""Other sizes of known calls: plans for signatures that are known but for sizes and strides.

Every token of a decoder brings a signature of its own, and so does every prompt. What does not depend on
sizes was checked with the calls before; the sizes are compared, a kernel is chosen and bound for them, and
nothing else is asked again. So a token costs half of what an unknown signature does.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

from ..choice.select import choose
from ..library.structs import Params
from ..problem import Causal
from .checks import sizes_agree
from .launch import Plan, strides
from .operands import is_aligned

if TYPE_CHECKING:
    import torch

    from .plan_cache import Signature
    from .planning import Prepared

_MAX_KNOWN = 64
# ctypes' arrays and fields would cost 1 µs more
_write_sizes = struct.Struct("5i").pack_into  # from batch on
_write_strides = struct.Struct("6q").pack_into  # of key and value
_write_all_strides = struct.Struct("14q").pack_into  # of query, key, value, out and softmax_lse
# A plain call's signature.
_QUERY_SHAPE, _KEY_SHAPE, _VALUE_SHAPE = 1, 6, 11
_OF_QUERY = slice(_QUERY_SHAPE, _QUERY_SHAPE + 2)  # shape and strides
_AFTER_QUERY = slice(3, 6)  # dtype and device of query, the type of key
_AFTER_KEY = slice(8, 11)  # dtype and device of key, the type of value
_OPTIONS = slice(13, None)  # dtype and device of value, the options
_FAMILY, _CAUSAL, _ENABLE_GQA, _KERNEL = 15, 16, 19, 20
_WHOLE = (None, *Causal)  # what `causal` says of a problem that is no shard

assert [name for name, *_ in Params._fields_[2:7]] == [
    "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k",
]  # fmt: skip
assert Params.mask.offset - Params.q_stride.offset == 14 * 8


_known: dict[tuple[Any, ...], tuple[Signature, Prepared]] = {}
"""The latest call, by all of its signature but sizes and strides."""


def keep(signature: Signature | None, prepared: Prepared | None) -> None:
    """Lets calls of other sizes take after a plain call.

    Not where out is given or query is broadcast, nor after a shard: its mask may hide none of these keys.
    """
    if signature is None or prepared is None or signature[-1] is not None or signature[_CAUSAL] not in _WHOLE:
        return
    problem = prepared.plan.problem
    is_whole = signature[_QUERY_SHAPE][:-2] == (problem.batch, problem.num_heads_q)
    if is_whole and len(signature[_KEY_SHAPE]) == len(signature[_VALUE_SHAPE]) == 4:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[_without_sizes(signature)] = signature, prepared


def plan_next(
    signature: Signature, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Prepared | None:
    """A plan for these tensors, of `signature`, if one is known that differs in sizes and strides alone.

    They have memory, at multiples of 16 bytes.
    """
    of_query, of_key, of_value = signature[_QUERY_SHAPE], signature[_KEY_SHAPE], signature[_VALUE_SHAPE]
    if not len(of_query) == len(of_key) == len(of_value) == 4:
        return None
    kind = _without_sizes(signature)
    found = _known.get(kind)
    if found is None or not sizes_agree(of_query, of_key, of_value, signature[_ENABLE_GQA]):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    stride_of_key, stride_of_value = signature[_KEY_SHAPE + 1], signature[_VALUE_SHAPE + 1]
    if not is_aligned(stride_of_key) or not is_aligned(stride_of_value):
        return None
    latest, known = found
    plan = known.plan
    batch, heads_q, seqlen_q, _ = of_query
    sizes = batch, heads_q, of_key[1], seqlen_q, of_key[2]
    problem = plan.problem.resized(*sizes)
    if problem.is_empty:
        return None
    image = bytearray(plan.params)
    _write_sizes(image, Params.batch.offset, *sizes)
    of_keys = *strides(of_key, stride_of_key), *strides(of_value, stride_of_value)
    if latest[_OF_QUERY] == signature[_OF_QUERY]:  # so are those of the results
        _write_strides(image, Params.k_stride.offset, *of_keys)
    else:
        stride_of_query = signature[_QUERY_SHAPE + 1]
        if known.out_stride is not None or not is_aligned(stride_of_query):
            return None
        out_stride = known.empty_like(query).stride()
        if out_stride[3] != 1:
            return None
        _write_all_strides(
            image,
            Params.q_stride.offset,
            *strides(of_query, stride_of_query),
            *of_keys,
            *strides(of_query, out_stride),
            heads_q * seqlen_q,
            seqlen_q,
        )
        known = known._replace(out_shape=tuple(of_query), make_lse=_resized(known.make_lse, of_query[:3]))
    params = Params.from_buffer(image)
    params.causal_offset = problem.causal_offset
    choice = choose(plan.library, problem, signature[_FAMILY], plan.device, params, name=signature[_KERNEL])
    params.num_splits = choice.num_splits
    made = known._replace(plan=Plan(plan.library, choice.kernel, problem, params, plan.device))
    _known[kind] = signature, made
    return made


def _resized(make_lse: Any, shape: tuple[int, ...]) -> Any:
    """What makes a softmax_lse [B, Hq, Sq] as `make_lse` makes one of another size."""
    if make_lse is None:
        return None
    _, heads, rows = shape
    return functools.partial(make_lse.func, tuple(shape), (heads * rows, rows, 1))


def _without_sizes(signature: Signature) -> tuple[Any, ...]:
    return (
        signature[0], signature[_QUERY_SHAPE][3], *signature[_AFTER_QUERY],
        signature[_KEY_SHAPE][3], *signature[_AFTER_KEY], signature[_VALUE_SHAPE][3], *signature[_OPTIONS],
    )  # fmt: skip
