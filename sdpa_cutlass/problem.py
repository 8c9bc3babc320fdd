"""One attention problem: sizes, dtype and mask, without tensors, strides or pointers.

    O = softmax(Q Kᵀ · scale + mask) V      Q [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]   O [B, Hq, Sq, D]

This file holds the only definitions of the causal offset, the FLOP count and the bytes moved; checking
arguments and choosing kernels happen elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Element type of q, k, v and out. The value is the name used in kernel names."""

    F16 = "f16"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2


class Causal(str, Enum):
    """Where the diagonal of a causal mask starts.

    ``TOP_LEFT``: row i sees keys 0..i (PyTorch's ``is_causal``).
    ``BOTTOM_RIGHT``: the last row sees every key (FlashAttention's ``causal``).
    """

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"

    __hash__ = str.__hash__  # a member and its value are equal, so they must hash alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a kernel has to compute. Hashable: the key of every cached choice."""

    dtype: DType
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: Causal | None = None

    @property
    def is_causal(self) -> bool:
        """True when either alignment of the causal mask applies."""
        return self.causal is not None

    @property
    def causal_offset(self) -> int:
        """Row i sees key j when j <= i + causal_offset. 0 for top_left and without a causal mask."""
        return self.seqlen_k - self.seqlen_q if self.causal is Causal.BOTTOM_RIGHT else 0

    @property
    def flops(self) -> int:
        """4·B·Hq·Sq·Sk·D, halved for causal: the convention of published figures."""
        full = 4 * self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k * self.head_dim
        return full // 2 if self.is_causal else full

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and out, each counted once: the least that has to cross DRAM."""
        rows = 2 * self.num_heads_q * self.seqlen_q + 2 * self.num_heads_kv * self.seqlen_k
        return self.batch * rows * self.head_dim * self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """True when no score is computed: the output is empty, or all zeros because there is no key."""
        return 0 in (self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k)

    def __str__(self) -> str:
        heads = str(self.num_heads_q)
        if self.num_heads_kv != self.num_heads_q:
            heads += f"/{self.num_heads_kv}"
        causal = f" causal={self.causal.value}" if self.causal else ""
        return (
            f"batch={self.batch} heads={heads} seqlen_q={self.seqlen_q} seqlen_k={self.seqlen_k} "
            f"head_dim={self.head_dim} {self.dtype.value}{causal}"
        )
