"""Uses an installed package and nothing of a checkout: check_wheel.py runs this in a fresh environment.

use_wheel.py            with what the wheel declares: both libraries load, and attention is right on memory
                        that __array_interface__ describes
use_wheel.py --numpy    without torch: attention on NumPy arrays
use_wheel.py --torch    attention on tensors, on objects that speak DLPack, and under enabled()
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import random
import struct
import sys
from typing import Any

import sdpa_cutlass
from sdpa_cutlass import ArgumentError, LibraryNotFoundError
from sdpa_cutlass.library import abi, launcher, registry
from sdpa_cutlass.library.locate import Target

_ROWS, _KEYS, _DIM = 5, 7, 64


class _Halves:
    """fp16 numbers in memory aligned to 16 bytes, [1, 1, rows, _DIM]; random ones without `value`."""

    def __init__(self, rows: int, value: float | None = None) -> None:
        count = rows * _DIM
        drawn = [random.uniform(-2, 2) if value is None else value for _ in range(count)]
        packed = struct.pack(f"{count}e", *drawn)
        self._memory = ctypes.create_string_buffer(len(packed) + 16)
        self._address = ctypes.addressof(self._memory)
        self._address += -self._address % 16
        ctypes.memmove(self._address, packed, len(packed))
        self.__array_interface__ = {
            "shape": (1, 1, rows, _DIM),
            "typestr": "<f2",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }

    def numbers(self) -> tuple[float, ...]:
        count = self.__array_interface__["shape"][2] * _DIM
        return struct.unpack(f"{count}e", ctypes.string_at(self._address, 2 * count))


def _expect_missing_out(*arrays: Any) -> None:
    message = "no error"
    try:
        sdpa_cutlass.attention(*arrays)
    except ArgumentError as error:
        message = str(error)
    assert "out is missing" in message, message
    assert "without torch" in message, message


def as_declared() -> str:
    """attention without torch, against plain Python and without NumPy; and the library for GPUs loads."""
    assert importlib.util.find_spec("torch") is None
    random.seed(1)
    q, k, v, out = _Halves(_ROWS), _Halves(_KEYS), _Halves(_KEYS), _Halves(_ROWS, math.nan)
    assert sdpa_cutlass.attention(q, k, v, out=out) is out
    _compare(out.numbers(), q.numbers(), k.numbers(), v.numbers())
    _expect_missing_out(q, k, v)
    assert "numpy" not in sys.modules
    launcher.module()  # raises when it is not the one of this wheel
    try:
        cuda = abi.library(Target.CUDA)
    except LibraryNotFoundError:
        return "attention is right; this wheel has no library for GPUs"
    count = len(registry.read_kernels(cuda))
    return f"attention is right; the library for GPUs loads, {count} kernels for {cuda.build.archs}"


def _compare(
    out: tuple[float, ...], q: tuple[float, ...], k: tuple[float, ...], v: tuple[float, ...]
) -> None:
    for i in range(_ROWS):
        scores = [sum(q[i * _DIM + d] * k[j * _DIM + d] for d in range(_DIM)) for j in range(_KEYS)]
        weights = [math.exp(0.125 * score) for score in scores]
        for d in range(_DIM):
            wanted = sum(weights[j] * v[j * _DIM + d] for j in range(_KEYS)) / sum(weights)
            assert abs(out[i * _DIM + d] - wanted) < 2e-3, (i, d, out[i * _DIM + d], wanted)


def with_numpy() -> str:
    """attention on NumPy arrays without torch, against float64."""
    import numpy

    assert importlib.util.find_spec("torch") is None
    normal = numpy.random.default_rng(1).standard_normal
    q, k, v = (normal((2, 3, rows, _DIM)).astype(numpy.float16) for rows in (37, 41, 41))
    scores = q.astype(float) @ k.astype(float).swapaxes(2, 3) / math.sqrt(_DIM)
    sums = numpy.exp(scores).sum(-1, keepdims=True)
    out, lse = numpy.full_like(q, math.nan), numpy.full(q.shape[:3], math.nan, numpy.float32)
    assert sdpa_cutlass.attention(q, k, v, out=out, softmax_lse=lse) is out
    assert numpy.abs(out - numpy.exp(scores) / sums @ v.astype(float)).max() < 2e-3
    assert numpy.abs(lse - numpy.log(sums[..., 0])).max() < 1e-4
    _expect_missing_out(q, k, v)
    return f"with NumPy {numpy.__version__}: attention on arrays is right"


class _Shares:
    """A tensor of another library, as far as DLPack shows it."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def with_torch() -> str:
    """The public functions against torch's own, on the CPU."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 37, _DIM).half() for _ in range(3))
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    for given in ((q, k, v), tuple(map(_Shares, (q, k, v))), (q, k, v), (q, k, v)):
        out = sdpa_cutlass.attention(*given)
        assert (out.float() - wanted).abs().max() < 3e-3
    with sdpa_cutlass.enabled() as usage:
        F.scaled_dot_product_attention(q, k, v)
    assert usage.served == 1, usage
    way = "compiled" if launcher.is_used() else "Python"
    return (
        f"with torch {torch.__version__}: tensors, DLPack and enabled() are right; calls take the {way} path"
    )


if __name__ == "__main__":
    assert sdpa_cutlass.__file__.startswith(sys.prefix), f"not installed: {sdpa_cutlass.__file__}"
    use = {"--numpy": with_numpy, "--torch": with_torch}
    print(use[sys.argv[1]]() if len(sys.argv) > 1 else as_declared())
