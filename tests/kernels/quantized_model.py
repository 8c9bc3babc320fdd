"""The quantised kernels' arithmetic in NumPy, step by step in float32: what they have to match.

    quantize_keys, quantize_values    bytes and scales: bit for bit
    attend                            out and softmax_lse: to 1e-3, since exp2 and log2 of two machines differ

Written from docs/quantised.md and not from the headers. One head at a time; inputs are float32 arrays that
hold 16-bit numbers. Divisions are divisions: a reciprocal would flip one of 10,000 bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.int8]

BLOCK = 64  # keys
SAMPLED = 64  # keys whose mean is subtracted
THREADS = 128  # of the pre-pass, whose sums of the mean are made side by side
LARGEST = np.float32(127)
SMALLEST = np.float32(2.0**-100)  # below, numbers count as zero
SCALE_OF_ZEROS = np.float32(2.0**-64)  # of a block of V
CAP = np.float32(0.01)
FLAT = np.float32(4)  # largest over smallest of tokens that may share a scale
MAGIC = np.float32(12582912.0)
NO_KEY = np.float32(-1.7e38)
LARGEST_BIAS = np.float32(1e38)  # what larger finite ones count as
SLACK = np.float32(8.0)
INVERSE_UNIT = np.float32(65536.0)
LARGEST_P = 252.0
LOG2_E = np.float32(1.4426950408889634)
_FLOAT_MAX = np.finfo(np.float32).max
_NORMAL = np.float32(2.0**-126)


def _widened(x: Floats, columns: int) -> Floats:
    wide = np.zeros((x.shape[0], columns), np.float32)
    wide[:, : x.shape[1]] = x
    return wide


def _whole_blocks(x: NDArray) -> NDArray:
    rows = -(-x.shape[0] // BLOCK) * BLOCK
    return np.concatenate([x, np.zeros((rows - x.shape[0], *x.shape[1:]), x.dtype)])


def scales_of(amax: Floats) -> tuple[Floats, Floats]:
    """(scale, inverse) of numbers whose largest magnitude is `amax`, which may be infinite or NaN."""
    is_finite = np.isfinite(amax)
    is_used = is_finite & (amax >= SMALLEST)
    safe = np.where(is_used, amax, np.float32(1))
    scale = np.where(is_used, safe / LARGEST, np.float32(0))
    scale = np.where(is_finite, scale, np.float32(np.nan))
    return scale.astype(np.float32), np.where(is_used, LARGEST / safe, np.float32(0)).astype(np.float32)


def _to_bytes(x: Floats, inverse: Floats) -> Bytes:
    product = (x * inverse).astype(np.float32)
    return np.where(np.isfinite(product), np.rint(product), 0).astype(np.int8)


def _largest(x: Floats, axis: int | tuple[int, ...]) -> Floats:
    """The largest magnitude; NaN wins."""
    magnitude = np.abs(x)
    return np.where(
        np.isnan(magnitude).any(axis),
        np.float32(np.nan),
        np.nanmax(np.nan_to_num(magnitude, nan=0, posinf=np.inf), axis),
    ).astype(np.float32)


def mean_of_keys(k: Floats, columns: int) -> Floats:
    """The mean [columns] of at most SAMPLED evenly spaced keys of k [Sk, D], summed as the kernel does."""
    wide = _widened(k, columns)
    count = min(len(wide), SAMPLED)
    rows = [0] if count == 1 else [i * (len(wide) - 1) // (count - 1) for i in range(count)]
    share = np.float32(1) / np.float32(count)
    parts = THREADS // (columns // 8)
    sums = np.zeros((parts, columns), np.float32)
    for i, row in enumerate(rows):
        sums[i % parts] += wide[row] * share
    total = sums[0].copy()
    for part in sums[1:]:
        total += part
    return total


@dataclass(frozen=True)
class Keys:
    """K̂ [rows, columns], one scale for [block, lane], and the mean [columns] that was subtracted."""

    bytes: Bytes
    scales: Floats
    mean: Floats

    def scale_of_key(self) -> Floats:
        """[rows]"""
        row = np.arange(len(self.bytes))
        return self.scales[row // BLOCK, row % 16 // 4]


def quantize_keys(k: Floats, columns: int) -> Keys:
    """Of one head's keys [Sk, D]."""
    mean = mean_of_keys(k, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        less = _widened(k, columns) - mean
        too_far = np.isinf(less) & np.isfinite(_widened(k, columns)) & np.isfinite(mean)
        less = np.where(too_far, np.copysign(_FLOAT_MAX, less), less).astype(np.float32)
    less = _whole_blocks(less)
    groups = less.reshape(-1, 4, 4, 4, columns)  # block, 16 keys, lane, its four, column
    scales, inverse = scales_of(_largest(groups, (1, 3, 4)))
    quantized = _to_bytes(groups, inverse[:, None, :, None, None])
    return Keys(quantized.reshape(less.shape), scales, mean)


@dataclass(frozen=True)
class Values:
    """V̂ [rows, columns], log2 of each token's scale, and INVERSE_UNIT over it: negative in flat blocks."""

    bytes: Bytes
    log2: Floats
    inverse: Floats


def quantize_values(v: Floats, columns: int) -> Values:
    """Of one head's values [Sk, Dv]."""
    wide = _whole_blocks(_widened(v, columns))
    amax = _largest(wide, 1)
    unit = np.full_like(amax, INVERSE_UNIT)
    for of_block, units in zip(amax.reshape(-1, BLOCK), unit.reshape(-1, BLOCK), strict=True):
        counted = np.isfinite(of_block) & (of_block >= SMALLEST)
        of_lanes = of_block.reshape(4, 4, 4)  # 16 keys, lane, its four
        most = of_lanes.max((0, 2))
        with np.errstate(over="ignore"):
            is_flat = counted.all() and (most <= FLAT * of_lanes.min((0, 2))).all()
        if is_flat:
            of_lanes[:] = most[None, :, None]
            units[:] = -INVERSE_UNIT
    scale, inverse = scales_of(amax)
    for row, of_block in zip(scale.reshape(-1, BLOCK), amax.reshape(-1, BLOCK), strict=True):
        counted = np.isfinite(of_block) & (of_block >= SMALLEST)
        row[of_block < SMALLEST] = of_block[counted].min() / LARGEST if counted.any() else SCALE_OF_ZEROS
    return Values(_to_bytes(wide, inverse[:, None]), np.log2(scale), unit / scale)


def quantize_queries(q: Floats, softmax_scale: float) -> tuple[Bytes, Floats]:
    """Q̂ [Sq, D] and a scale for each row, with |softmax_scale| · log2(e) in it; its sign is in Q̂."""
    factor = np.float32(abs(softmax_scale)) * LOG2_E if softmax_scale else np.finfo(np.float32).tiny
    scale, inverse = scales_of(_largest(q, 1))
    signed = -q if softmax_scale < 0 else q
    with np.errstate(over="ignore"):
        return _to_bytes(signed, inverse[:, None]), np.minimum(scale * factor, _FLOAT_MAX).astype(np.float32)


def _f32(x: NDArray) -> Floats:
    return x.astype(np.float32)


def _exp2(x: NDArray) -> Floats:
    y = _f32(np.exp2(x.astype(np.float64)))
    return np.where(np.abs(y) < _NORMAL, np.float32(0), y)


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    softmax_scale: float,
    seen: NDArray[np.bool_],
    *,
    columns: int,
    has_byte_values: bool,
    starts_at_magic: bool = True,
    to_element: type[np.float16] | None = None,
    bias: Floats | None = None,
) -> tuple[Floats, Floats, int]:
    """(out [Sq, Dv], softmax_lse [Sq], the largest P̂) of one head. `seen` and `bias` [Sq, Sk].

    `starts_at_magic`: sums of Q̂ K̂ᵀ become floats as MAGIC + S, not as S.
    `to_element` rounds P where V keeps its 16 bits; None for bfloat16.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        q_bytes, q_scale = quantize_queries(q, softmax_scale)
        keys = quantize_keys(k, columns)
        sums = _widened(_f32(q_bytes), columns).astype(np.int64) @ keys.bytes.astype(np.int64).T
        rows, count = len(q), keys.bytes.shape[0]
        visible = np.zeros((rows, count), bool)
        visible[:, : seen.shape[1]] = seen
        product = _f32(q_scale[:, None] * keys.scale_of_key()[None])
        factor = np.where(product > CAP, CAP, product)
        factor = np.where(factor < _NORMAL, _NORMAL, factor)
        magic = MAGIC if starts_at_magic else np.float32(0)
        shift = _f32(magic * factor)
        values = quantize_values(v, columns) if has_byte_values else None
        row_max = np.full(rows, NO_KEY, np.float32)
        row_base = np.zeros(rows, np.float32)  # what row_max counts from: 0 but with biases
        row_sum = np.zeros(rows, np.float32)
        out = np.zeros((rows, v.shape[1]), np.float32)
        largest = 0
        to_add = None if bias is None else _bias_in_log2(bias, count)
        for first in range(count - BLOCK, -1, -BLOCK):
            part = slice(first, first + BLOCK)
            c = factor[:, part]
            x = (float(magic) + sums[:, part].astype(np.float64)) * c
            if to_add is not None:  # logits from here on
                x = _f32(sums[:, part] * c.astype(np.float64) + to_add[:, part]).astype(np.float64)
                shift[:, part] = 0
            if values is None:
                x = np.where(visible[:, part], x, -np.inf)
                block_max = np.fmax.reduce(_f32(x - shift[:, part]), axis=1)
                row_max, row_sum, out = _moved(row_max, row_sum, out, np.fmax(block_max, NO_KEY))
                p = _exp2(_f32(x - _f32(row_max[:, None] + shift[:, part]).astype(np.float64)))
                row_sum = _f32(row_sum + p.sum(1, dtype=np.float32))
                rounded = p if to_element is None else p.astype(to_element)
                if to_element is None:
                    rounded = _to_bfloat16(p)
                value = np.zeros((BLOCK, v.shape[1]), np.float32)
                value[: len(v[part])] = v[part]
                out = _f32(out + rounded.astype(np.float32) @ value)
                continue
            log2_st, inverse = values.log2[part], values.inverse[part]
            is_flat = bool(inverse[0] < 0)
            offset = np.float32(np.log2(LARGEST_P) - 24)
            if to_add is not None:
                x = np.where(visible[:, part], x, -np.inf)
                block_max = np.fmax(np.fmax.reduce(_f32(x), axis=1), NO_KEY)
                x = _f32(_f32(x) - block_max[:, None])
                of_lanes = _f32(x + log2_st)
                reference = np.fmax(np.fmax.reduce(of_lanes, axis=1), NO_KEY)
                excess = _f32(_f32(block_max - row_base) + _f32(reference - row_max))
                moves = excess > SLACK
                scale = _exp2(np.where(moves, -excess, np.float32(0)))
                row_base, row_max = np.where(moves, block_max, row_base), np.where(moves, reference, row_max)
                row_sum, out = _f32(row_sum * scale), _f32(out * scale[:, None])
                weight = _exp2(np.where(moves, np.float32(0), excess))
                if is_flat:
                    p = _exp2(_f32(x - _f32(_f32(reference[:, None] - log2_st) - offset)))
                else:
                    p = _exp2(_f32(of_lanes - _f32(reference - offset)[:, None]))
            elif is_flat:
                logits = _f32(sums[:, part] * c.astype(np.float64) + log2_st)
            else:
                x = _f32(x + log2_st)
                logits = _f32(x - shift[:, part])
            if to_add is None:
                logits = np.where(visible[:, part], logits, np.float32(-np.inf))
                x = np.where(visible[:, part], x, -np.inf)
                reference = np.fmax(np.fmax.reduce(logits, axis=1), NO_KEY)
                row_max, row_sum, out = _moved(row_max, row_sum, out, reference)
                weight = _exp2(_f32(reference - row_max))
                if is_flat:
                    less = _f32(_f32(reference[:, None] - log2_st) - offset)
                    subtrahend = _f32(float(magic) * c.astype(np.float64) + less)
                else:
                    subtrahend = _f32(_f32(reference[:, None] + shift[:, part]) - offset)
                p = _exp2(_f32(x - subtrahend.astype(np.float64)))
            p_bytes = np.where(np.isnan(p), 255, np.rint(np.nan_to_num(p).astype(np.float64) * 2.0**24))
            largest = max(largest, int(p_bytes.max()))
            row_sum = _f32(row_sum + _f32((p.astype(np.float64) * np.abs(inverse)).sum(1)) * weight)
            products = p_bytes.astype(np.int64) @ values.bytes[part, : v.shape[1]].astype(np.int64)
            out = _f32(out + _f32(products) * weight[:, None])
        out_scale = float(INVERSE_UNIT) * 2.0**-24 if has_byte_values else 1.0
        lse_shift = 8 - np.log2(LARGEST_P) if has_byte_values else 0.0
        signed = -q if softmax_scale < 0 else q
        mean_logit = (signed.astype(np.float64) @ keys.mean[: q.shape[1]]) * abs(softmax_scale)
        is_empty = row_sum == 0
        divided = out * (out_scale / np.where(is_empty, 1, row_sum.astype(np.float64)))[:, None]
        lse = (row_base + row_max + lse_shift + np.log2(row_sum.astype(np.float64))) * np.log(2) + mean_logit
        return (
            _f32(np.where(is_empty[:, None], 0, divided)),
            _f32(np.where(is_empty, -np.inf, lse)),
            largest,
        )


def _bias_in_log2(bias: Floats, keys: int) -> Floats:
    """[Sq, keys], 0 where there is no key."""
    is_large = np.isfinite(bias) & (np.abs(bias) > LARGEST_BIAS)
    wide = np.zeros((bias.shape[0], keys), np.float32)
    wide[:, : bias.shape[1]] = _f32(np.where(is_large, np.copysign(LARGEST_BIAS, bias), bias) * LOG2_E)
    return wide


def _moved(row_max: Floats, row_sum: Floats, out: Floats, block_max: Floats) -> tuple[Floats, Floats, Floats]:
    """Rows whose reference is exceeded by more than SLACK take the new one."""
    moves = block_max > row_max + SLACK
    moved = np.where(moves, np.maximum(row_max, block_max), row_max)
    scale = _exp2(_f32(row_max - moved))
    return moved, _f32(row_sum * scale), _f32(out * scale[:, None])


def _to_bfloat16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class Room:
    """The parts of a workspace, from its memory: the layout of fmha_fwd_q8/params.hpp."""

    k_hat: Bytes  # [heads, rows, columns]
    v_hat: Bytes | None  # [heads, rows, columns]
    k_scale: Floats  # [heads, rows / 64, 4]
    v_log2: Floats | None  # [heads, rows]
    v_inverse: Floats | None
    k_mean: Floats  # [batch, num_heads_kv, columns]

    @staticmethod
    def over(
        address: int, size: int, *, heads: int, blocks: int, batch_heads: int, columns: int, int8: bool
    ) -> Room:
        """`heads` of the workspace with `blocks` of 64 rows each; `batch_heads`: batch · num_heads_kv."""
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        end = 0

        def take(dtype: type, *shape: int) -> NDArray:
            nonlocal end
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            part = memory[end : end + count].view(dtype).reshape(shape)
            end += -(-count // 256) * 256
            return part

        rows, tile = blocks * BLOCK, BLOCK * columns
        of_blocks = take(np.uint8, heads * blocks, 2 * tile + 8 * BLOCK if int8 else tile)
        k_scale, k_mean = take(np.float32, heads, blocks, 4), take(np.float32, batch_heads, columns)
        assert end == size, f"the workspace has {size} bytes, and its parts {end}"

        def part(dtype: type, first: int, *shape: int) -> NDArray:
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.ascontiguousarray(of_blocks[:, first : first + count]).view(dtype).reshape(-1, *shape)

        width = next(width for width in (128, 64, 32) if columns % width == 0)
        k = part(np.int8, 0, columns // width, BLOCK, width).transpose(0, 2, 1, 3).reshape(-1, BLOCK, columns)
        # Row 16 i + 8 h + 2 l + e of a tile is key 16 i + 4 l + 2 h + e.
        k = k.reshape(-1, 4, 2, 4, 2, columns).transpose(0, 1, 3, 2, 4, 5)
        of_tokens = (heads, rows)
        return Room(
            k_hat=k.reshape(heads, rows, columns),
            v_hat=part(np.int8, tile, columns, BLOCK).transpose(0, 2, 1).reshape(heads, rows, columns)
            if int8
            else None,
            k_scale=k_scale,
            v_log2=part(np.float32, 2 * tile, BLOCK).reshape(of_tokens) if int8 else None,
            v_inverse=part(np.float32, 2 * tile + 4 * BLOCK, BLOCK).reshape(of_tokens) if int8 else None,
            k_mean=k_mean,
        )
