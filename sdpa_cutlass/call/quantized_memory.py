"""Memory of quantised keys and values: the workspace of fmha_fwd_q8/params.hpp, kept from call to call.

    blocks     [heads, blocks, bytes]: of 64 keys K̂, and under int8 V̂ and the scales of V
    k_scale    float32 [heads, blocks, 4]: of the keys 16 i + 4 l + {0, 1, 2, 3} of a block, l = 0 ... 3
    k_mean     float32 [heads, head_dim]: c, what was subtracted from every key

`heads` counts batch and key heads, `head_dim` is the kernel's. The library fills a memory from its first
block on, with the mean of the keys that it is given. Keys that come later have to have the mean of the
earlier ones, for which no kernel asks: `key_bytes` does the same in torch, bit for bit.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..library.registry import Precision

if TYPE_CHECKING:
    import torch

BLOCK = 64  # keys
_ALIGNMENT = 256  # bytes, of the whole and of its parts
_LARGEST = 127.0
_SMALLEST = 2.0**-100  # below, numbers count as zero


def whole_blocks(keys: int) -> int:
    """The next multiple of BLOCK."""
    return -(-keys // BLOCK) * BLOCK


class Memory:
    """Room for `capacity` keys, a multiple of BLOCK, of each of `heads`; `head_dim` is the kernel's."""

    __slots__ = ("_store", "address", "blocks", "capacity", "k_mean", "k_scale", "size")

    def __init__(
        self, precision: Precision, heads: int, head_dim: int, capacity: int, device: torch.device
    ) -> None:
        torch = sys.modules["torch"]
        count = capacity // BLOCK
        block = BLOCK * head_dim
        if precision is Precision.INT8:
            block += BLOCK * head_dim + 2 * 4 * BLOCK
        sizes = (heads * count * block, heads * count * 4 * 4, heads * head_dim * 4)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.capacity = capacity
        self.size = starts[-1]
        self._store = torch.empty(self.size + _ALIGNMENT, dtype=torch.uint8, device=device)
        first = -self._store.data_ptr() % _ALIGNMENT
        self.address = self._store.data_ptr() + first
        blocks, scales, means = (
            self._store[first + start : first + start + size]
            for start, size in zip(starts, sizes, strict=False)
        )
        self.blocks = blocks.view(heads, count, block)
        self.k_scale = scales.view(torch.float32).view(heads, count, 4)
        self.k_mean = means.view(torch.float32).view(heads, head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._store.nbytes)

    def take(self, other: Memory, count: int) -> None:
        """The first `count` blocks of `other`, and its means."""
        self.blocks[:, :count] = other.blocks[:, :count]
        self.k_scale[:, :count] = other.k_scale[:, :count]
        self.k_mean.copy_(other.k_mean)

    def take_values(self, other: Memory, first: int) -> None:
        """V̂ and its scales of all blocks of `other`, which are those from `first` on here."""
        keys = BLOCK * self.k_mean.shape[1]
        self.blocks[:, first : first + other.blocks.shape[1], keys:] = other.blocks[..., keys:]

    def write_keys(self, first: int, keys: torch.Tensor) -> None:
        """K̂ and scales of `keys` [heads, count, D] in 16 bits, from block `first` on, with the mean there is.

        What fills up the last block is zero.
        """
        step = 64  # blocks: bounds what the numbers take in 32 bits
        for start in range(0, whole_blocks(keys.shape[1]) // BLOCK, step):
            some = keys[:, start * BLOCK : (start + step) * BLOCK]
            found, scales = key_bytes(some, self.k_mean)
            place = slice(first + start, first + start + found.shape[1])
            self.blocks[:, place, : found.shape[2]] = found
            self.k_scale[:, place] = scales


def key_bytes(keys: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K̂ uint8 [heads, blocks, 64 · head_dim] and scales float32 [heads, blocks, 4], as in `Memory`.

    keys: [heads, count, D] in 16 bits, D up to head_dim; mean: float32 [heads, head_dim]. The steps, and the
    order of the bytes, are those of fmha_fwd_q8/quantize.cuh: what is not finite makes its scale NaN.
    """
    torch = sys.modules["torch"]
    heads, count, head_dim = keys.shape
    columns = mean.shape[1]
    blocks = whole_blocks(count) // BLOCK
    x = torch.zeros((heads, blocks * BLOCK, columns), dtype=torch.float32, device=keys.device)
    part = x[:, :count]
    part[..., :head_dim] = keys
    if keys.dtype is torch.bfloat16:  # two finite numbers may be further apart than any float
        largest = torch.finfo(torch.float32).max
        less = part - mean[:, None]
        is_too_far = less.isinf() & part.isfinite() & mean[:, None].isfinite()
        part.copy_(torch.where(is_too_far, less.sign() * largest, less))
    else:
        part -= mean[:, None]
    groups = x.view(heads, blocks, 4, 4, 4, columns)  # 16 keys, lane, its four, column
    amax = groups.abs().amax((2, 4, 5))  # NaN wins
    is_finite = amax.isfinite()
    is_used = is_finite & (amax >= _SMALLEST)
    top = torch.full_like(amax, _LARGEST)  # a tensor: by a number, torch multiplies with its reciprocal
    scales = torch.where(is_used, amax / top, 0.0).masked_fill(~is_finite, torch.nan)
    inverse = torch.where(is_used, top / amax, 0.0)
    rounded = (groups * inverse[:, :, None, :, None, None]).round().nan_to_num(0.0, 0.0, 0.0)
    # Row 16 i + 8 (e / 2) + 2 l + e % 2 of a tile is key 16 i + 4 l + e; tiles have up to 128 columns.
    width = next(size for size in (128, 64, 32) if columns % size == 0)
    tiles = rounded.to(torch.int8).view(heads, blocks, 4, 4, 2, 2, columns // width, width)
    tiles = tiles.permute(0, 1, 6, 2, 4, 3, 5, 7).reshape(heads, blocks, BLOCK * columns)
    return tiles.view(torch.uint8), scales
