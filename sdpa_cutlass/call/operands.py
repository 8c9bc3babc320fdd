"""q, k and v in canonical form, and what kernels ask of a tensor: alignment, memory, dtype, no gradient.

Canonical: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], one device, f16 or bf16; and, once they
are loadable, last stride 1, head dimensions, addresses and the other strides multiples of 16 bytes. checks.py
makes views of that form; what cannot be a view (a misaligned address or stride, a strided last dimension, a
head_dim that is no multiple of 8) becomes a copy (`loadable`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

INT32_MAX = 2**31 - 1  # the largest size of the C ABI
_ALIGNMENT = 16  # bytes that one load moves
_ELEMENTS = _ALIGNMENT // 2


class Layout(str, Enum):
    """The order of dimensions of query, key, value and out: [B, H, S, D] or [B, S, H, D]."""

    BHSD = "bhsd"
    BSHD = "bshd"

    __hash__ = str.__hash__

    @property
    def heads_dim(self) -> int:
        """The dimension that counts heads."""
        return -3 if self is Layout.BHSD else -2

    @property
    def seqlen_dim(self) -> int:
        """The dimension that counts rows."""
        return -2 if self is Layout.BHSD else -3

    def swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` [..., H, S, D] in this order, or one in this order as [..., H, S, D]."""
        return tensor if self is Layout.BHSD else tensor.transpose(-3, -2)


class Operands(NamedTuple):
    """q, k and v as [B, H, S, D]; the other fields say how the caller wrote them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    batch_shape: tuple[int, ...]
    rank: int
    layout: Layout = Layout.BHSD

    @property
    def head_dim_v(self) -> int:
        return self.value.shape[3]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result as the caller sees it."""
        _, heads, rows, _ = self.query.shape
        sizes = (heads, rows) if self.layout is Layout.BHSD else (rows, heads)
        return (*self.batch_shape, *sizes, self.head_dim_v)[-self.rank :]

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """A result [B, Hq, Sq, Dv] as the caller sees it."""
        return self.restore_lse(self.layout.swapped(out))

    def restore_lse(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result [B, Hq, ...] with the caller's dimensions in place of B, and of Hq below rank 3."""
        if self.rank == 4:
            return tensor
        if self.rank > 4:
            return tensor.reshape(*self.batch_shape, *tensor.shape[1:])
        return tensor[(0,) * (4 - self.rank)]

    def canonical_out(self, out: torch.Tensor) -> torch.Tensor:
        """The caller's output as a 4-D view. Raises ArgumentError when its strides allow none."""
        if self.rank <= 4:
            return self.layout.swapped(at_least_rank(out, 4))
        try:
            return self.layout.swapped(out.view(math.prod(self.batch_shape), *out.shape[-3:]))
        except RuntimeError as error:
            raise ArgumentError(
                f"out has strides {out.stride()}; its batch dimensions must merge into one"
            ) from error


def is_loadable(tensor: torch.Tensor) -> bool:
    """True when kernels can load `tensor` [B, H, S, D] as it is, 16 bytes at a time."""
    head_dim = tensor.shape[3]
    if is_aligned(tensor.stride()) and not head_dim % _ELEMENTS:  # as for most; the rest takes longer
        return head_dim > 0 and tensor.data_ptr() % _ALIGNMENT == 0
    return head_dim > 0 and head_dim % _ELEMENTS == 0 and misalignment(tensor) is None


def is_aligned(stride: Sequence[int]) -> bool:
    """True when all rows of a tensor begin at multiples of 16 bytes if the first one does."""
    batch, head, row, last = stride
    return last == 1 and not (batch | head | row) % _ELEMENTS


def loadable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself when it is loadable, else a contiguous copy.

    In the copy, a head_dim that is no multiple of 8 is filled up with zeros to the next one.
    """
    if is_loadable(tensor):
        return tensor
    head_dim = tensor.shape[-1]
    copy = tensor.new_empty((*tensor.shape[:-1], padded(head_dim)))
    copy[..., :head_dim] = tensor
    copy[..., head_dim:] = 0
    return copy


def check_no_grad(tensors: dict[str, Any]) -> None:
    """Raises UnsupportedError for inputs whose gradient autograd would expect.

    Forward-mode gradients are the operators' business: where torch computes any, every call is one.
    """
    for name, tensor in tensors.items():
        if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise UnsupportedError(
                f"{name} requires grad, and this call has no backward pass: call it under torch.no_grad() "
                f"or pass {name}.detach()"
            )


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without "torch.", as other libraries call it too."""
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def is_virtual(tensor: torch.Tensor) -> bool:
    """True when only torch's dispatcher can handle `tensor`: FakeTensor, DTensor, inside torch.func, ..."""
    torch = sys.modules["torch"]
    if type(tensor) is torch.Tensor:
        try:
            if tensor.data_ptr():
                return False  # nearly always, and the rest takes a microsecond
        except RuntimeError:
            pass
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True
    with torch._C.DisableTorchFunctionSubclass():  # torch 2.4's CausalBias answers nothing but attention
        try:
            has_memory = tensor.data_ptr() != 0 or tensor.numel() == 0
        except RuntimeError:
            has_memory = False
        return not has_memory and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def misalignment(tensor: torch.Tensor) -> str | None:
    """Why a kernel cannot access `tensor` 16 bytes at a time, or None."""
    strides = tensor.stride()
    is_dense = strides[-1] == 1 and math.gcd(_ELEMENTS, *strides[:-1]) == _ELEMENTS
    if is_dense and tensor.data_ptr() % _ALIGNMENT == 0:
        return None
    shape = tensor.shape
    if strides[-1] != 1 and shape[-1] > 1:
        return f"has last stride {strides[-1]}; allowed is 1"
    for dim in range(len(shape) - 1):
        if shape[dim] > 1 and strides[dim] % _ELEMENTS:
            return f"has strides {strides}; all but the last must be multiples of {_ELEMENTS} elements"
    if tensor.data_ptr() % _ALIGNMENT:
        return f"starts at address {tensor.data_ptr():#x}; it must be a multiple of {_ALIGNMENT}"
    return None


def padded(head_dim: int) -> int:
    """The next multiple of 8 from 8 on."""
    return max(-(-head_dim // _ELEMENTS) * _ELEMENTS, _ELEMENTS)


def at_least_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """`tensor` itself, or a view with leading dimensions of size 1."""
    return tensor if tensor.dim() >= rank else tensor[(None,) * (rank - tensor.dim())]
