"""Merging partial results: arguments → checked parts → launch of a kernel of the family `combine`.

Parts are tensors [..., heads, seqlen_q, head_dim] of one shape, in a list, or one tensor that has them along
a leading dimension. Kernels read them in place, each with its own strides. A list longer than a launch can
hold is copied into one tensor first.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arrays.tensors import as_tensor
from ..choice.legal import unsupported
from ..errors import ArgumentError, ArgumentTypeError, NoKernelError
from ..library.abi import Library
from ..library.device import DeviceInfo, stream_getter
from ..library.locate import Target
from ..library.registry import KernelInfo, Op, dtype_code, read_kernels
from ..library.structs import MAX_LISTED_PARTS, MergeParams, MergePart
from ..problem import DType
from .launch import library_for
from .operands import INT32_MAX, check_no_grad, dtype_name

if TYPE_CHECKING:
    import torch

_DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16, "float32": DType.F32}
_ALLOWED_DTYPES = "torch.float16, torch.bfloat16 and torch.float32"
_SINK_DTYPES = (*_DTYPES, "float64")
_VECTOR = 8  # columns of a thread
_ALIGNMENT = 16  # bytes of one load


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Checked partial results, as the caller wrote them."""

    outs: tuple[torch.Tensor, ...]  # [..., heads, seqlen_q, head_dim] each
    lses: tuple[torch.Tensor, ...]
    is_stacked: bool  # one tensor, with the parts along its first dimension
    sinks: torch.Tensor | None
    out_dtype: torch.dtype

    @property
    def num_parts(self) -> int:
        """How many partial results there are."""
        return self.outs[0].shape[0] if self.is_stacked else len(self.outs)

    @property
    def first(self) -> torch.Tensor:
        """The first part's out, for its shape and layout."""
        return self.outs[0][0] if self.is_stacked else self.outs[0]

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor by the name that messages give it."""
        found = _named("outs", self.outs, is_stacked=self.is_stacked)
        found |= _named("lses", self.lses, is_stacked=self.is_stacked)
        return found if self.sinks is None else found | {"sinks": self.sinks}


def read(outs: Any, lses: Any, sinks: Any, out_dtype: Any) -> Parts:
    """The arguments of `merge_states` as tensors, with what is wrong about their form refused.

    `outs` and `lses` are both sequences, or both tensors. Raises ArgumentTypeError and ArgumentError.
    """
    is_stacked = not isinstance(outs, (list, tuple))
    if is_stacked == isinstance(lses, (list, tuple)):
        raise ArgumentTypeError(
            f"outs is a {type(outs).__name__} and lses a {type(lses).__name__}; allowed are two lists or "
            "tuples, or two tensors with the parts along the first dimension"
        )
    tensors = [
        tuple(as_tensor(label, value) for label, value in _named(name, given, is_stacked=is_stacked).items())
        for name, given in (("outs", outs), ("lses", lses))
    ]
    if not is_stacked and len(outs) != len(lses):
        raise ArgumentError(f"lses has {len(lses)} parts; outs has {len(outs)}")
    if not tensors[0]:
        raise ArgumentError("outs is empty; allowed is at least one part")
    torch = sys.modules["torch"]
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ArgumentTypeError(
            f"out_dtype={out_dtype!r} is a {type(out_dtype).__name__}; allowed are {_ALLOWED_DTYPES}"
        )
    dtype = tensors[0][0].dtype if out_dtype is None else out_dtype
    return Parts(
        outs=tensors[0],
        lses=tensors[1],
        is_stacked=is_stacked,
        sinks=None if sinks is None else as_tensor("sinks", sinks),
        out_dtype=dtype,
    )


def check(parts: Parts, *, allow_meta: bool = False) -> None:
    """Types, devices and shapes: all that tracing can see. Raises the package's errors."""
    named = parts.named()
    check_no_grad(named)
    devices = ("cpu", "cuda", "meta") if allow_meta else ("cpu", "cuda")
    first = parts.outs[0]
    for name, tensor in named.items():
        if str(tensor.layout) != "torch.strided":
            raise ArgumentTypeError(f"{name} has layout {tensor.layout}; allowed is torch.strided")
        if tensor.device.type not in devices:
            raise ArgumentTypeError(f"{name} is on {tensor.device}; allowed are CPU and CUDA tensors")
        if tensor.device != first.device:
            main = next(iter(named))
            raise ArgumentTypeError(
                f"{name} is on {tensor.device}; {main} is on {first.device}: all must share one device"
            )
    if str(parts.out_dtype).removeprefix("torch.") not in _DTYPES:
        what = "outs has dtype" if parts.out_dtype == first.dtype else "out_dtype is"
        raise ArgumentTypeError(f"{what} {parts.out_dtype}; allowed are {_ALLOWED_DTYPES}")
    for name, tensor in _named("outs", parts.outs, is_stacked=parts.is_stacked).items():
        _check_out(name, tensor, parts)
    lse_names = _named("lses", parts.lses, is_stacked=parts.is_stacked)
    for (name, tensor), out in zip(lse_names.items(), parts.outs, strict=True):
        if dtype_name(tensor) != "float32":
            raise ArgumentTypeError(f"{name} has dtype {tensor.dtype}; allowed is torch.float32")
        if tuple(tensor.shape) != tuple(out.shape[:-1]):
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}; allowed is {tuple(out.shape[:-1])}: its out has "
                f"{tuple(out.shape)}"
            )
    if parts.sinks is not None:
        _check_sinks(parts.sinks, parts.first)


def _check_out(name: str, tensor: torch.Tensor, parts: Parts) -> None:
    """One tensor of outs."""
    first = parts.outs[0]
    if dtype_name(tensor) not in _DTYPES:
        raise ArgumentTypeError(f"{name} has dtype {tensor.dtype}; allowed are {_ALLOWED_DTYPES}")
    if tensor.dtype != first.dtype:
        raise ArgumentTypeError(
            f"{name} has dtype {tensor.dtype}; outs[0] has {first.dtype}: all must be the same"
        )
    if tensor.dim() not in ((3, 4, 5) if parts.is_stacked else (2, 3, 4)):
        form = "[batch, heads, seqlen_q, head_dim]"
        allowed = f"parts + {form}" if parts.is_stacked else form
        raise ArgumentError(
            f"{name} has shape {tuple(tensor.shape)}; allowed is {allowed}, without batch, or without batch "
            "and heads"
        )
    if tuple(tensor.shape) != tuple(first.shape):
        raise ArgumentError(
            f"{name} has shape {tuple(tensor.shape)}; outs[0] has {tuple(first.shape)}: all must be the same"
        )
    if parts.is_stacked and tensor.shape[0] == 0:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed is at least one part")
    head_dim = tensor.shape[-1]
    if head_dim == 0 or head_dim % _VECTOR:
        raise ArgumentError(
            f"{name} has head_dim {head_dim} (its last dimension); allowed are multiples of {_VECTOR}"
        )
    for size in tensor.shape:
        if size > INT32_MAX:
            raise ArgumentError(f"{name} has a dimension of {size}; allowed are up to {INT32_MAX}")


def _check_sinks(sinks: torch.Tensor, part: torch.Tensor) -> None:
    if dtype_name(sinks) not in _SINK_DTYPES:
        raise ArgumentTypeError(f"sinks has dtype {sinks.dtype}; allowed are {', '.join(_SINK_DTYPES)}")
    heads = part.shape[-3] if part.dim() > 2 else 1
    if tuple(sinks.shape) != (heads,):
        raise ArgumentError(
            f"sinks has shape {tuple(sinks.shape)}; allowed is ({heads},), one logit for each head"
        )


def empty_results(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """out, laid out as the first part is where that is dense, and lse [..., heads, seqlen_q] float32."""
    torch, first = sys.modules["torch"], parts.first
    out = torch.empty_like(first, dtype=parts.out_dtype)
    if out.stride(-1) != 1:
        out = first.new_empty(first.shape, dtype=parts.out_dtype)
    return out, first.new_empty(first.shape[:-1], dtype=torch.float32)


def run(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks everything and merges: out in `out_dtype` and lse."""
    check(parts)
    parts = _without_negative_bit(parts)
    out, lse = empty_results(parts)
    if not out.numel():
        return out, lse
    _check_all_readable(parts)
    library, device = library_for(out)
    kernel = _kernel(library, device, _DTYPES[dtype_name(parts.outs[0])], out.shape[-1])
    if len(parts.outs) > MAX_LISTED_PARTS:
        parts = _stacked(parts)
    sinks = None if parts.sinks is None else parts.sinks.to(sys.modules["torch"].float32)
    stream = stream_getter()(device.index) if device.target is Target.CUDA else None
    params = _params(parts, sinks, out, lse)
    library.merge_states(kernel.index, params, device.index, stream)
    return out, lse


def check_readable(parts: Parts) -> None:
    """Raises what `run` would raise before its launch, but for a missing kernel."""
    check(parts)
    if parts.first.numel():
        _check_all_readable(parts)


def _check_all_readable(parts: Parts) -> None:
    for name, tensor in _named("outs", parts.outs, is_stacked=parts.is_stacked).items():
        _check_readable(name, tensor)


def _params(parts: Parts, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> MergeParams:
    """The C struct. It holds addresses: the tensors have to stay until the launch."""
    part = parts.first
    batch, heads, rows = _four_dimensional(part)[:3]
    listed = (MergePart * len(parts.outs))()
    moved = 1 if parts.is_stacked else 0  # dimensions before those of a part
    for entry, part_out, part_lse in zip(listed, parts.outs, parts.lses, strict=True):
        entry.out, entry.lse = part_out.data_ptr(), part_lse.data_ptr()
        entry.out_stride = _strides(part_out.stride()[moved:-1])
        entry.lse_stride = _strides(part_lse.stride()[moved:])
    return MergeParams(
        struct_size=ctypes.sizeof(MergeParams),
        dtype=dtype_code(_DTYPES[dtype_name(part)]),
        out_dtype=dtype_code(_DTYPES[dtype_name(out)]),
        num_parts=parts.num_parts,
        num_listed=len(parts.outs),
        batch=batch,
        num_heads=heads,
        seqlen_q=rows,
        head_dim=part.shape[-1],
        parts=listed,
        out_part_stride=parts.outs[0].stride(0) if parts.is_stacked else 0,
        lse_part_stride=parts.lses[0].stride(0) if parts.is_stacked else 0,
        sinks=None if sinks is None else sinks.data_ptr(),
        sink_stride=0 if sinks is None else sinks.stride(0),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        out_stride=_strides(out.stride()[:-1]),
    )


def _named(name: str, given: Any, *, is_stacked: bool) -> dict[str, Any]:
    """Tensors by their names in messages."""
    if is_stacked:
        return {name: given[0] if isinstance(given, tuple) else given}
    return {f"{name}[{i}]": value for i, value in enumerate(given)}


def _four_dimensional(part: torch.Tensor) -> tuple[int, ...]:
    return (1,) * (4 - part.dim()) + tuple(part.shape)


def _strides(strides: Sequence[int]) -> tuple[int, ...]:
    """Those of batch, head and row; 0 for what the caller left out."""
    return (0,) * (3 - len(strides)) + tuple(strides)


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError for what kernels cannot read 16 bytes at a time."""
    *strides, last = tensor.stride()
    if last != 1:
        raise ArgumentError(f"{name} has last stride {last}; allowed is 1")
    elements = _ALIGNMENT // tensor.itemsize
    if any(size > 1 and stride % elements for size, stride in zip(tensor.shape, strides, strict=False)):
        raise ArgumentError(
            f"{name} has strides {tensor.stride()}; all but the last must be multiples of {elements} elements"
        )
    if tensor.data_ptr() % _ALIGNMENT:
        raise ArgumentError(
            f"{name} starts at address {tensor.data_ptr():#x}; it must be a multiple of {_ALIGNMENT}"
        )


def _without_negative_bit(parts: Parts) -> Parts:
    """Copies in place of views whose memory holds the negatives of their values."""
    if not any(tensor.is_neg() for tensor in parts.named().values()):
        return parts
    return Parts(
        outs=tuple(tensor.resolve_neg() for tensor in parts.outs),
        lses=tuple(tensor.resolve_neg() for tensor in parts.lses),
        is_stacked=parts.is_stacked,
        sinks=None if parts.sinks is None else parts.sinks.resolve_neg(),
        out_dtype=parts.out_dtype,
    )


def _stacked(parts: Parts) -> Parts:
    """A list as one tensor."""
    stack = sys.modules["torch"].stack
    return Parts(
        outs=(stack(parts.outs),),
        lses=(stack(parts.lses),),
        is_stacked=True,
        sinks=parts.sinks,
        out_dtype=parts.out_dtype,
    )


@functools.cache
def _kernel(library: Library, device: DeviceInfo, dtype: DType, head_dim: int) -> KernelInfo:
    """The kernel for parts of `dtype`. Raises NoKernelError."""
    rows = [row for row in read_kernels(library) if row.op is Op.MERGE and row.dtype is dtype]
    reason = f"the library at {library.path} has no kernel that merges {dtype.value}"
    for row in sorted(rows, key=lambda row: (row.head_dim, row.name)):
        found = unsupported(row, library, device)
        if row.head_dim < head_dim:
            found = f"takes head_dim up to {row.head_dim}, and outs has {head_dim}"
        if found is None:
            return row
        reason = f"{row.name} {found}"
    raise NoKernelError(f"no kernel can merge these parts: {reason}")
