"""`accumulate` of `attention`: a result over more keys is merged into one that the caller keeps.

The new part comes from a kernel of attention, the merge from one of the family `combine`. The part's output
is rounded to the dtype of query once; the running result may be float32, so it is not rounded at every step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..arrays.tensors import is_tensor
from ..call import merging, torch_hooks
from ..call.checks import tensor_layout
from ..call.operands import Layout, check_no_grad
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from .merge import merge_states

if TYPE_CHECKING:
    import torch

_ALLOWED = "allowed is a pair of tensors (out, softmax_lse), which are updated in place"


def check(
    accumulate: Any,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    layout: Layout | str,
    *,
    out_dtype: Any,
    not_with: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two running results, checked before anything is launched. Raises the package's errors."""
    is_pair = isinstance(accumulate, (tuple, list)) and len(accumulate) == 2
    if not is_pair or not all(map(is_tensor, accumulate)):
        raise ArgumentTypeError(f"accumulate is a {type(accumulate).__name__}; {_ALLOWED}")
    for name, given in not_with.items():
        if given is not None:
            raise ArgumentError(f"{name} is given together with accumulate, which says where results go")
    out, lse = accumulate
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not is_tensor(given):
            raise ArgumentTypeError(
                f"{name} is a {type(given).__name__}; with accumulate, allowed is a tensor"
            )
    if out_dtype is not None and out_dtype != out.dtype:
        raise ArgumentError(f"out_dtype={out_dtype}; accumulate[0] has {out.dtype}: they must be the same")
    torch = sys.modules["torch"]
    if out.dtype not in (torch.float32, query.dtype):
        raise ArgumentTypeError(
            f"accumulate[0] has dtype {out.dtype}; allowed are torch.float32 and that of query, {query.dtype}"
        )
    expected = (*query.shape[:-1], value.shape[-1])
    if tuple(out.shape) != tuple(expected):
        raise ArgumentError(f"accumulate[0] has shape {tuple(out.shape)}; allowed is {tuple(expected)}")
    if not torch_hooks.is_dynamo_compiling():  # there, the operators check the rest
        check_no_grad(
            {"query": query, "key": key, "value": value, "accumulate[0]": out, "accumulate[1]": lse}
            | ({"sinks": sinks} if is_tensor(sinks) else {})
        )
        merging.check_readable(merging.read([_heads_first(out, layout)], [lse], None, None))
    return out, lse


def merge_into(
    accumulated: tuple[torch.Tensor, torch.Tensor],
    part: torch.Tensor,
    part_lse: torch.Tensor,
    layout: Layout | str,
) -> None:
    """Merges attention over other keys into the running results, the part behind them."""
    out, lse = accumulated
    outs = [_heads_first(tensor, layout) for tensor in (out, part.to(out.dtype))]
    merged, merged_lse = merge_states(outs, [lse, part_lse])
    outs[0].copy_(merged)
    lse.copy_(merged_lse)


def refuse_dtype(out_dtype: Any, query: Any) -> None:
    """Raises for an `out_dtype` without `accumulate` that is not query's."""
    if out_dtype != getattr(query, "dtype", None):
        raise UnsupportedError(
            f"out_dtype={out_dtype}; kernels round their output to the dtype of query. With "
            "accumulate=(out, softmax_lse) the running out may be torch.float32, and merge_states(..., "
            "out_dtype=torch.float32) merges parts into one"
        )


def _heads_first(tensor: torch.Tensor, layout: Layout | str) -> torch.Tensor:
    return tensor if tensor_layout(layout) is Layout.BHSD else tensor.transpose(-3, -2)
