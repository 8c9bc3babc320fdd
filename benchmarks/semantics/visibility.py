"""Edge cases of what a row sees: rows without a key, causal masks, forms of masks."""

from __future__ import annotations

import torch

from benchmarks.semantics.inputs import (
    BATCH,
    HEADS,
    ROW_AND_OTHERS,
    SEQLEN,
    all_true,
    as_bias,
    call,
    lower_right,
    rand,
    without_key,
    without_row,
)
from benchmarks.semantics.outcomes import Call, EdgeCase, Region

RIGHT = {"": "right"}
NO_KEY = "0, LSE −∞"
NO_MASKS = "no masks"
REFUSED = {"": "refused"}


def _least_finite_row(
    device: str, dtype: torch.dtype, query_dtype: torch.dtype = torch.float16, right_is: str = "right"
) -> Call:
    bias = as_bias(without_row(device), dtype, torch.finfo(dtype).min)
    return call(device, attn_mask=bias, dtype=query_dtype, right_is=right_is)


def _billion_row(device: str) -> Call:
    """float64 would hold the sums apart, which is the right answer; float32 does not."""
    made = call(device, attn_mask=as_bias(without_row(device), torch.float32, -1e9))
    mean = made.value.double().mean(-2, keepdim=True).expand(made.query.shape)
    made.candidates = {"mean of V": (mean, 1e-2)}
    return made


def _lower_right(device: str, seqlen_q: int, seqlen_k: int) -> Call:
    """bottom_right for this library, the mask that says the same for torch."""
    mask = lower_right(device, seqlen_q, seqlen_k)
    made = call(device, seqlen_q=seqlen_q, seqlen_k=seqlen_k, attn_mask=mask)
    made.own = {"causal": "bottom_right"}
    return made


ROWS_WITHOUT_A_KEY = [
    EdgeCase(
        name="row_false",
        what="boolean mask, a row all False",
        make=lambda device: call(device, attn_mask=without_row(device)),
        regions=ROW_AND_OTHERS,
        ours={"the row": NO_KEY, "others": "right"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="all_false",
        what="boolean mask, all False",
        make=lambda device: call(device, attn_mask=~all_true(device)),
        ours={"": NO_KEY},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="row_minus_infinity",
        what="bias, a row all −∞",
        make=lambda device: call(device, attn_mask=as_bias(without_row(device))),
        regions=ROW_AND_OTHERS,
        ours={"the row": NO_KEY, "others": "right"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="row_least_f16",
        what="fp16 bias, a row all `finfo(float16).min`: the scores count, rounded to 1/256",
        make=lambda device: _least_finite_row(device, torch.float16),
        regions=ROW_AND_OTHERS,
        ours={"the row": "right", "others": "right"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="row_least_f32",
        what="fp32 bias, a row all `finfo(float32).min`: no float holds the sums apart",
        make=lambda device: _least_finite_row(device, torch.float32, right_is="mean of V"),
        regions={"the row": ROW_AND_OTHERS["the row"]},
        ours={"the row": "mean of V, LSE other"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="row_least_bf16",
        what="bf16, a row all `finfo(bfloat16).min`",
        make=lambda device: _least_finite_row(device, torch.bfloat16, torch.bfloat16, "mean of V"),
        regions={"the row": ROW_AND_OTHERS["the row"]},
        ours={"the row": "mean of V, LSE other"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="row_billion",
        what="fp32 bias, a row all −10⁹",
        make=_billion_row,
        regions={"the row": ROW_AND_OTHERS["the row"]},
        ours={"the row": "mean of V"},
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="key_least_f16",
        what="`finfo(float16).min` at some keys: they weigh 0",
        make=lambda device: call(
            device, attn_mask=as_bias(without_key(device), torch.float16, torch.finfo(torch.float16).min)
        ),
        ours=RIGHT,
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="bottom_right_more_queries",
        what="causal `bottom_right`, Sq > Sk: the first Sq − Sk rows see no key",
        make=lambda device: _lower_right(device, SEQLEN, 24),
        regions={"first rows": Region(rows=(0, 7)), "others": Region(rows=(8, 31))},
        ours={"first rows": NO_KEY, "others": "right"},
        fa2="0; others right",
    ),
]

CAUSAL = [
    EdgeCase(
        name="top_left",
        what="`is_causal`, Sq = Sk",
        make=lambda device: call(device, is_causal=True),
        ours=RIGHT,
        fa2="right",
    ),
    EdgeCase(
        name="top_left_more_keys",
        what="`is_causal`, Sq < Sk: row i sees keys 0 to i",
        make=lambda device: call(device, seqlen_q=24, is_causal=True),
        ours=RIGHT,
        fa2="is `bottom_right`",
    ),
    EdgeCase(
        name="top_left_more_queries",
        what="`is_causal`, Sq > Sk",
        make=lambda device: call(device, seqlen_k=24, is_causal=True),
        ours=RIGHT,
        fa2="is `bottom_right`",
    ),
    EdgeCase(
        name="top_left_one_query",
        what="`is_causal`, Sq = 1: it sees key 0 alone",
        make=lambda device: call(device, seqlen_q=1, is_causal=True),
        ours=RIGHT,
        fa2="is `bottom_right`",
    ),
    EdgeCase(
        name="bottom_right_more_keys",
        what="causal `bottom_right`, Sq < Sk: the last row sees every key (torch: as a mask)",
        make=lambda device: _lower_right(device, 24, SEQLEN),
        ours=RIGHT,
        fa2="right",
    ),
    EdgeCase(
        name="bottom_right_one_query",
        what="causal `bottom_right`, Sq = 1: it sees every key (torch: as a mask)",
        make=lambda device: _lower_right(device, 1, SEQLEN),
        ours=RIGHT,
        fa2="right",
    ),
    EdgeCase(
        name="causal_and_mask",
        what="`is_causal` with a boolean mask: both must let a key through",
        make=lambda device: call(device, is_causal=True, attn_mask=without_key(device)),
        ours=RIGHT,
        fa2=NO_MASKS,
    ),
    EdgeCase(
        name="causal_and_bias",
        what="`is_causal` with a bias",
        make=lambda device: call(device, is_causal=True, attn_mask=rand(device, 1, 1, SEQLEN, SEQLEN)),
        ours=RIGHT,
        fa2="`alibi_slopes`",
    ),
]


def _mask(device: str, *shape: int) -> torch.Tensor:
    """Boolean, about 70 % True."""
    return rand(device, *shape, seed=4) < 0.5


def _offset_by_one(mask: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an aligned address."""
    buffer = torch.empty(mask.numel() + 1, dtype=mask.dtype, device=mask.device)[1:]
    return buffer.view(mask.shape).copy_(mask)


def _form(name: str, what: str, *shape: int, ours: str = "right") -> EdgeCase:
    return EdgeCase(
        name=f"mask_{name}",
        what=f"boolean mask {what}",
        make=lambda device: call(device, attn_mask=_mask(device, *shape)),
        ours={"": ours},
        fa2=NO_MASKS,
    )


def _stored(name: str, what: str, change: object) -> EdgeCase:
    def make(device: str) -> Call:
        bias = rand(device, BATCH, HEADS, SEQLEN, SEQLEN, seed=4)
        return call(device, attn_mask=change(bias))  # type: ignore[operator]

    return EdgeCase(name=f"bias_{name}", what=f"bias, {what}", make=make, ours=RIGHT, fa2=NO_MASKS)


def _typed(name: str, what: str, dtype: torch.dtype, ours: str = "right") -> EdgeCase:
    def make(device: str) -> Call:
        return call(device, attn_mask=rand(device, 1, 1, SEQLEN, SEQLEN, seed=4).round().to(dtype))

    return EdgeCase(name=f"bias_{name}", what=what, make=make, ours={"": ours}, fa2=NO_MASKS)


def _needs_grad(device: str) -> Call:
    return call(device, attn_mask=rand(device, 1, 1, SEQLEN, SEQLEN, seed=4).requires_grad_())


FORMS_OF_MASKS = [
    _form("keys", "[Sk]", SEQLEN),
    _form("row", "[1, Sk]", 1, SEQLEN),
    _form("column", "[Sq, 1]", SEQLEN, 1),
    _form("square", "[Sq, Sk]", SEQLEN, SEQLEN),
    _form("padding", "[B, 1, 1, Sk]", BATCH, 1, 1, SEQLEN),
    _form("heads", "[H, Sq, Sk]", HEADS, SEQLEN, SEQLEN),
    _form("head_by_head", "[1, H, Sq, Sk]", 1, HEADS, SEQLEN, SEQLEN),
    _form("full", "[B, H, Sq, Sk]", BATCH, HEADS, SEQLEN, SEQLEN),
    _form("wrong", "[Sq, Sk + 1], which does not broadcast", SEQLEN, SEQLEN + 1, ours="refused"),
    _stored("unaligned", "one element behind an aligned address", _offset_by_one),
    _stored("transposed", "columns not contiguous", lambda bias: bias.mT.contiguous().mT),
    _stored(
        "expanded", "expanded over batch and heads (strides 0)", lambda bias: bias[:1, :1].expand_as(bias)
    ),
    _stored("expanded_rows", "expanded over rows", lambda bias: bias[:, :, :1].expand_as(bias)),
    EdgeCase(
        name="bias_odd",
        what="bias, 33 keys: rows at odd addresses",
        make=lambda device: call(
            device, seqlen_k=33, attn_mask=rand(device, BATCH, HEADS, SEQLEN, 33, seed=4)
        ),
        ours=RIGHT,
        fa2=NO_MASKS,
    ),
    _typed("f32", "fp32 bias, fp16 inputs", torch.float32),
    _typed("bf16", "bf16 bias, fp16 inputs", torch.bfloat16),
    _typed("f64", "fp64 bias", torch.float64, ours="refused"),
    _typed("integers", "int32 mask", torch.int32, ours="refused"),
    EdgeCase(
        name="bias_requires_grad",
        what="bias that requires grad",
        make=_needs_grad,
        ours={"": "right or refused"},  # measured answers may be older than its gradient
        fa2=NO_MASKS,
    ),
]
