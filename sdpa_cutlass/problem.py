"""One attention problem: sizes, dtype and what is asked for besides, without tensors, strides or pointers.

    O = dropout(softmax(Q Kᵀ · scale + mask)) V
    Q [B, Hq, Sq, D]   K [B, Hkv, Sk, D]   V [B, Hkv, Sk, Dv]   O [B, Hq, Sq, Dv]

This file holds the only definitions of the causal offset, the FLOP count and the bytes moved; checking
arguments and choosing kernels happen elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class DType(Enum):
    """Element type of q, k, v and out. The value is the name used in kernel names."""

    F16 = "f16"
    BF16 = "bf16"

    __hash__ = object.__hash__  # Enum's own is Python code: 0.2 µs in every choice of a kernel

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2


class MaskType(Enum):
    """Element type of a dense mask: boolean (True = attend), or what is added to the scaled scores."""

    BOOL = "bool"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    __hash__ = object.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {MaskType.BOOL: 1, MaskType.F32: 4}.get(self, 2)


class Causal(str, Enum):
    """Where the diagonal of a causal mask starts.

    ``TOP_LEFT``: row i sees keys 0..i (PyTorch's ``is_causal``).
    ``BOTTOM_RIGHT``: the last row sees every key (FlashAttention's ``causal``).
    """

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"

    __hash__ = str.__hash__  # a member and its value are equal, so they must hash alike


class Kind(NamedTuple):
    """What of a problem decides which kernels are legal: all but the sizes that change from call to call."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    is_causal: bool
    mask: MaskType | None
    has_dropout: bool
    has_lengths: bool


_AS_HEAD_DIM = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a kernel has to compute. Hashable: the key of every cached choice.

    `head_dim_v` is head_dim unless given. With `has_lengths`, sequences are padded to seqlen_q and seqlen_k,
    or packed and at most that long; their own lengths are known to the device only.
    """

    dtype: DType
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: Causal | None = None
    head_dim_v: int = _AS_HEAD_DIM
    mask: MaskType | None = None
    has_dropout: bool = False
    has_lengths: bool = False

    def __post_init__(self) -> None:
        if self.head_dim_v == _AS_HEAD_DIM:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    @property
    def kind(self) -> Kind:
        """Everything but batch, heads and lengths."""
        return Kind(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.causal is not None,
            self.mask,
            self.has_dropout,
            self.has_lengths,
        )

    @property
    def is_plain(self) -> bool:
        """True when nothing but the head dimension decides whether a plain kernel can run it."""
        return self.mask is None and not self.has_dropout and not self.has_lengths

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
        """2·B·Hq·Sq·Sk·(D + Dv), halved for causal: the convention of published figures."""
        scores = self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k
        full = 2 * scores * (self.head_dim + self.head_dim_v)
        return full // 2 if self.is_causal else full

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and out, each counted once: the least that has to cross DRAM, but for a mask."""
        rows = self.num_heads_q * self.seqlen_q + self.num_heads_kv * self.seqlen_k
        return self.batch * rows * (self.head_dim + self.head_dim_v) * self.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """True when no score is computed: the output is empty, or all zeros because there is no key."""
        return 0 in (self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k)

    def __str__(self) -> str:
        heads = str(self.num_heads_q)
        if self.num_heads_kv != self.num_heads_q:
            heads += f"/{self.num_heads_kv}"
        head_dim = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            head_dim += f"/{self.head_dim_v}"
        text = (
            f"batch={self.batch} heads={heads} seqlen_q={self.seqlen_q} seqlen_k={self.seqlen_k} "
            f"head_dim={head_dim} {self.dtype.value}"
        )
        if self.causal:
            text += f" causal={self.causal.value}"
        if self.mask:
            text += f" mask={self.mask.value}"
        if self.has_dropout:
            text += " dropout"
        if self.has_lengths:
            text += " lengths"
        return text
