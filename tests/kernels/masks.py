"""Masks for tests: shapes that broadcast, ways to lie in memory, and random contents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.problem import MaskType

MASK_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)
BIAS_DTYPES = MASK_DTYPES[1:]
_TYPES = dict(zip(MASK_DTYPES, (MaskType.BOOL, MaskType.F16, MaskType.BF16, MaskType.F32), strict=True))

# (batch, heads, seqlen_q, seqlen_k) → a shape that broadcasts to it
MASK_SHAPES: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "keys": lambda b, h, q, k: (k,),
    "rows-keys": lambda b, h, q, k: (q, k),
    "batch-keys": lambda b, h, q, k: (b, 1, 1, k),
    "batch-rows-keys": lambda b, h, q, k: (b, 1, q, k),
    "heads-rows-keys": lambda b, h, q, k: (1, h, q, k),
    "rows": lambda b, h, q, k: (b, h, q, 1),
    "all": lambda b, h, q, k: (b, h, q, k),
}

_SPARE = 64  # elements in front of and behind a mask


def mask_dtypes(kernel: KernelInfo) -> list[torch.dtype]:
    """Those of MASK_DTYPES that a kernel takes."""
    return [dtype for dtype, mask_type in _TYPES.items() if mask_type in kernel.mask_types]


def _strided(mask: torch.Tensor, *, offset: int, row_stride: int) -> torch.Tensor:
    """The same values with rows `row_stride` elements apart, `offset` elements behind an aligned address.

    What lies around them must not count: NaN, or True.
    """
    *outer, rows, columns = mask.shape
    strides, stride = [1, row_stride], row_stride * rows
    for size in reversed(outer):
        strides.append(stride)
        stride *= size
    storage = torch.empty(offset + stride + 2 * _SPARE, dtype=mask.dtype, device=mask.device)
    storage.fill_(True if mask.dtype is torch.bool else math.nan)
    view = storage.as_strided((*outer, rows, columns), strides[::-1], _SPARE + offset)
    return view.copy_(mask)


def _transposed(mask: torch.Tensor) -> torch.Tensor:
    return mask.transpose(-1, -2).contiguous().transpose(-1, -2)


def _every_other_column(mask: torch.Tensor) -> torch.Tensor:
    return mask.repeat_interleave(2, -1)[..., ::2]


# [..., rows, columns] → the same values elsewhere in memory
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda mask: _strided(mask, offset=0, row_stride=mask.shape[-1]),
    "aligned": lambda mask: _strided(mask, offset=0, row_stride=-(-mask.shape[-1] // 64) * 64),
    "misaligned-by-1": lambda mask: _strided(mask, offset=1, row_stride=-(-mask.shape[-1] // 64) * 64),
    "odd-row-stride": lambda mask: _strided(mask, offset=0, row_stride=mask.shape[-1] | 1),
    "row-stride-of-4": lambda mask: _strided(mask, offset=4, row_stride=-(-mask.shape[-1] // 4) * 4 + 4),
    "transposed": _transposed,
    "every-other-column": _every_other_column,
}


def random_mask(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str,
    *,
    seed: int = 0,
    density: float = 0.6,
    layout: str = "dense",
    block: int = 1,
) -> torch.Tensor:
    """A boolean mask, or a normal bias, that hides all but `density` of its elements (a bias: by -inf).

    `block`: rows, and columns, in a row that are seen or hidden together.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = [*shape[:-2], *(-(-size // block) for size in shape[-2:])]
    seen = torch.rand(coarse, generator=generator) < density
    for dim, size in enumerate(shape[-2:], -min(len(shape), 2)):
        seen = seen.repeat_interleave(block, dim).narrow(dim, 0, size)
    if dtype is torch.bool:
        mask = seen
    else:
        mask = (2 * torch.randn(shape, generator=generator)).masked_fill(~seen, -math.inf).to(dtype)
    mask = mask.to(device)
    return LAYOUTS[layout](mask) if len(shape) > 1 else mask
