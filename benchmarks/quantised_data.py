"""Inputs that are hard to quantise, each in one way, and what docs/quantised.md promises of results.

normal   everything is N(0, 1)                    vout     a few tokens of V are 40 times larger
kbias    channels of K are constant, up to ±15    vchan    four channels of V are 20 times larger
peaky    logits of standard deviation 4           vbias    channels of V have means of 4
sink     four keys take most of the weight, and their V is 50 times smaller
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sdpa_cutlass.library.registry import Accuracy

FAMILIES = ("normal", "kbias", "peaky", "sink", "vout", "vchan", "vbias")


def family(
    kind: str,
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [batch, heads, S, D] of this kind in float32, on the CPU; every head is drawn by itself."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(batch, heads, seqlen_q, head_dim)
    k = normal(batch, heads_kv, seqlen_k, head_dim)
    v = normal(batch, heads_kv, seqlen_k, head_dim)
    if kind == "kbias":
        bias = normal(head_dim) * 2
        some = torch.randperm(head_dim, generator=generator)[: max(1, head_dim // 16)]
        bias[some] = normal(len(some)).sign() * 15
        k += bias
    elif kind == "peaky":
        q *= 4
    elif kind == "sink":
        direction = normal(head_dim)
        direction /= direction.norm()
        q += direction * 4
        k[:, :, :4] = k[:, :, :4] * 0.3 + direction * (12 * math.sqrt(head_dim) / 4)
        v[:, :, :4] *= 0.02
    elif kind == "vout":
        v[:, :, torch.randperm(seqlen_k, generator=generator)[: max(1, seqlen_k // 512)]] *= 40
    elif kind == "vchan":
        v[..., torch.randperm(head_dim, generator=generator)[:4]] *= 20
    elif kind == "vbias":
        v += normal(head_dim) * 4
    elif kind != "normal":
        raise ValueError(kind)
    return q, k, v


@dataclass(frozen=True)
class Contract:
    """Of every (batch, head): the relative L2 error and 1 - cosine; of softmax_lse, the largest error."""

    normal: float
    every_family: float
    cosine_normal: float
    cosine_every: float
    lse: float = 6e-3  # times the largest |logit|, at least 1
    lse_of_few_keys: float = 1e-2  # of rows that see a few: a logit's own error does not average out


CONTRACTS = {
    Accuracy.INT8_QK: Contract(1.5e-2, 3.2e-2, 1.2e-4, 6e-4),
    Accuracy.INT8: Contract(1.8e-2, 3.4e-2, 1.6e-4, 7e-4),
}


def errors_of_heads(out: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(relative L2 error, 1 - cosine) of each (batch, head) of [B, H, S, D]; NaN in ref does not count."""
    counted = ~ref.isnan()
    a, b = (torch.where(counted, t.double(), 0).flatten(2) for t in (out, ref))
    norm = b.norm(dim=2)
    cosine = (a * b).sum(2) / (a.norm(dim=2) * norm).clamp(min=1e-300)
    cosine[(norm == 0) & (a.norm(dim=2) == 0)] = 1  # no row of the head saw a key
    return (a - b).norm(dim=2) / norm.clamp(min=1e-300), 1 - cosine
