"""What native/call_table.c has to know of a signature, so that its next call is a compiled one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..library import launcher
from ..library.registry import Family, Precision
from ..problem import Causal
from . import outputs, rng
from .operands import Layout

if TYPE_CHECKING:
    import torch

    from .planning import Prepared

table: Any = None
"""The CallTable of the latest signatures, from the first one on."""

_IMMUTABLE = frozenset({type(None), bool, int, float, str, tuple, Causal, Family, Layout, Precision})
"""Types of options that say the same whenever they are the same object; the tuple is a checked window."""

_OPTIONS = 9  # those that every call has, before its tensors
_TENSORS = 10  # query, key, value, out, attn_mask, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, sinks
_BOUNDS = 2  # max_seqlen_q, max_seqlen_k

_latest: Prepared | None = None  # of `add`


def add(prepared: Prepared, *arguments: Any) -> None:
    """Makes a signature known, where there is a launcher for its plan. `arguments`: as in CallTable.call."""
    global table, _latest
    launch = prepared.plan.launcher
    if launch is None or prepared.casts_mask or prepared is _latest:
        return
    _latest = prepared  # nothing is gained by adding it again: some calls have to be checked in Python
    arguments += (None,) * (_OPTIONS + _TENSORS + _BOUNDS - len(arguments))
    tensors = arguments[_OPTIONS : _OPTIONS + _TENSORS]
    options = arguments[:_OPTIONS] + arguments[_OPTIONS + _TENSORS :]
    if not all(type(option) in _IMMUTABLE for option in options):
        return
    if table is None:
        module = launcher.module()
        assert module is not None
        table = module.CallTable()
    make_out: Callable[..., torch.Tensor] = prepared.empty_like
    draw = None
    if prepared.out_stride is not None:
        make_out = functools.partial(_empty_strided, prepared.out_shape, prepared.out_stride)
    if prepared.p_dropout:
        draw = functools.partial(rng.draw, tensors[0].device)
    spans = tuple(0 if tensor is None else outputs.span(tensor) for tensor in tensors)
    table.add(launch, arguments, make_out, prepared.make_lse, draw, rng.NO_PHILOX, spans)


def _empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty_strided(shape, stride)
