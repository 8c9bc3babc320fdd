"""What a problem has besides q, k and v: a mask, lengths per sequence, packing, dropout.

The kinds of masks, as a Case names them:

    none           every row sees every key
    lengths        seqlens_k [B], 70 to 100 % of seqlen_k
    lengths_full   seqlens_k [B], all of them seqlen_k: what taking lengths costs when nothing is cut off
    padding        boolean [B, 1, 1, Sk], the same keys as `lengths`
    dense          boolean [B, 1, Sq, Sk], nine of ten True, at random
    document       boolean [B, 1, Sq, Sk], block-diagonal: about eight documents to a sequence
    bias_f16       float16 [1, Hq, Sq, Sk], minus the distance times a slope per head, as ALiBi has it
    bias_f32       the same in float32
    packed         such sequences one behind the other: q, k and v [total, H, D], cu_seqlens [B + 1]

`mask` is what torch is given, and says of every kind but `packed` which keys count; this library is given
lengths where a kind has them. Masks and lengths follow from the seed and the problem's name.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli.inputs import QKV
from sdpa_cutlass.cli.suites import Case

if TYPE_CHECKING:
    import torch

LEAST_LENGTH = 0.7  # of seqlen_k
SEEN = 0.9  # of a dense mask
DOCUMENTS = 8
PHILOX = (0x5DAC0715, 4)  # seed and offset of every dropout mask here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The tensors of one problem, shared by all of its input sets."""

    shape: tuple[int, int, int, int]  # batch, num_heads_q, seqlen_q, seqlen_k
    mask: torch.Tensor | None = None  # boolean or a bias, broadcasts to `shape`
    seqlens_k: torch.Tensor | None = None  # int32 [B]
    cu_seqlens: torch.Tensor | None = None  # int32 [B + 1]: of packed queries and of packed keys
    real: torch.Tensor | None = None  # boolean [B, S]: the rows that exist when packed
    p_dropout: float = 0.0
    visible: float = 1.0  # share of the scores that mask or lengths let through

    @property
    def is_packed(self) -> bool:
        """True when q, k, v and out are [total, H, D]."""
        return self.cu_seqlens is not None

    @property
    def own_mask(self) -> torch.Tensor | None:
        """The mask that this library is given: none where it is given lengths."""
        return self.mask if self.seqlens_k is None and self.cu_seqlens is None else None

    @property
    def computed(self) -> float:
        """Share of the scores that have to be computed: a mask is read, lengths are known before."""
        return self.visible if self.seqlens_k is not None or self.is_packed else 1.0

    def masks_of(self, pairs: torch.Tensor) -> dict[str, Any]:
        """`mask` and `kept` [P, Sq, Sk], or None, and `p_dropout`: what accuracy.py's two attentions take.

        `pairs` are (batch, head) pairs, numbered batch · num_heads_q + head; `kept` are the weights that our
        own dropout keeps.
        """
        import sdpa_cutlass

        _, heads, seqlen_q, seqlen_k = self.shape
        mask: torch.Tensor | None = None
        kept: torch.Tensor | None = None
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[pairs // heads, pairs % heads]
        if self.p_dropout:
            last = int(
                pairs.max()
            )  # dropout numbers pairs in the same way, so they may be heads of one batch
            every = sdpa_cutlass.dropout_mask(
                1, last + 1, seqlen_q, seqlen_k, self.p_dropout, PHILOX, device=pairs.device
            )
            kept = every[0][pairs]
        return {"mask": mask, "kept": kept, "p_dropout": self.p_dropout}

    def missing_rows_of(self, pairs: torch.Tensor) -> torch.Tensor | None:
        """Boolean [P, Sq]: the rows that do not exist because the problem is packed; None when all do."""
        return None if self.real is None else ~self.real[pairs // self.shape[1]]

    def pack(self, qkv: QKV) -> QKV:
        """[B, H, S, D] → [total, H, D]."""
        return QKV(*(tensor.transpose(1, 2)[self.real].contiguous() for tensor in qkv))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[total, H, ...] → [B, H, S, ...], with 0 in rows that do not exist."""
        assert self.real is not None
        padded = packed.new_zeros((*self.real.shape, *packed.shape[1:]))
        padded[self.real] = packed
        return padded.transpose(1, 2)


def make_conditions(case: Case, *, dtype: torch.dtype, device: torch.device, seed: int) -> Conditions:
    """The conditions of `case`; a float16 bias of a bfloat16 problem is bfloat16, as torch wants it."""
    import torch

    shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    plain = Conditions(shape=shape, p_dropout=case.p_dropout)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{case.name}".encode()))
    if case.mask == "none":
        return plain
    if case.mask in ("lengths", "lengths_full", "padding", "packed"):
        return _with_lengths(plain, case.mask, device, generator)
    if case.mask == "dense":
        on_device = torch.Generator(device=device).manual_seed(generator.initial_seed())
        size = (shape[0], 1, *shape[2:])
        mask = torch.rand(size, device=device, generator=on_device) < SEEN
        mask.diagonal(dim1=2, dim2=3).fill_(
            True
        )  # every row sees a key, for torch's backends agree on no other
    elif case.mask == "document":
        mask = _documents(shape, generator).to(device)
    elif case.mask in ("bias_f16", "bias_f32"):
        bias = _distances(shape, device)
        mask = bias.to(dtype) if case.mask == "bias_f16" else bias
    else:
        raise ValueError(f"mask {case.mask!r} is not known")
    visible = float(mask.float().mean()) if mask.dtype is torch.bool else 1.0
    return dataclasses.replace(plain, mask=mask, visible=visible)


def _with_lengths(
    plain: Conditions, kind: str, device: torch.device, generator: torch.Generator
) -> Conditions:
    import torch

    batch, _, seqlen_q, seqlen_k = plain.shape
    lengths = torch.full((batch,), seqlen_k, dtype=torch.int32)
    if kind != "lengths_full":
        share = LEAST_LENGTH + (1 - LEAST_LENGTH) * torch.rand(batch, generator=generator)
        lengths = (share * seqlen_k).ceil().to(torch.int32)
    lengths = lengths.to(device)
    real = torch.arange(seqlen_k, device=device) < lengths[:, None]
    mask = real[:, None, None]
    share_of_keys = lengths.double() / seqlen_k
    visible = float(share_of_keys.mean())
    if kind == "padding":
        return dataclasses.replace(plain, mask=mask, visible=visible)
    if kind != "packed":
        return dataclasses.replace(plain, mask=mask, seqlens_k=lengths, visible=visible)
    assert seqlen_q == seqlen_k, "a packed problem has as many queries as keys"
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    visible = float((share_of_keys**2).mean())
    return dataclasses.replace(plain, mask=mask, cu_seqlens=cu_seqlens, real=real, visible=visible)


def _documents(shape: tuple[int, int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Boolean [B, 1, Sq, Sk]: a row and a key see each other when they are of one document."""
    import torch

    batch, _, seqlen_q, seqlen_k = shape
    cuts = torch.rand(batch, DOCUMENTS - 1, generator=generator).sort(dim=1).values
    row = torch.searchsorted(cuts, (torch.arange(seqlen_q) / seqlen_q).expand(batch, -1).contiguous())
    column = torch.searchsorted(cuts, (torch.arange(seqlen_k) / seqlen_k).expand(batch, -1).contiguous())
    return (row[:, :, None] == column[:, None, :])[:, None]


def _distances(shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """float32 [1, Hq, Sq, Sk]: minus slope · |i - j|, the slopes halving over the heads from 2^-1 to 2^-8."""
    import torch

    _, heads, seqlen_q, seqlen_k = shape
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device=device, dtype=torch.float32) / heads)
    row = torch.arange(seqlen_q, device=device, dtype=torch.float32)[:, None]
    column = torch.arange(seqlen_k, device=device, dtype=torch.float32)
    return -slopes[None, :, None, None] * (row - column).abs()
