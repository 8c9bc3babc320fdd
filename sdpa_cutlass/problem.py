"""One attention problem: sizes, dtype and what is asked for besides, without tensors, strides or pointers.

    O = dropout(softmax(Q Kᵀ · scale + mask, sinks)) V
    Q [B, Hq, Sq, D]   K [B, Hkv, Sk, D]   V [B, Hkv, Sk, Dv]   O [B, Hq, Sq, Dv]

This file holds the only definitions of the causal offset, the FLOP count and the bytes moved; checking
arguments and choosing kernels happen elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class DType(Enum):
    """Element type of a kernel's tensors. The value is the name used in kernel names."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"  # of partial results; attention takes the other two

    __hash__ = object.__hash__  # Enum's own is Python code: 0.2 µs in every choice of a kernel

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.F32 else 2


ATTENTION_DTYPES = (DType.F16, DType.BF16)


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


MASK_ALIGNMENT = 16
"""The most bytes that a kernel reads of a mask's row at once."""


class Causal(str, Enum):
    """Where the diagonal of a causal mask starts.

    ``TOP_LEFT``: row i sees keys 0..i (PyTorch's ``is_causal``).
    ``BOTTOM_RIGHT``: the last row sees every key (FlashAttention's ``causal``).
    """

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"

    __hash__ = str.__hash__  # a member and its value are equal, so they must hash alike


class MaskReading(NamedTuple):
    """How kernels read a mask: Problem.mask_alignment, mask_elements and mask_has_one_row."""

    alignment: int = MASK_ALIGNMENT
    elements: int = 0
    has_one_row: bool = False


NO_MASK = MaskReading()


class Kind(NamedTuple):
    """What of a problem decides which kernels are legal, and their prices: all but the sizes that change from
    call to call.
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    is_causal: bool
    mask: MaskType | None
    mask_alignment: int
    mask_has_one_row: bool
    has_dropout: bool
    has_lengths: bool
    has_window: bool
    has_sinks: bool


_AS_HEAD_DIM = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a kernel has to compute. Hashable: the key of every cached choice.

    `head_dim_v` is head_dim unless given. With `has_lengths`, sequences are padded to seqlen_q and seqlen_k,
    or packed and at most that long; their own lengths are known to the device only.

    `window` (left, right): row i sees the keys i + causal_offset - left to i + causal_offset + right; -1 is
    no limit. A causal mask sets right to 0. A limit that hides no key becomes -1, a right of 0 a causal mask,
    and a window without limits None.

    `mask_alignment` is the power of two, in bytes and at most MASK_ALIGNMENT, at whose multiples every row of
    the mask begins, as far as strides tell; 0 where its keys do not lie next to each other. `mask_elements`
    are those that it has of its own, without what it broadcasts over, and it `mask_has_one_row` where it
    broadcasts over the rows, as under padding.

    `diagonal`, of a shard of a longer problem, is its causal_offset instead: row i stands next to key
    i + diagonal. What it hides of this problem's sizes is all that is kept of it.
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
    mask_alignment: int = MASK_ALIGNMENT
    mask_elements: int = 0
    mask_has_one_row: bool = False
    has_dropout: bool = False
    has_lengths: bool = False
    window: tuple[int, int] | None = None
    has_sinks: bool = False
    diagonal: int | None = None

    def __post_init__(self) -> None:
        if self.head_dim_v == _AS_HEAD_DIM:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.diagonal is not None:
            self._simplify_shard(self.diagonal, *(self.window or (-1, -1)))
        elif self.window is not None:
            self._simplify(*self.window)

    def _simplify(self, left: int, right: int) -> None:
        """Replaces the window (left, right) by what hides the same keys of this problem's sizes."""
        causal = self.causal
        if causal is not None:
            right = 0
        elif (
            right >= self.seqlen_q - 1
        ):  # the first row, which is seqlen_q - 1 before the last key's, sees all
            right = -1
        if left >= (self.seqlen_q if causal is Causal.TOP_LEFT else self.seqlen_k) - 1:
            left = -1
        if right == 0 and causal is None:
            object.__setattr__(self, "causal", Causal.BOTTOM_RIGHT)
        is_window = left >= 0 or right > 0
        object.__setattr__(self, "window", (left, right) if is_window else None)

    def _simplify_shard(self, diagonal: int, left: int, right: int) -> None:
        """Replaces diagonal, causal mask and window by what hides the same keys, in numbers of 32 bits."""
        rows, keys = self.seqlen_q, self.seqlen_k
        if self.causal is not None:
            right = 0
        if right >= 0 and diagonal + right >= keys - 1:  # the first row sees the last key
            right = -1
        if left >= rows - 1 + diagonal:  # the last row sees the first key
            left = -1
        if left < 0 and right >= 0:
            diagonal, right = max(diagonal + right, -rows), 0
        elif right < 0 and left >= 0:
            diagonal, left = min(diagonal - left, keys), 0
        is_causal, is_window = right == 0, left >= 0 or right > 0
        object.__setattr__(self, "causal", Causal.TOP_LEFT if is_causal else None)
        object.__setattr__(self, "window", (left, right) if is_window else None)
        object.__setattr__(self, "diagonal", diagonal if is_causal or is_window else None)

    def resized(
        self, batch: int, num_heads_q: int, num_heads_kv: int, seqlen_q: int, seqlen_k: int
    ) -> Problem:
        """The same with other sizes, for each token of a key cache: dataclasses.replace takes longer."""
        return Problem(
            dtype=self.dtype,
            batch=batch,
            num_heads_q=num_heads_q,
            num_heads_kv=num_heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=self.head_dim,
            causal=self.causal,
            head_dim_v=self.head_dim_v,
            mask=self.mask,
            mask_alignment=self.mask_alignment,
            mask_elements=self.mask_elements,
            mask_has_one_row=self.mask_has_one_row,
            has_dropout=self.has_dropout,
            has_lengths=self.has_lengths,
            window=self.window,
            has_sinks=self.has_sinks,
            diagonal=self.diagonal,
        )

    @property
    def kind(self) -> Kind:
        """Everything but batch, heads and lengths."""
        return Kind(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.causal is not None,
            self.mask,
            self.mask_alignment,
            self.mask_has_one_row,
            self.has_dropout,
            self.has_lengths,
            self.window is not None,
            self.has_sinks,
        )

    def reads_mask_by(self, run: int) -> bool:
        """Whether threads that hold `run` neighbouring keys of a row read the mask of them at once."""
        if self.mask is None:
            return True
        vector = min(run * self.mask.itemsize, MASK_ALIGNMENT)
        return self.mask_alignment >= vector

    @property
    def is_plain(self) -> bool:
        """True when nothing but the head dimension decides whether a plain kernel can run it."""
        return (
            self.mask is None
            and not self.has_dropout
            and not self.has_lengths
            and self.window is None
            and not self.has_sinks
        )

    @property
    def is_causal(self) -> bool:
        """True when either alignment of the causal mask applies."""
        return self.causal is not None

    @property
    def causal_offset(self) -> int:
        """Row i sees key j when j <= i + causal_offset; a window counts from there as well.

        0 for top_left, and without a causal mask or a window.
        """
        if self.diagonal is not None:
            return self.diagonal
        return self.seqlen_k - self.seqlen_q if self.is_bottom_right else 0

    @property
    def is_bottom_right(self) -> bool:
        """True when the last key is the last row's own. Without a causal mask, windows are aligned so."""
        if self.diagonal is not None:
            return False
        if self.causal is None:
            return self.window is not None
        return self.causal is Causal.BOTTOM_RIGHT

    @property
    def scores(self) -> int:
        """Of all heads and batches, seen or not."""
        return self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k

    @property
    def visible_scores(self) -> int:
        """Scores of one head that causal mask and window let through, every sequence taken as full."""
        rows, keys, offset = self.seqlen_q, self.seqlen_k, self.causal_offset
        if self.window is None:
            return _seen(rows, keys, offset) if self.is_causal else rows * keys
        left, right = self.window
        before = 0 if left < 0 else _seen(rows, keys, offset - left - 1)
        return (rows * keys if right < 0 else _seen(rows, keys, offset + right)) - before

    @property
    def flops(self) -> int:
        """2·B·Hq·Sq·Sk·(D + Dv), halved for causal: the convention of published figures.

        With a window, or a diagonal, only scores that are let through count.
        """
        is_counted = self.window is not None or self.diagonal is not None
        scores = self.visible_scores if is_counted else self.seqlen_q * self.seqlen_k
        full = 2 * self.batch * self.num_heads_q * scores * (self.head_dim + self.head_dim_v)
        return full // 2 if self.is_causal and not is_counted else full

    @property
    def seen_keys(self) -> int:
        """The keys that at least one row sees, as far as causal mask and window decide."""
        keys, offset = self.seqlen_k, self.causal_offset
        left, right = self.window or (-1, 0 if self.is_causal else -1)
        begin = 0 if left < 0 else min(max(offset - left, 0), keys)
        end = keys if right < 0 else min(max(offset + right + self.seqlen_q, begin), keys)
        return end - begin

    @property
    def bytes(self) -> int:
        """Bytes of q, out and the seen rows of k and v, once each: the least that DRAM has to move."""
        rows = self.num_heads_q * self.seqlen_q + self.num_heads_kv * self.seen_keys
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
        if self.diagonal is not None:
            text += f" diagonal={self.diagonal}"
        if self.window:
            text += f" window={self.window}"
        if self.mask:
            text += f" mask={self.mask.value}"
            if self.mask_alignment < MASK_ALIGNMENT:
                text += f" aligned={self.mask_alignment}"
        if self.has_dropout:
            text += " dropout"
        if self.has_lengths:
            text += " lengths"
        if self.has_sinks:
            text += " sinks"
        return text


def _seen(rows: int, keys: int, offset: int) -> int:
    """The pairs (i, j) with j <= i + offset: row i has clamp(i + offset + 1, 0, keys) of them."""
    first = offset + 1
    start = min(max(1 - first, 0), rows)  # the first row that sees a key
    full = min(max(keys - first, start), rows)  # the first row that sees them all
    partial = full - start
    return partial * (first + start) + partial * (partial - 1) // 2 + (rows - full) * keys
