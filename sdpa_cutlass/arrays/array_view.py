"""An array of another library as it lies in memory: address, shape, strides, dtype, device. Needs no torch.

protocols.py makes these views. A view answers what checks.py, extras.py and outputs.py ask of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import ArgumentTypeError, UnsupportedError

PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
PRODUCER_ERRORS = (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError)
"""What a producer may raise when it cannot export an array."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lies, with the names of torch.device."""

    type: str
    index: int

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayView:
    """An array's memory, with the methods of a tensor that need nothing else. Strides count elements."""

    name: str  # of the argument
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: Device
    owner: Any  # keeps the memory

    layout: ClassVar[str] = "torch.strided"
    requires_grad: ClassVar[bool] = False

    def data_ptr(self) -> int:
        return self.address

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def __getitem__(self, index: tuple[None, ...]) -> ArrayView:
        """The view with as many dimensions of size 1 in front."""
        ones = (1,) * len(index)
        return replace(self, shape=ones + self.shape, strides=ones + self.strides)

    def transpose(self, first: int, second: int) -> ArrayView:
        shape, strides = list(self.shape), list(self.strides)
        shape[first], shape[second] = shape[second], shape[first]
        strides[first], strides[second] = strides[second], strides[first]
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def expand(self, *sizes: Any) -> ArrayView:
        """To sizes that the caller knows to be allowed."""
        shape = tuple(sizes[0]) if isinstance(sizes[0], tuple) else sizes
        strides = tuple(
            stride if size == wanted else 0
            for size, stride, wanted in zip(self.shape, self.strides, shape, strict=True)
        )
        return replace(self, shape=shape, strides=strides)

    def reshape(self, *shape: int) -> ArrayView:
        """The dimensions before the last three as one. Raises UnsupportedError when strides allow no view."""
        merged, count = 0, 1  # the stride of the last dimension longer than 1, and what was merged so far
        for size, stride in zip(self.shape[-4::-1], self.strides[-4::-1], strict=True):
            if size == 1 or 0 in self.shape:
                continue
            if count == 1:
                merged = stride
            elif stride != merged * count:
                raise UnsupportedError(
                    f"{self.name} has strides {self.strides}: its batch dimensions do not merge into one; "
                    + not_without_torch("copied")
                )
            count *= size
        return replace(self, shape=shape, strides=(merged, *self.strides[-3:]))

    view = reshape


def check_is_array(name: str, value: Any) -> None:
    """Raises ArgumentTypeError for what none of the protocols can be asked of."""
    if isinstance(value, type) or not any(has_protocol(value, protocol) for protocol in PROTOCOLS):
        raise ArgumentTypeError(
            f"{name} is a {type(value).__name__}; allowed is a torch.Tensor, or an array with one of "
            f"{', '.join(PROTOCOLS)}"
        )


def not_without_torch(done: str) -> str:
    """Ends the message of an error."""
    return f"nothing is {done} without torch, nor with stream or softmax_lse given"


def has_protocol(value: Any, protocol: str) -> bool:
    """False also where the producer refuses, which some do by other errors than AttributeError."""
    try:
        return hasattr(value, protocol)
    except PRODUCER_ERRORS:
        return False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of an array without gaps, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
