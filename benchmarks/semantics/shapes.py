"""Edge cases of lengths, sizes of zero, heads, head dimensions, types and layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

import sdpa_cutlass
from benchmarks.semantics.inputs import (
    BATCH,
    HEAD_DIM,
    HEADS,
    SEQLEN,
    call,
    first_keys,
    int32,
    rand,
)
from benchmarks.semantics.outcomes import Call, EdgeCase, Region

RIGHT = {"": "right"}
REFUSED = {"": "refused"}
NO_KEY = "0, LSE −∞"
FIRST, SECOND = Region(batches=(0,)), Region(batches=(1,))


def _lengths(device: str, lengths: list[int], *, spoil: str = "") -> Call:
    """seqlens_k for this library, the mask of the same keys for torch; `spoil`: NaN behind the lengths."""
    seen = first_keys(device, lengths)
    made = call(device, attn_mask=seen)
    made.own = {"seqlens_k": int32(device, lengths)}
    if spoil:
        getattr(made, spoil).masked_fill_(~seen.mT, math.nan)
    return made


def _nan_bias_beyond_length(device: str) -> Call:
    lengths = [20, 20]
    seen = first_keys(device, lengths)
    bias = torch.zeros(seen.shape, dtype=torch.float16, device=device).masked_fill(~seen, math.nan)
    made = call(device, attn_mask=bias, visible=seen)
    made.own = {"attn_mask": bias, "seqlens_k": int32(device, lengths)}
    return made


def _lengths_of_queries(device: str) -> Call:
    lengths = [20, SEQLEN]
    made = call(device, has_torch=False, visible=first_keys(device, lengths).mT)
    made.own = {"seqlens_q": int32(device, lengths)}
    return made


def _lower_right_by_length(device: str) -> Call:
    """bottom_right ends at each sequence's own length."""
    lengths = [20, SEQLEN]
    row = torch.arange(24, device=device)[:, None]
    column = torch.arange(SEQLEN, device=device)
    last = torch.tensor(lengths, device=device).view(-1, 1, 1, 1)
    visible = (column < last) & (column <= row + last - 24)
    made = call(device, seqlen_q=24, attn_mask=visible)
    made.own = {"seqlens_k": int32(device, lengths), "causal": "bottom_right"}
    return made


def _packed(device: str, lengths: list[int], max_seqlen: int = SEQLEN) -> Call:
    """The same problem packed for this library; what lies outside the sequences is set right beforehand."""
    made = call(device, batch=len(lengths), has_torch=False)
    real = first_keys(device, lengths)[:, 0, 0]  # [B, S]
    made.visible = real[:, None, :, None] & real[:, None, None, :]

    def run_own() -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (tensor.transpose(1, 2)[real] for tensor in (made.query, made.key, made.value))
        starts = int32(device, [0, *torch.tensor(lengths).cumsum(0).tolist()])
        packed, packed_lse = sdpa_cutlass.attention_varlen(
            q, k, v, starts, starts, max_seqlen, max_seqlen, return_lse=True
        )
        out = made.query.new_zeros(len(lengths), SEQLEN, HEADS, HEAD_DIM)
        lse = torch.full((len(lengths), SEQLEN, HEADS), -math.inf, device=device)
        out[real], lse[real] = packed, packed_lse.T
        return out.transpose(1, 2), lse.transpose(1, 2)

    made.run_own = run_own
    return made


def _packed_with_room(device: str) -> Call:
    """Rows of `out` before, behind and between: they must keep what they held."""
    made = call(device, batch=1, has_torch=False)

    def run_own() -> tuple[torch.Tensor, None]:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (made.query, made.key, made.value))
        q, k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, 0, 3, 4)) for tensor in (q, k, v))
        out = torch.full_like(q, 7)
        starts = int32(device, [3, 3 + SEQLEN])
        sdpa_cutlass.attention_varlen(q, k, v, starts, starts, SEQLEN, SEQLEN, out=out)
        outside = torch.cat([out[:3], out[3 + SEQLEN :]])
        kept = bool((outside == 7).all())
        return (out[3 : 3 + SEQLEN].transpose(0, 1)[None] if kept else outside), None

    made.run_own = run_own
    return made


LENGTHS = [
    EdgeCase(
        name="lengths",
        what="`seqlens_k` 20 and 32 (torch: as a mask)",
        make=lambda device: _lengths(device, [20, SEQLEN]),
        ours=RIGHT,
        fa2="`cache_seqlens`, inference only",
    ),
    EdgeCase(
        name="length_zero",
        what="a sequence of no keys among others",
        make=lambda device: _lengths(device, [0, SEQLEN]),
        regions={"it": FIRST, "others": SECOND},
        ours={"it": NO_KEY, "others": "right"},
    ),
    EdgeCase(
        name="nan_key_beyond_length",
        what="NaN in K beyond a length",
        make=lambda device: _lengths(device, [20, 32], spoil="key"),
        ours=RIGHT,
    ),
    EdgeCase(
        name="nan_value_beyond_length",
        what="NaN in V beyond a length",
        make=lambda device: _lengths(device, [20, 32], spoil="value"),
        ours=RIGHT,
    ),
    EdgeCase(
        name="nan_bias_beyond_length",
        what="NaN in a bias beyond a length (torch: a bias of NaN alone)",
        make=_nan_bias_beyond_length,
        ours=RIGHT,
        fa2="no masks",
    ),
    EdgeCase(
        name="length_beyond",
        what="a length beyond Sk counts as Sk, one below 0 as 0",
        make=lambda device: _lengths(device, [-3, SEQLEN + 9]),
        regions={"below 0": FIRST, "beyond": SECOND},
        ours={"below 0": NO_KEY, "beyond": "right"},
    ),
    EdgeCase(
        name="rows_beyond_length",
        what="rows beyond `seqlens_q`",
        make=_lengths_of_queries,
        regions={
            "beyond": Region(batches=(0,), rows=tuple(range(20, SEQLEN))),
            "others": Region(batches=(0,), rows=tuple(range(20))),
        },
        ours={"beyond": NO_KEY, "others": "right"},
    ),
    EdgeCase(
        name="bottom_right_by_length",
        what="`bottom_right` with `seqlens_k`: aligned to each sequence's own end (torch: as a mask)",
        make=_lower_right_by_length,
        regions={"rows that see keys": Region(rows=tuple(range(4, 24)))},
        ours={"rows that see keys": "right"},
    ),
    EdgeCase(
        name="packed",
        what="packed sequences, an empty one among them",
        make=lambda device: _packed(device, [20, 0, SEQLEN]),
        ours=RIGHT,
        fa2="`flash_attn_varlen_func`",
    ),
    EdgeCase(
        name="packed_bound",
        what="packed, `max_seqlen` larger than any length",
        make=lambda device: _packed(device, [20, 9], 1000),
        ours=RIGHT,
    ),
    EdgeCase(
        name="packed_room",
        what="packed, rows of `out` outside every sequence keep what they held",
        make=_packed_with_room,
        ours=RIGHT,
    ),
]


def _changed(
    change: Callable[[torch.Tensor], torch.Tensor],
    which: tuple[str, ...] = ("query", "key", "value"),
    **sizes: int,
) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        made = call(device, **sizes)
        return dataclasses.replace(made, **{name: change(getattr(made, name)) for name in which})

    return make


def _no_head_dim(device: str) -> Call:
    made = _changed(lambda tensor: tensor[..., :0], ("query", "key"))(device)
    made.right_is = "mean of V"
    return made


SIZES_OF_ZERO = [
    EdgeCase(
        name="no_keys",
        what="Sk = 0",
        make=lambda device: call(device, seqlen_k=0),
        ours={"": NO_KEY},
        fa2="0, LSE ∞ (its source)",
    ),
    EdgeCase(
        name="no_queries",
        what="Sq = 0",
        make=lambda device: call(device, seqlen_q=0),
        ours={"": "empty"},
    ),
    EdgeCase(
        name="no_batch",
        what="B = 0",
        make=lambda device: call(device, batch=0),
        ours={"": "empty"},
        fa2="refused (its source)",
    ),
    EdgeCase(
        name="no_heads",
        what="no heads",
        make=lambda device: call(device, heads=0),
        ours={"": "empty"},
    ),
    EdgeCase(
        name="no_head_dim",
        what="q and k of head_dim 0: every score is 0",
        make=_no_head_dim,
        ours={"": "mean of V"},
    ),
    EdgeCase(
        name="no_head_dim_v",
        what="V of head_dim 0",
        make=_changed(lambda tensor: tensor[..., :0], ("value",)),
        ours={"": "empty"},
    ),
    EdgeCase(
        name="no_keys_masked",
        what="Sk = 0 with a mask [Sq, 0]",
        make=lambda device: call(
            device, seqlen_k=0, attn_mask=torch.ones(SEQLEN, 0, dtype=torch.bool, device=device)
        ),
        ours={"": NO_KEY},
        fa2="no masks",
    ),
]


def _dimension(
    head_dim: int, what: str, *, head_dim_v: int | None = None, ours: str = "right", fa2: str = "right"
) -> EdgeCase:
    name = f"head_dim_{head_dim}" + (f"_{head_dim_v}" if head_dim_v else "")
    make = lambda device: call(device, head_dim=head_dim, head_dim_v=head_dim_v)  # noqa: E731
    return EdgeCase(name=name, what=what, make=make, ours={"": ours}, fa2=fa2)


HEADS_AND_HEAD_DIMS = [
    EdgeCase(
        name="grouped_heads",
        what="4 query heads to each key head, `enable_gqa`",
        make=lambda device: call(device, heads=8, heads_kv=2, enable_gqa=True),
        ours=RIGHT,
        fa2="right",
    ),
    EdgeCase(
        name="one_head",
        what="one key head, `enable_gqa`",
        make=lambda device: call(device, heads=6, heads_kv=1, enable_gqa=True),
        ours=RIGHT,
        fa2="right",
    ),
    EdgeCase(
        name="grouped_heads_unasked",
        what="4 to 2 heads without `enable_gqa`",
        make=lambda device: call(device, heads=4, heads_kv=2),
        ours=REFUSED,
        fa2="right",
    ),
    EdgeCase(
        name="heads_that_do_not_divide",
        what="4 to 3 heads, `enable_gqa`",
        make=lambda device: call(device, heads=4, heads_kv=3, enable_gqa=True),
        ours=REFUSED,
        fa2="refused",
    ),
    _dimension(8, "head_dim 8"),
    _dimension(72, "head_dim 72"),
    _dimension(20, "head_dim 20: no multiple of 8 (q, k and v are copied)"),
    _dimension(256, "head_dim 256"),
    _dimension(264, "head_dim 264", ours="refused", fa2="refused"),
    _dimension(64, "value with head_dim 32, query with 64", head_dim_v=32, fa2="refused (its source)"),
    _dimension(32, "value with head_dim 96, query with 32", head_dim_v=96, fa2="refused (its source)"),
]


def _fused_qkv(device: str) -> Call:
    qkv = rand(device, BATCH, SEQLEN, 3, HEADS, HEAD_DIM, seed=5)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    return Call(query=query, key=key, value=value)


def _without_grad(device: str) -> Call:
    made = call(device)
    made.query = made.query.requires_grad_()
    return made


def _ranks(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[(0,) * (4 - rank)] if rank < 4 else tensor[None].expand(2, *tensor.shape)


TYPES_AND_LAYOUTS = [
    EdgeCase(name="float32", what="float32", make=_changed(lambda t: t.float()), ours=REFUSED, fa2="refused"),
    EdgeCase(
        name="float64", what="float64", make=_changed(lambda t: t.double()), ours=REFUSED, fa2="refused"
    ),
    EdgeCase(
        name="mixed_types",
        what="K in another type",
        make=_changed(lambda t: t.bfloat16(), ("key",)),
        ours=REFUSED,
        fa2="refused (its source)",
    ),
    EdgeCase(
        name="requires_grad",
        what="Q requires grad, grad mode on",
        make=_without_grad,
        ours={"": "right or refused"},  # measured answers may be older than the backward pass
        fa2="right",
    ),
    EdgeCase(
        name="sparse", what="sparse Q", make=_changed(lambda t: t.to_sparse(), ("query",)), ours=REFUSED
    ),
    EdgeCase(name="two_dimensions", what="[S, D]", make=_changed(_ranks(2)), ours=RIGHT, fa2="4-D only"),
    EdgeCase(name="three_dimensions", what="[H, S, D]", make=_changed(_ranks(3)), ours=RIGHT, fa2="4-D only"),
    EdgeCase(
        name="five_dimensions", what="[2, B, H, S, D]", make=_changed(_ranks(5)), ours=RIGHT, fa2="4-D only"
    ),
    EdgeCase(
        name="broadcast_batch",
        what="K and V of batch 1, Q of batch 2",
        make=_changed(lambda t: t[:1], ("key", "value")),
        ours=RIGHT,
    ),
    EdgeCase(
        name="expanded_batch",
        what="K and V expanded over the batch (stride 0)",
        make=_changed(lambda t: t[:1].expand_as(t), ("key", "value")),
        ours=RIGHT,
    ),
    EdgeCase(name="fused_qkv", what="slices of one QKV tensor", make=_fused_qkv, ours=RIGHT, fa2="right"),
    EdgeCase(
        name="strided_last_dimension",
        what="head_dim not contiguous",
        make=_changed(lambda t: t.mT.contiguous().mT),
        ours=RIGHT,
        fa2="refused (its source)",
    ),
]
