"""Argument checks and canonical form: tensors as torch accepts them → 4-D tensors as the kernels take them.

Ranks from 2 up, broadcast leading dimensions and [B, S, H, D] become views of the form that operands.py
describes. Every error names argument, value and what is allowed. Nothing here knows about kernels or
libraries; results are in outputs.py, masks and lengths in extras.py.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arrays.tensors import is_tensor
from ..errors import ArgumentError, ArgumentTypeError
from ..problem import NO_MASK, Causal, DType, MaskReading, Problem
from . import shard
from .operands import INT32_MAX, Layout, Operands, at_least_rank, check_no_grad, dtype_name, padded

if TYPE_CHECKING:
    import torch

    from .extras import Extras

DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16}
_LAYOUTS: dict[str, Layout] = {layout.value: layout for layout in Layout}
_FLOAT32_MAX = 3.4028234663852886e38


def canonical_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    enable_gqa: bool,
    allow_meta: bool = False,
    layout: Layout = Layout.BHSD,
) -> Operands:
    """Checks q, k and v and gives them four dimensions, as views wherever strides allow it.

    Sizes may be symbolic, and with `allow_meta` the tensors may be without data: tracing comes here too.
    """
    devices = ("cpu", "cuda", "meta") if allow_meta else ("cpu", "cuda")
    check_form("query", query, query, devices)
    if not allow_meta and (found := _operands_of_rank_4(query, key, value, enable_gqa, layout)):
        return found
    tensors = {"query": query, "key": key, "value": value}
    _check_types(tensors, devices, layout)
    q, k, v = query, key, value
    head_dim, rows = q.shape[-1], layout.seqlen_dim
    if k.shape[-1] != head_dim:
        raise ArgumentError(f"key has head_dim {k.shape[-1]} (its last dimension); query has {head_dim}")
    if k.shape[rows] != v.shape[rows]:
        raise ArgumentError(f"value has seqlen {v.shape[rows]} (dimension {rows}); key has {k.shape[rows]}")
    rank = max(q.dim(), k.dim(), v.dim())
    padded = [layout.swapped(at_least_rank(tensor, max(rank, 4))) for tensor in (q, k, v)]
    batch_shape = _broadcast_batch(tensors, [tensor.shape[:-3] for tensor in padded])
    heads_q, heads_kv = _broadcast_heads(
        *(tensor.shape[-3] for tensor in padded), enable_gqa=enable_gqa, dim=layout.heads_dim
    )

    def four_dimensional(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        shape = (*batch_shape, heads, *tensor.shape[-2:])
        if tensor.shape != shape:
            tensor = tensor.expand(shape)
        return tensor if rank <= 4 else tensor.reshape(math.prod(batch_shape), *shape[-3:])

    shaped = [four_dimensional(*pair) for pair in zip(padded, (heads_q, heads_kv, heads_kv), strict=True)]
    for tensor in shaped:
        for size in tensor.shape:  # not max(): comparing symbolic sizes with each other would specialise
            if size > INT32_MAX:
                raise ArgumentError(f"a dimension of {size} is longer than the largest allowed, {INT32_MAX}")
    return Operands(shaped[0], shaped[1], shaped[2], batch_shape, rank, layout)


def _operands_of_rank_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool, layout: Layout
) -> Operands | None:
    """What most calls come to, in a third of the time: nothing to refuse, to broadcast or to merge.

    None says nothing about the call: all of it has to be looked at then.
    """
    if not q.dim() == k.dim() == v.dim() == 4 or q.requires_grad or k.requires_grad or v.requires_grad:
        return None
    form = q.layout, q.device, q.dtype
    if (k.layout, k.device, k.dtype) != form or (v.layout, v.device, v.dtype) != form:
        return None
    if layout is not Layout.BHSD:
        q, k, v = layout.swapped(q), layout.swapped(k), layout.swapped(v)
    if not sizes_agree(q.shape, k.shape, v.shape, enable_gqa):
        return None
    return Operands(q, k, v, (q.shape[0],), 4, layout)


def sizes_agree(of_q: Sequence[int], of_k: Sequence[int], of_v: Sequence[int], enable_gqa: bool) -> bool:
    """Whether these sizes [B, H, S, D] are those of one problem, with nothing to broadcast or to refuse."""
    heads_q, heads_kv = of_q[1], of_k[1]
    is_grouped = heads_q == heads_kv or (enable_gqa and heads_kv > 0 and heads_q % heads_kv == 0)
    agree = of_k[:3] == of_v[:3] and of_k[0] == of_q[0] and of_k[3] == of_q[3]
    return is_grouped and agree and max(*of_q, *of_k, of_v[3]) <= INT32_MAX


def problem_of(
    operands: Operands,
    causal: Causal | None,
    extras: Extras | None = None,
    window: tuple[int, int] | None = None,
    diagonal: int | None = None,
    reading: MaskReading = NO_MASK,
) -> Problem:
    """Sizes, dtype and mask of canonical operands, whose head dimensions count as they are once loadable."""
    batch, num_heads_q, seqlen_q, head_dim = operands.query.shape
    _, num_heads_kv, seqlen_k, head_dim_v = operands.value.shape
    return Problem(
        dtype=DTYPES[dtype_name(operands.query)],
        batch=batch,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=padded(head_dim),
        causal=causal,
        head_dim_v=padded(head_dim_v),
        mask=extras.mask_type if extras else None,
        mask_alignment=reading.alignment,
        mask_elements=reading.elements,
        mask_has_one_row=reading.has_one_row,
        has_dropout=extras is not None and extras.p_dropout > 0,
        has_lengths=extras is not None and extras.has_lengths,
        window=window,
        has_sinks=extras is not None and extras.sinks is not None,
        diagonal=diagonal,
    )


def causal_alignment(causal: object) -> Causal | None:
    """`causal` as the enum. Raises ArgumentError for anything but None, a Causal or its value."""
    if causal is None or isinstance(causal, Causal):
        return causal
    try:
        return Causal(causal)
    except ValueError:
        allowed = "None, 'top_left' or 'bottom_right'"
        raise ArgumentError(f"causal={causal!r}; allowed is {allowed}") from None


def alignment(causal: object) -> tuple[Causal | None, int | None]:
    """What the option `causal` says: the causal mask, and the diagonal of a shard (see shard.py)."""
    return shard.read(causal) or (causal_alignment(causal), None)


def tensor_layout(layout: object) -> Layout:
    """`layout` as the enum. Raises ArgumentError."""
    found = _LAYOUTS.get(layout) if isinstance(layout, str) else None
    if found is None:
        raise ArgumentError(
            f"layout={layout!r}; allowed are 'bhsd' ([..., heads, seqlen, head_dim]) and 'bshd'"
        )
    return found


def softmax_scale(scale: object, head_dim: int) -> float:
    """`scale`, or 1/sqrt(head_dim) for None. Any finite float32 value is allowed, 0 and negative ones too."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ArgumentTypeError(f"scale={scale!r} is a {type(scale).__name__}; allowed is a float or None")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not abs(value) <= _FLOAT32_MAX:
        raise ArgumentError(f"scale={scale!r}; allowed is any finite float32 value")
    return value


def autocast_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floating-point inputs in the dtype of an enabled torch.autocast.

    As in torch, float64 stays. Unlike in torch, so do inputs that share a dtype which kernels take.
    """
    if query.dtype == key.dtype == value.dtype and dtype_name(query) in DTYPES:
        return query, key, value
    device_type = query.device.type
    if not is_tensor(query) or device_type not in ("cpu", "cuda"):
        return query, key, value
    if not sys.modules["torch"].is_autocast_enabled(device_type):
        return query, key, value
    dtype = sys.modules["torch"].get_autocast_dtype(device_type)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and str(tensor.dtype) != "torch.float64"
        return tensor.to(dtype) if eligible and tensor.device.type == device_type else tensor

    return cast(query), cast(key), cast(value)


def _check_types(tensors: dict[str, torch.Tensor], devices: tuple[str, ...], layout: Layout) -> None:
    """What of the form of tensors keeps kernels from them; that of query was checked."""
    q = tensors["query"]
    form = q.layout, q.device, q.dtype
    least = 2 if layout is Layout.BHSD else 3
    for name, tensor in tensors.items():
        if (tensor.layout, tensor.device, tensor.dtype) != form:
            check_form(name, tensor, q, devices)
        if len(tensor.shape) < least:
            allowed = (
                "[..., heads, seqlen, head_dim], [batch, seqlen, head_dim] and [seqlen, head_dim]"
                if layout is Layout.BHSD
                else "[..., seqlen, heads, head_dim] with layout='bshd'"
            )
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed are {allowed}")
    check_no_grad(tensors)


def check_form(
    name: str, tensor: torch.Tensor, other: torch.Tensor, devices: tuple[str, ...], *, of: str = "query"
) -> None:
    """Raises ArgumentTypeError unless `tensor` is strided and has device and dtype of `other`, both allowed.

    `of` is what an error calls `other`.
    """
    if str(tensor.layout) != "torch.strided":
        raise ArgumentTypeError(f"{name} has layout {tensor.layout}; allowed is torch.strided")
    if tensor.device.type not in devices:
        raise ArgumentTypeError(f"{name} is on {tensor.device}; allowed are CPU and CUDA tensors")
    if tensor.device != other.device:
        raise ArgumentTypeError(
            f"{name} is on {tensor.device}; {of} is on {other.device}: all must share one device"
        )
    if dtype_name(tensor) not in DTYPES:
        allowed = "torch.float16 and torch.bfloat16"
        raise ArgumentTypeError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}")
    if tensor.dtype != other.dtype:
        raise ArgumentTypeError(
            f"{name} has dtype {tensor.dtype}; {of} has {other.dtype}: all must be the same"
        )


def _broadcast_batch(tensors: dict[str, torch.Tensor], shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    batch = []
    for sizes in zip(*shapes, strict=True):
        longest = 1
        for size in sizes:  # not a set: symbolic sizes have no hash
            if size == 1 or size == longest:
                continue
            if longest != 1:
                found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
                raise ArgumentError(f"the batch dimensions of {found} neither agree nor broadcast")
            longest = size
        batch.append(longest)
    return tuple(batch)


def _broadcast_heads(
    heads_q: int, heads_k: int, heads_v: int, *, enable_gqa: bool, dim: int
) -> tuple[int, int]:
    """(num_heads_q, num_heads_kv) after broadcasting, as torch does it."""
    if heads_k != heads_v and 1 not in (heads_k, heads_v):
        raise ArgumentError(
            f"key has {heads_k} heads (dimension {dim}), value has {heads_v}: they must agree"
        )
    heads_kv = heads_k if heads_v == 1 else heads_v
    if heads_q == heads_kv or (enable_gqa and heads_kv > 0 and heads_q % heads_kv == 0):
        return heads_q, heads_kv
    if 1 in (heads_q, heads_kv):
        return max(heads_q, heads_kv), max(heads_q, heads_kv)
    allowed = (
        f"a divisor of {heads_q}" if enable_gqa else f"{heads_q}, or a divisor of it with enable_gqa=True"
    )
    raise ArgumentError(
        f"key and value have {heads_kv} heads (dimension {dim}), query has {heads_q}; allowed is {allowed}"
    )
