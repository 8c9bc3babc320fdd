"""The dropout mask, outside the kernels: which weights they drop for a (seed, offset), bit for bit.

An element is its batch b, query head h, row i and column j, both within its sequence; nothing else counts.
Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) gives 128 bits
to every 16 elements:

    key      lo32(seed), hi32(seed) ^ hi32(offset)
    counter  (j / 32) · 4 + (j / 2) % 4,  (i / 16) · 8 + i % 8,  b · num_heads_q + h,  lo32(offset)
    byte     2 · ((i / 8) % 2) + j % 2  of output word  (j / 8) % 4

An element owns the low 7 bits of its byte; the 16 top bits of the 16 bytes are a fraction that all of them
share. With t = round(p_dropout · 2^23), an element is dropped when its 7 bits are less than t's 7 high bits,
plus one where the fraction is less than t's 16 low bits: with probability t / 2^23 exactly. The kernels'
twin of this file is templates/include/sdpa/attention/dropout.cuh; a test compares the two.
"""

from __future__ import annotations

import functools
import math
import numbers
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .errors import ArgumentError, ArgumentTypeError

PHILOX_ROUNDS = 7
THRESHOLD_BITS = 23

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_UINT64_MAX = 2**64 - 1
_LOW_BITS = 16  # of the threshold; compared with the fraction that 16 elements share
_FRACTION_BITS = [8 * byte + 7 - word for byte in (3, 2, 1, 0) for word in range(4)]  # most significant first
_TILE_ROWS, _TILE_COLUMNS = 16, 32  # 32 counters
_TILES_AT_ONCE = 2048  # bounds the memory: about 32 KiB a tile


class PhiloxState(NamedTuple):
    """What a dropout mask is made from: two integers in [0, 2^64)."""

    seed: int
    offset: int


def dropout_mask(
    batch: int,
    num_heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    p_dropout: float,
    philox: Any,
    *,
    device: Any = None,
) -> Any:
    """The weights that a call with this `p_dropout` and `philox` keeps: boolean [B, Hq, Sq, Sk], True = kept.

    philox: a PhiloxState or pair of integers, or a tensor [2] of int64 or uint64, as `attention` takes and
    returns them. Rows and columns count within a sequence, so the mask of a shorter sequence (`seqlens_q`,
    `attention_varlen`) is the top left part of a longer one's. Kept weights are multiplied by
    1 / (1 - p_dropout) in the kernels. Gives a NumPy array, or with `device` a torch tensor there.

    Raises TypeError or ValueError, naming the argument.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    out, philox = sdpa_cutlass.attention(q, k, v, p_dropout=0.1, return_philox=True)
    kept = sdpa_cutlass.dropout_mask(1, 8, 512, 512, 0.1, philox, device="cuda")
    ```
    """
    sizes = {"batch": batch, "num_heads_q": num_heads_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(_size(name, value) for name, value in sizes.items())
    p_dropout = checked_p_dropout(p_dropout)
    kept: Any
    arange: Callable[..., Any]
    if device is None:
        import numpy

        seed, offset = _state_as_ints(philox)
        kept = numpy.zeros(shape, dtype=numpy.bool_)
        arange = functools.partial(numpy.arange, dtype=numpy.int64)
        stack: Callable[..., Any] = numpy.stack
    else:
        import torch

        seed, offset = _state_as_tensors(philox, device) if _is_tensor(philox) else checked_philox(philox)
        kept = torch.zeros(shape, dtype=torch.bool, device=device)
        arange = functools.partial(torch.arange, dtype=torch.int64, device=device)
        stack = torch.stack
    if 0 not in shape and not drops_everything(p_dropout):
        threshold = dropout_threshold(p_dropout)
        _fill(kept.reshape(-1, *shape[2:]), threshold, seed, offset, arange, stack)
    return kept


def dropout_threshold(p_dropout: float) -> int:
    """t = p_dropout · 2^23, from p_dropout as a float32, rounded half to even: at most 2^23 - 1."""
    return min(round(as_float32(p_dropout) * 2**THRESHOLD_BITS), 2**THRESHOLD_BITS - 1)


def drops_everything(p_dropout: float) -> bool:
    """True when float32 cannot tell `p_dropout` from 1: the result is zeros, which no kernel computes."""
    return as_float32(p_dropout) == 1.0


def checked_p_dropout(p_dropout: object, name: str = "p_dropout") -> float:
    """`p_dropout` as a float in [0, 1]. Raises ArgumentTypeError or ArgumentError."""
    if isinstance(p_dropout, bool) or not isinstance(p_dropout, numbers.Real):
        raise ArgumentTypeError(f"{name}={p_dropout!r} is a {type(p_dropout).__name__}; allowed is a float")
    try:
        value = float(p_dropout)
    except OverflowError:  # an integer
        value = math.inf
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name}={p_dropout!r}; allowed is a probability between 0 and 1")
    return value


def checked_philox(philox: object) -> PhiloxState:
    """A pair of integers in [0, 2^64) as a PhiloxState. Raises ArgumentTypeError or ArgumentError."""
    if not isinstance(philox, (tuple, list)) or len(philox) != 2:
        raise ArgumentTypeError(
            f"philox={philox!r}; allowed are a PhiloxState, a pair of integers and a tensor [2] of int64 or "
            "uint64"
        )
    values = []
    for name, value in zip(PhiloxState._fields, philox, strict=True):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ArgumentTypeError(f"philox has {name} {value!r}; allowed is an integer")
        if not 0 <= int(value) <= _UINT64_MAX:
            raise ArgumentError(f"philox has {name} {value!r}; allowed are 0 to 2^64 - 1")
        values.append(int(value))
    return PhiloxState(*values)


def spread(low_bits: int) -> int:
    """16 bits at the positions that the shared fraction has in a 32-bit word, in the same order."""
    sources = reversed(range(_LOW_BITS))
    return sum(((low_bits >> s) & 1) << t for s, t in zip(sources, _FRACTION_BITS, strict=True))


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32 with 7 rounds on integers or on arrays of int64 that broadcast, all in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK32, (k1 + _KEY_INCREMENTS[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply(constant: int, value: Any) -> tuple[Any, Any]:
    """High and low 32 bits of a 64-bit product, in two halves: int64 must not overflow."""
    upper = value * (constant >> 16)
    lower = value * (constant & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK32


def _fill(
    kept: Any, threshold: int, seed: Any, offset: Any, arange: Callable[..., Any], stack: Callable[..., Any]
) -> None:
    """Writes the mask [heads, Sq, Sk], a few heads or rows at a time, with integers of NumPy or of torch."""
    heads, seqlen_q, seqlen_k = kept.shape
    tile_rows, tile_columns = -(-seqlen_q // _TILE_ROWS), -(-seqlen_k // _TILE_COLUMNS)
    rows_at_once = min(tile_rows, max(1, _TILES_AT_ONCE // tile_columns))
    heads_at_once = max(1, _TILES_AT_ONCE // (rows_at_once * tile_columns))
    key = (seed & _MASK32, ((seed >> 32) ^ (offset >> 32)) & _MASK32)
    # Dimensions: head, row tile, i / 8 % 2, i % 8, column tile, j / 8 % 4 (the word), j / 2 % 4, j % 2.
    byte_shift = 8 * arange(4).reshape(2, 1, 1, 1, 1, 2)
    c0 = arange(4 * tile_columns).reshape(tile_columns, 4)
    for head in range(0, heads, heads_at_once):
        last_head = min(head + heads_at_once, heads)
        c2 = arange(head, last_head).reshape(-1, 1, 1, 1, 1, 1)
        for tile_row in range(0, tile_rows, rows_at_once):
            last_tile_row = min(tile_row + rows_at_once, tile_rows)
            c1 = arange(8 * tile_row, 8 * last_tile_row).reshape(-1, 1, 8, 1, 1)
            words = philox4x32((c0, c1, c2, offset & _MASK32), key)
            limits = (threshold >> _LOW_BITS) + (_fraction(words) < spread(threshold & 0xFFFF))
            own_bits = (stack(words, -2)[..., None] >> byte_shift) & 0x7F
            tiles = own_bits >= limits[..., None, :, None]
            first_row, end_row = tile_row * _TILE_ROWS, min(last_tile_row * _TILE_ROWS, seqlen_q)
            tiles = tiles.reshape(last_head - head, -1, tile_columns * _TILE_COLUMNS)
            kept[head:last_head, first_row:end_row] = tiles[:, : end_row - first_row, :seqlen_k]


def _fraction(words: tuple[Any, Any, Any, Any]) -> Any:
    """The top bits of the 16 bytes: 16 bits, at the positions that `spread` uses."""
    fraction = words[0] & 0x80808080
    for shift in (1, 2, 3):
        fraction = fraction | ((words[shift] & 0x80808080) >> shift)
    return fraction


def as_float32(value: float) -> float:
    """`value` rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; allowed is an integer")
    if int(value) < 0:
        raise ArgumentError(f"{name}={value!r}; allowed are 0 and positive integers")
    return int(value)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _state_as_tensors(philox: Any, device: Any) -> tuple[Any, Any]:
    """Seed and offset as int64 scalars on `device`, without waiting for it."""
    torch = sys.modules["torch"]
    if tuple(philox.shape) != (2,) or philox.dtype not in (torch.int64, torch.uint64):
        raise ArgumentTypeError(
            f"philox has shape {tuple(philox.shape)} and dtype {philox.dtype}; allowed is [2] of int64 or "
            "uint64"
        )
    seed, offset = philox.to(device).view(torch.int64).unbind()
    return seed, offset


def _state_as_ints(philox: Any) -> PhiloxState:
    if not _is_tensor(philox):
        return checked_philox(philox)
    seed, offset = _state_as_tensors(philox, "cpu")
    return PhiloxState(int(seed) & _UINT64_MAX, int(offset) & _UINT64_MAX)
