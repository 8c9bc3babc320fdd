"""Attention over pieces of the keys, merged, is attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_cutlass import Causal, attention, merge_states
from tests.kernels.numerics import half_ulp, visible

INF = math.inf


@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [[40], [1, 2, 97], [0, 16, 16, 64]], ids=str)
def test_attention_over_pieces_of_the_keys_merges_to_the_whole(
    causal: Causal | None, dtype: torch.dtype, cuts: list[int], device: str
) -> None:
    """Pieces may be empty for all rows or for some, and a sink is the whole's."""
    keys, rows = 129, 41
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, size, 32, generator=draw).to(device, dtype)
        for heads, size in ((4, rows), (2, keys), (2, keys))
    )
    v *= 0.125
    mask = visible(rows, keys, causal, device)
    sinks = torch.randn(4, generator=draw).to(device)
    outs, lses = [], []
    for start, end in zip([0, *cuts], [*cuts, keys], strict=True):
        piece = torch.zeros_like(mask)
        piece[:, start:end] = mask[:, start:end]
        out, lse = attention(q, k, v, attn_mask=piece, return_lse=True)
        outs.append(out)
        lses.append(lse)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT) / math.sqrt(32)
    scores = scores.masked_fill(~mask, -INF)
    for sink in (None, sinks):
        logits = scores if sink is None else torch.cat(
            [scores, sink.double()[None, :, None, None].expand(2, 4, rows, 1)], -1
        )  # fmt: skip
        ref_lse = logits.logsumexp(-1)
        ref = (scores - ref_lse[..., None]).exp() @ v.double().repeat_interleave(2, 1)
        out, lse = merge_states(outs, lses, sinks=sink)
        assert ((out.double() - ref).abs() <= 1e-3 + half_ulp(ref, dtype)).all()
        assert ((lse.double() - ref_lse).abs() <= 1e-4).all()
