"""Where dropout's random bits come from: the caller, or torch's generator of the tensors' device.

A CUDA call takes seed and offset from the device's default generator and moves its offset on, as torch's own
kernels do; the host reads no device memory. torch's kernels do both under the generator's lock, which Python
cannot take: where another thread queues one of them between the two, its numbers are used again by the next
ones. Draws of this package never interleave. While a CUDA graph is captured, the generator must not be asked
on the host: a captured torch.randint then writes both on the device, anew in every replay. A CPU call takes
two integers from the default CPU generator. `torch.manual_seed` seeds all of them.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from ..dropout import PhiloxState, checked_philox
from ..errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import torch

NO_PHILOX = PhiloxState(0, 0)
"""Stands for a draw where none was needed: p_dropout is 0 or 1."""

_OFFSET_STEP = 4  # generators count in blocks of four 32-bit numbers; one call needs one new offset
_lock = threading.Lock()  # reading an offset and moving it on must not interleave


def draw(device: torch.device) -> PhiloxState | torch.Tensor:
    """Seed and offset for one call on `device`: integers, or a tensor [2] int64 there during a capture."""
    torch = sys.modules["torch"]
    if device.type == "cpu":
        seed, offset = draw_on_device(device).tolist()
        return PhiloxState(seed, offset)
    if device.index == torch._C._cuda_getDevice():  # torch.cuda.current_device() asks more first
        return _draw_on_current(device)
    with torch.cuda.device(device):  # torch asks the current device whether a graph is captured
        return _draw_on_current(device)


def _draw_on_current(device: torch.device) -> PhiloxState | torch.Tensor:
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        return draw_on_device(device)
    generator = torch.cuda.default_generators[device.index]
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + _OFFSET_STEP)
    return PhiloxState(generator.initial_seed(), offset)


def draw_on_device(device: torch.device) -> torch.Tensor:
    """Seed and offset as a tensor [2] int64, drawn where the kernel runs; can be captured and traced."""
    torch = sys.modules["torch"]
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def checked(philox: object, query: torch.Tensor) -> PhiloxState | torch.Tensor:
    """`philox`, if it is a pair of integers in [0, 2^64) or a tensor [2] of int64 or uint64 beside `query`.

    Does not read a tensor. Raises ArgumentTypeError or ArgumentError.
    """
    torch = sys.modules["torch"]
    if not isinstance(philox, torch.Tensor):
        return checked_philox(philox)
    if philox.dtype not in (torch.int64, torch.uint64):
        raise ArgumentTypeError(
            f"philox has dtype {philox.dtype}; allowed are torch.int64 and torch.uint64 (seed, offset)"
        )
    if philox.device != query.device:
        raise ArgumentTypeError(
            f"philox is on {philox.device}; query is on {query.device}: kernels read it there"
        )
    if tuple(philox.shape) != (2,):
        raise ArgumentError(f"philox has shape {tuple(philox.shape)}; allowed is (2,): seed, offset")
    if philox.stride(0) != 1:
        raise ArgumentError(f"philox has stride {philox.stride(0)}; it must be contiguous")
    return philox
