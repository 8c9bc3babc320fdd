"""What a call writes: allocation of out and softmax_lse, and the checks of the caller's `out`."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

from ..arrays.tensors import as_tensor, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from .operands import Operands, misalignment

if TYPE_CHECKING:
    import torch


def empty_out(operands: Operands) -> torch.Tensor:
    """An output [B, Hq, Sq, Dv], laid out as query is where that is dense, else contiguous for the caller."""
    swapped = operands.layout.swapped
    return swapped(_empty_like(swapped(operands.query), operands.head_dim_v))


def _empty_like(query: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    torch = sys.modules["torch"]
    if head_dim_v == query.shape[3]:
        out = torch.empty_like(query)
        if out.stride(3) == 1:
            return out
    batch, second, third, _ = query.shape
    if head_dim_v != query.shape[3] and query.stride(1) < query.stride(2):
        return query.new_empty((batch, third, second, head_dim_v)).transpose(1, 2)
    return query.new_empty((batch, second, third, head_dim_v))


def empty_lse(operands: Operands) -> torch.Tensor:
    """softmax_lse [B, Hq, Sq]."""
    query = operands.query
    return query.new_empty(query.shape[:3], dtype=sys.modules["torch"].float32)


def check_out(out: object, operands: Operands) -> torch.Tensor:
    """`out`, if kernels may write it: the result's shape, query's dtype and device, aligned rows.

    Where the kernel's head_dim is padded, its result is copied into `out`, which may lie anywhere then.
    """
    tensor = check_out_type(out, operands.query, operands.out_shape)
    if operands.head_dim_v % 8 == 0:
        problem = misalignment(tensor)
        if problem:
            raise ArgumentError(f"out {problem}")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(
            f"out has strides {tensor.stride()}: rows of an expanded tensor share their memory"
        )
    return tensor


def check_out_type(out: object, query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`out`, if it is a tensor of the result's shape, dtype and device: all that tracing can see."""
    tensor = as_tensor("out", out, writable=True)
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"out has shape {tuple(tensor.shape)}; the result has {shape}")
    if tensor.dtype != query.dtype:
        raise ArgumentTypeError(f"out has dtype {tensor.dtype}; query has {query.dtype}")
    if tensor.device != query.device:
        raise ArgumentTypeError(f"out is on {tensor.device}; query is on {query.device}")
    if is_tensor(tensor) and tensor.is_neg():
        raise ArgumentError(
            "out has the negative bit (it is a view like x.conj().imag, whose memory holds the negatives); "
            "allowed is memory that holds its values"
        )
    _check_no_grad(tensor)
    return tensor


def check_known_out(out: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """What of `check_out` and `check_no_overlap` a known signature does not say."""
    _check_known(out)
    check_no_overlap(out, inputs)


def check_known_spans(
    out: torch.Tensor, query: int, key: int, value: int, spans: tuple[int, int, int, int]
) -> None:
    """`check_known_out` for callers that have the inputs' addresses, and the spans of all four tensors."""
    query_span, key_span, value_span, out_span = spans
    start = out.data_ptr()
    if start & 15 or out.requires_grad:
        _check_known(out)
    end = start + out_span
    if start < query + query_span and query < end:
        raise _overlap("query")
    if start < key + key_span and key < end:
        raise _overlap("key")
    if start < value + value_span and value < end:
        raise _overlap("value")


def check_no_overlap(out: torch.Tensor, inputs: dict[str, torch.Tensor], written: str = "out") -> None:
    """Raises ArgumentError when `out` may share memory with an input, which other CTAs are still reading."""
    start = out.data_ptr()
    size = span(out)
    for name, tensor in inputs.items():
        address, input_size = tensor.data_ptr(), span(tensor)
        if size and input_size and start < address + input_size and address < start + size:
            raise _overlap(name, written)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return _span(tensor.shape, tensor.stride(), tensor.itemsize)


@functools.lru_cache(maxsize=4096)
def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * itemsize


def _check_known(out: torch.Tensor) -> None:
    if out.data_ptr() & 15:
        raise ArgumentError(f"out {misalignment(out)}")
    _check_no_grad(out)


def _overlap(name: str, written: str = "out") -> ArgumentError:
    return ArgumentError(f"{written} overlaps {name} in memory; it must have memory of its own")


def _check_no_grad(out: torch.Tensor) -> None:
    if out.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise UnsupportedError("out requires grad: writing into it cannot be recorded")
