"""Inputs of the edge cases: seeded, the same on every device, of sizes that every backend takes."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.semantics.outcomes import Call, Region

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 2, 32, 64
ROW, KEY, COLUMN = 3, 5, 1  # the ones that something is done to
THE_ROW = Region(rows=(ROW,))
OTHER_ROWS = Region(rows=tuple(row for row in range(SEQLEN) if row != ROW))
ROW_AND_OTHERS = {"the row": THE_ROW, "others": OTHER_ROWS}


def rand(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Normal values; drawn on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(1000 * seed + len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def call(
    device: str,
    *,
    seqlen_q: int = SEQLEN,
    seqlen_k: int = SEQLEN,
    batch: int = BATCH,
    heads: int = HEADS,
    heads_kv: int | None = None,
    head_dim: int = HEAD_DIM,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> Call:
    """A call on q [B, H, Sq, D], k and v [B, Hkv, Sk, D]; `options` are those of Call."""
    heads_kv = heads if heads_kv is None else heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return Call(
        query=rand(device, batch, heads, seqlen_q, head_dim, seed=1, dtype=dtype),
        key=rand(device, batch, heads_kv, seqlen_k, head_dim, seed=2, dtype=dtype),
        value=rand(device, batch, heads_kv, seqlen_k, head_dim_v, seed=3, dtype=dtype),
        **options,
    )


def all_true(device: str, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN) -> torch.Tensor:
    """A boolean mask [1, 1, Sq, Sk] through which every row sees every key."""
    return torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)


def without_row(device: str) -> torch.Tensor:
    """A boolean mask through which ROW sees nothing."""
    mask = all_true(device)
    mask[..., ROW, :] = False
    return mask


def without_key(device: str) -> torch.Tensor:
    """A boolean mask through which nobody sees KEY."""
    mask = all_true(device)
    mask[..., KEY] = False
    return mask


def as_bias(
    mask: torch.Tensor, dtype: torch.dtype = torch.float16, hidden: float = -torch.inf
) -> torch.Tensor:
    """A bias that is 0 where the mask is True and `hidden` elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)


def lower_right(device: str, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """The keys that bottom_right lets a row see."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return mask.tril(seqlen_k - seqlen_q)


def first_keys(device: str, lengths: list[int], seqlen_k: int = SEQLEN) -> torch.Tensor:
    """Boolean [B, 1, 1, Sk]: the keys before a length."""
    return (torch.arange(seqlen_k, device=device) < torch.tensor(lengths, device=device)[:, None])[
        :, None, None
    ]


def int32(device: str, values: list[int]) -> torch.Tensor:
    """A tensor of lengths."""
    return torch.tensor(values, dtype=torch.int32, device=device)
