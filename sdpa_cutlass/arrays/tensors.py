"""Arrays of other libraries as torch tensors that share their memory, where torch is installed.

Accepted, in this order: a torch.Tensor; anything with `__dlpack__` (CuPy, JAX, NumPy, ...), synchronised with
torch's current stream as DLPack defines; anything with `__cuda_array_interface__` (Numba, ...), whose stream
torch's current one then waits for; anything with `__array_interface__`. NumPy arrays of ml_dtypes.bfloat16,
which DLPack does not carry, are read through their bits. Calls that have to do without torch read the same
arrays through protocols.py.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentTypeError, UnsupportedError
from .array_view import PRODUCER_ERRORS, ArrayView, check_is_array

if TYPE_CHECKING:
    import torch


def is_tensor(value: object) -> bool:
    """True for a torch.Tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@functools.cache
def has_torch() -> bool:
    """True when torch can be imported; imports it."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def as_tensor(name: str, value: Any, *, writable: bool = False) -> torch.Tensor:
    """`value` itself if it is a torch.Tensor or an ArrayView, else a tensor over the same memory.

    With `writable`, read-only memory is refused; without, it may be copied. Raises ArgumentTypeError naming
    the argument `name`, UnsupportedError when torch is not installed.
    """
    loaded = sys.modules.get("torch")
    if (loaded is not None and isinstance(value, loaded.Tensor)) or isinstance(value, ArrayView):
        return value
    check_is_array(name, value)
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}: arrays need torch installed; without it, only "
            "attention(..., out=array) takes them"
        ) from error
    try:
        if hasattr(value, "__cuda_array_interface__") and not hasattr(value, "__dlpack__"):
            return _from_cuda_array_interface(value)
        interface = getattr(value, "__array_interface__", None)
        if interface is None:
            return torch.from_dlpack(value)
        return _from_host_memory(name, value, interface, writable)
    except PRODUCER_ERRORS as error:
        if isinstance(error, ArgumentTypeError):
            raise
        what = f"{type(value).__name__} of dtype {getattr(value, 'dtype', 'unknown')}"
        raise ArgumentTypeError(f"{name} is a {what}, which torch cannot read: {error}") from error


def _from_cuda_array_interface(value: Any) -> torch.Tensor:
    import torch

    tensor = torch.as_tensor(value)
    stream = value.__cuda_array_interface__.get("stream")
    if stream is not None:
        producer = torch.cuda.ExternalStream(stream, device=tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(producer)
    return tensor


def _from_host_memory(name: str, value: Any, interface: dict[str, Any], writable: bool) -> torch.Tensor:
    """A tensor over `__array_interface__`: NumPy makes the view, and a copy of what torch cannot address."""
    import numpy
    import torch

    array = numpy.asarray(value)
    if array.dtype.name == "bfloat16":
        array, dtype = array.view(numpy.int16), torch.bfloat16
    else:
        dtype = None
    read_only = not array.flags.writeable
    if writable and (read_only or interface.get("data", (0, False))[1]):
        raise ArgumentTypeError(f"{name} is a read-only {type(value).__name__}; it must be writable")
    if read_only or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        if writable:
            raise ArgumentTypeError(f"{name} has byte strides {array.strides}, which torch cannot address")
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)
