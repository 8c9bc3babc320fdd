"""Key caches that grow: plans for signatures that are known but for the number of keys.

Every token of a decoder brings a signature of its own, whose arguments were checked with the tokens before.
What is new is the number of keys and the strides: a kernel is chosen and bound for them, and nothing else is
asked again. So a token costs half of what an unknown signature does.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ..choice.select import choose
from ..library.structs import Params
from ..problem import Causal, Problem
from .launch import Plan, strides
from .operands import INT32_MAX, is_aligned

if TYPE_CHECKING:
    from .plan_cache import Signature
    from .planning import Prepared

_MAX_CACHES = 64
_write_strides = struct.Struct("6q").pack_into  # of key and value; ctypes' arrays would cost 1 µs more
_OF_QUERY = slice(0, 6)  # of a plain call's signature, with the type of key
_QUERY_SHAPE, _KEY_SHAPE, _VALUE_SHAPE = 1, 6, 11
_BETWEEN = slice(8, 11)  # dtype and device of key, the type of value
_OPTIONS = slice(13, None)  # dtype and device of value, the options
_FAMILY, _CAUSAL, _KERNEL = 15, 16, 20
_WHOLE = (None, *Causal)  # what `causal` says of a problem that is no shard

assert Params.v_stride.offset == Params.k_stride.offset + Params.k_stride.size


_known: dict[Signature, Prepared] = {}  # by all of a signature but seqlen_k and the strides of key and value


def keep(signature: Signature | None, prepared: Prepared | None) -> None:
    """Lets other numbers of keys take after a plain call.

    Not where out is given or anything is broadcast, nor after a shard: its mask may hide none of these keys.
    """
    if signature is None or prepared is None or signature[-1] is not None or signature[_CAUSAL] not in _WHOLE:
        return
    problem = prepared.plan.problem
    sizes = problem.batch, problem.num_heads_kv, problem.seqlen_k
    of_query, of_key, of_value = signature[_QUERY_SHAPE], signature[_KEY_SHAPE], signature[_VALUE_SHAPE]
    is_whole = of_query[:-2] == (problem.batch, problem.num_heads_q) and of_key[:-1] == of_value[:-1] == sizes
    if is_whole:
        if len(_known) >= _MAX_CACHES:
            _known.clear()
        _known[_without_keys(signature)] = prepared


def plan_next(signature: Signature) -> Prepared | None:
    """A plan for the tensors of `signature`, if one is known that differs in the number of keys alone.

    Their addresses are multiples of 16 bytes.
    """
    of_key, of_value = signature[_KEY_SHAPE], signature[_VALUE_SHAPE]
    known = _known.get(_without_keys(signature)) if len(of_key) == len(of_value) == 4 else None
    if known is None:
        return None
    seqlen_k = of_key[2]
    if seqlen_k != of_value[2] or not 0 < seqlen_k <= INT32_MAX:
        return None
    stride_of_key, stride_of_value = signature[_KEY_SHAPE + 1], signature[_VALUE_SHAPE + 1]
    if not is_aligned(stride_of_key) or not is_aligned(stride_of_value):
        return None
    plan, other = known.plan, known.plan.problem
    problem = Problem(
        dtype=other.dtype,
        batch=other.batch,
        num_heads_q=other.num_heads_q,
        num_heads_kv=other.num_heads_kv,
        seqlen_q=other.seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=other.head_dim,
        head_dim_v=other.head_dim_v,
        causal=other.causal,
    )
    image = bytearray(plan.params)
    _write_strides(
        image, Params.k_stride.offset, *strides(of_key, stride_of_key), *strides(of_value, stride_of_value)
    )
    params = Params.from_buffer(image)
    params.seqlen_k = seqlen_k
    params.causal_offset = problem.causal_offset
    choice = choose(plan.library, problem, signature[_FAMILY], plan.device, params, name=signature[_KERNEL])
    params.num_splits = choice.num_splits
    return known._replace(plan=Plan(plan.library, choice.kernel, problem, params, plan.device))


def _without_keys(signature: Signature) -> tuple[Any, ...]:
    of_key, of_value = signature[_KEY_SHAPE], signature[_VALUE_SHAPE]
    return (
        *signature[_OF_QUERY], of_key[0], of_key[1], of_key[3],
        *signature[_BETWEEN], of_value[0], of_value[1], of_value[3],
        *signature[_OPTIONS],
    )  # fmt: skip
