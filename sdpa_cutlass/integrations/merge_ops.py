"""torch.ops.sdpa_cutlass.merge_states: `sdpa_cutlass.merge_states` as a torch operator.

    merge_states(outs, lses, sinks=None, *, out_dtype=None, stacked=False) -> (out, lse)

`outs` and `lses` are lists of tensors; with `stacked`, each has one, with the parts along its first
dimension. torch.compile, torch.export and FakeTensor see this operator where the public function is called.
It has no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call import merging, torch_inputs
from .operators import as_traced, define

_SCHEMA = (
    "(Tensor[] outs, Tensor[] lses, Tensor? sinks=None, *, ScalarType? out_dtype=None, bool stacked=False) "
    "-> (Tensor, Tensor)"
)


def _read(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    stacked: bool = False,
) -> merging.Parts:
    if stacked:
        return merging.read(outs[0], lses[0], sinks, out_dtype)
    return merging.read(list(outs), list(lses), sinks, out_dtype)


def _merge(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    parts = _read(*args, **options)
    torch_inputs.needs_dispatcher(parts.named(), is_operator=True)
    return merging.run(parts)


def _fake_merge(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of `_merge`, and every error that does not need data or a library."""
    parts = _read(*args, **options)
    merging.check(parts, allow_meta=True)
    return merging.empty_results(parts)


define("merge_states", _SCHEMA, _merge, _fake_merge)


def _traced(given: Any) -> Any:
    return [as_traced(value) for value in given] if isinstance(given, (list, tuple)) else as_traced(given)


def traced(outs: Any, lses: Any, sinks: Any, out_dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` as a call of the operator: what torch.compile traces instead."""
    parts = merging.read(_traced(outs), _traced(lses), as_traced(sinks), out_dtype)
    op = torch.ops.sdpa_cutlass.merge_states
    out, lse = op(
        list(parts.outs), list(parts.lses), parts.sinks, out_dtype=out_dtype, stacked=parts.is_stacked
    )
    return out, lse
