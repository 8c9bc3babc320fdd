"""Uses an installed package and nothing of a checkout: check_wheel.py runs this in a fresh environment.

use_wheel.py            without torch: both libraries load, and a kernel is right on plain memory
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
from sdpa_cutlass import LibraryNotFoundError, _c_api, registry
from sdpa_cutlass._locate import Target

_ROWS, _KEYS, _DIM = 5, 7, 64


def _halves(count: int, value: float | None = None) -> tuple[Any, int, list[float]]:
    """(memory, address, values) of `count` fp16 numbers, aligned to 16 bytes; random ones without `value`."""
    drawn = [random.uniform(-2, 2) if value is None else value for _ in range(count)]
    packed = struct.pack(f"{count}e", *drawn)
    memory = ctypes.create_string_buffer(len(packed) + 16)
    address = ctypes.addressof(memory)
    address += -address % 16
    ctypes.memmove(address, packed, len(packed))
    return memory, address, list(struct.unpack(f"{count}e", packed))


def without_torch() -> str:
    """A fused kernel of the host library against plain Python, through the C ABI."""
    assert importlib.util.find_spec("torch") is None
    random.seed(1)
    sizes = {"q": _ROWS, "k": _KEYS, "v": _KEYS, "out": _ROWS}
    arrays = {name: _halves(n * _DIM, math.nan if name == "out" else None) for name, n in sizes.items()}
    host = _c_api.library(Target.HOST)
    row = next(
        row
        for row in registry.read_kernels(host)
        if (row.family, row.dtype.value, row.head_dim) == (registry.Family.FMHA_FWD, "f16", _DIM)
        and not row.is_causal
        and not row.is_general
    )
    params = _c_api.Params(
        struct_size=ctypes.sizeof(_c_api.Params),
        batch=1,
        num_heads_q=1,
        num_heads_kv=1,
        seqlen_q=_ROWS,
        seqlen_k=_KEYS,
        head_dim=_DIM,
        head_dim_v=_DIM,
        softmax_scale=0.125,
    )
    for name, (_, address, _) in arrays.items():
        setattr(params, name, address)
        size = sizes[name] * _DIM
        setattr(params, f"{name}_stride", (ctypes.c_int64 * 3)(size, size, _DIM))
    host.check(host.launch_function(row.index, ctypes.byref(params), 0, None), row.name)
    out = struct.unpack(f"{_ROWS * _DIM}e", ctypes.string_at(arrays["out"][1], 2 * _ROWS * _DIM))
    _compare(out, *(arrays[name][2] for name in ("q", "k", "v")))
    try:
        cuda = _c_api.library(Target.CUDA)
    except LibraryNotFoundError:
        return f"{row.name} is right; this wheel has no library for GPUs"
    count = len(registry.read_kernels(cuda))
    return f"{row.name} is right; the library for GPUs loads, {count} kernels for {cuda.build.archs}"


def _compare(out: tuple[float, ...], q: list[float], k: list[float], v: list[float]) -> None:
    for i in range(_ROWS):
        scores = [sum(q[i * _DIM + d] * k[j * _DIM + d] for d in range(_DIM)) for j in range(_KEYS)]
        weights = [math.exp(0.125 * score) for score in scores]
        for d in range(_DIM):
            wanted = sum(weights[j] * v[j * _DIM + d] for j in range(_KEYS)) / sum(weights)
            assert abs(out[i * _DIM + d] - wanted) < 2e-3, (i, d, out[i * _DIM + d], wanted)


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
    for given in ((q, k, v), tuple(map(_Shares, (q, k, v)))):
        out = sdpa_cutlass.attention(*given)
        assert (out.float() - wanted).abs().max() < 3e-3
    with sdpa_cutlass.enabled() as usage:
        F.scaled_dot_product_attention(q, k, v)
    assert usage.served == 1, usage
    return f"with torch {torch.__version__}: tensors, DLPack and enabled() are right"


if __name__ == "__main__":
    assert sdpa_cutlass.__file__.startswith(sys.prefix), f"not installed: {sdpa_cutlass.__file__}"
    print(with_torch() if "--torch" in sys.argv[1:] else without_torch())
