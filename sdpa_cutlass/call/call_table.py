"""What native/call_table.c has to know of a signature, so that its next call is a compiled one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..library import launcher
from ..library.registry import Family, Precision
from ..problem import Causal
from . import outputs, rng
from .arguments import Inputs, Options
from .operands import Layout

if TYPE_CHECKING:
    import torch

    from .planning import Prepared

table: Any = None
"""The CallTable of the latest signatures, from the first one on."""

_IMMUTABLE = frozenset({type(None), bool, int, float, str, tuple, Causal, Family, Layout, Precision})
"""Types of options that say the same whenever they are the same object; the tuple is a checked window."""

latest: Prepared | None = None
"""What `add` was last given. Adding it again gains nothing: some calls have to be checked in Python."""


def add(prepared: Prepared, options: Options, inputs: Inputs) -> None:
    """Makes a signature known, where there is a launcher for its plan."""
    global table, latest
    latest = prepared
    launch = prepared.plan.launcher
    if launch is None or prepared.casts_mask or prepared.copied_mask is not None:
        return
    # In the order of CallTable.call, which draws random bits itself.
    tensors = (*inputs[:9], inputs.sinks)
    bounds = (inputs.max_seqlen_q, inputs.max_seqlen_k)
    if not all(type(option) in _IMMUTABLE for option in (*options, *bounds)):
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
    table.add(launch, (*options, *tensors, *bounds), make_out, prepared.make_lse, draw, rng.NO_PHILOX, spans)


def _empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty_strided(shape, stride)
