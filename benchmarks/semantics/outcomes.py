"""A call of attention, its right answer in float64, and how results are put into words.

The right answer treats a key that a row does not see as if it did not exist, whatever it holds; a row that
sees no key gives 0 and a softmax_lse of −∞. NaN and infinity elsewhere have no right answer: the regions of a
call separate what they may touch from what they may not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 1e-3  # relative beyond 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the output [..., H, Sq, Dv]: some batches, rows and columns, each all when None."""

    batches: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None

    def of(self, out: torch.Tensor) -> torch.Tensor:
        """The part of an output."""
        if self.batches is not None:
            out = out[..., list(self.batches), :, :, :]
        if self.rows is not None:
            out = out[..., list(self.rows), :]
        return out if self.columns is None else out[..., list(self.columns)]

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The part of a softmax_lse [..., H, Sq]."""
        if self.batches is not None:
            lse = lse[..., list(self.batches), :, :]
        return lse if self.rows is None else lse[..., list(self.rows)]


EVERYTHING = {"": Region()}


@dataclasses.dataclass(kw_only=True)
class Call:
    """The arguments of one call, in torch's words, and what may differ from torch.

    own: arguments of `attention` in place of attn_mask and is_causal, where they say more.
    run_own: calls this library in another way and returns (out, softmax_lse or None).
    has_torch: whether torch can be asked the same at all.
    visible: boolean, broadcasts to [..., H, Sq, Sk]: keys that lengths or bottom_right let a row see.
    candidates: other answers by name, each [..., H, Sq, Dv], to within a tolerance.
    view: what is looked at instead of the output itself.
    right_is: what the right answer is, in words, where that says more.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    own: Mapping[str, Any] | None = None
    run_own: Callable[[], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    has_torch: bool = True
    visible: torch.Tensor | None = None
    candidates: Mapping[str, tuple[torch.Tensor, float]] = dataclasses.field(default_factory=dict)
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    right_is: str = "right"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of F.scaled_dot_product_attention; those that keep their default are left out."""
        found = {
            "attn_mask": self.attn_mask,
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
        }
        return {name: value for name, value in found.items() if value is not None and value is not False}


def right_answer(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) in float64."""
    q, k, v = (tensor.detach().double().nan_to_num(0, 0, 0) for tensor in (call.query, call.key, call.value))
    if q.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]):
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    scale = call.scale if call.scale is not None else 1 / math.sqrt(max(1, q.shape[-1]))
    scores = q @ k.transpose(-2, -1) * scale
    visible = torch.ones_like(scores, dtype=torch.bool)
    if call.is_causal:
        visible = visible.tril()
    if call.visible is not None:
        visible = visible & call.visible
    if call.attn_mask is not None and call.attn_mask.dtype is torch.bool:
        visible = visible & call.attn_mask
    elif call.attn_mask is not None:
        bias = call.attn_mask.detach().double()
        visible = visible & (bias != -math.inf)
        scores = scores + bias.nan_to_num(0, 0, 0)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1) if scores.shape[-1] else torch.full(scores.shape[:-1], -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return weights @ v, lse.to(scores)


def in_words(call: Call, region: Region, out: torch.Tensor, lse: torch.Tensor | None) -> str:
    """What lies in a region, such as `right` or `0, LSE −∞`; softmax_lse is mentioned unless it is right."""
    right, right_lse = right_answer(call)
    words = _output(call, region, out, right)
    if lse is None:
        return words
    if lse.shape != right_lse.shape:
        return f"{words}, LSE of another shape"
    found, expected = region.of_lse(lse.double()), region.of_lse(right_lse)
    if torch.allclose(found, expected, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE):
        minus_infinity = found.numel() > 0 and bool((found == -math.inf).all())
        return f"{words}, LSE −∞" if minus_infinity else words
    return f"{words}, LSE {_number(found) or 'other'}"


def _output(call: Call, region: Region, out: torch.Tensor, right: torch.Tensor) -> str:
    if out.shape != right.shape:
        return f"shape {tuple(out.shape)}"
    if call.view is not None:
        found, expected = call.view(out.double()), call.view(right)
    else:
        found, expected = region.of(out.double()), region.of(right)
    if found.numel() == 0:
        return "empty"
    number = _number(found)
    if number is not None:
        return number
    tolerance = TOLERANCE.get(out.dtype, 4e-3)
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        return call.right_is
    for name, (tensor, within) in call.candidates.items():
        if torch.allclose(found, region.of(tensor.double()), rtol=within, atol=within):
            return name
    return "some NaN" if bool(found.isnan().any()) else "other"


def _number(values: torch.Tensor) -> str | None:
    """The one thing that all values are, or None."""
    if bool(values.isnan().all()):
        return "NaN"
    if bool((values == 0).all()):
        return "0"
    if bool((values == -math.inf).all()):
        return "−∞"
    return "±∞" if bool(values.isinf().all()) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeCase:
    """One line of the table.

    make: (device) → Call. ours: what this library promises, by region; "a or b" allows both.
    fa2: what FlashAttention-2's documentation says, not measured; empty where it says nothing.
    """

    name: str
    what: str
    make: Callable[[str], Call]
    ours: Mapping[str, str]
    regions: Mapping[str, Region] = dataclasses.field(default_factory=lambda: EVERYTHING)
    fa2: str = ""
