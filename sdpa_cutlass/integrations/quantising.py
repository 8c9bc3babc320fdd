"""Which calls `enable(precision=...)` quantises; torch_sdpa.py serves them.

Nothing is quantised unless a precision was asked for, and of those calls only what has a quantised kernel,
with or without a mask: no dropout, head_dims up to MAX_HEAD_DIM, and at least `min_seqlen` keys. Everything
else is computed exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..call.precision import asked_of
from ..errors import ArgumentError
from ..library.registry import Precision

if TYPE_CHECKING:
    import torch

MIN_SEQLEN = 2048
"""Keys from which on `enable` quantises by default: with fewer, making the bytes costs much of the gain."""

MAX_HEAD_DIM = 128


class Quantising(NamedTuple):
    """Which calls are to be quantised: those of at least `min_seqlen` keys."""

    precision: Precision
    min_seqlen: int


def checked_quantising(precision: Precision | str | None, min_seqlen: int) -> Quantising | None:
    """What these arguments of `enable` ask for; None where everything stays exact.

    Raises ArgumentError or ArgumentTypeError for a precision that is not known and a `min_seqlen` below 0.
    """
    asked = asked_of(precision)
    if isinstance(min_seqlen, bool) or not isinstance(min_seqlen, int) or min_seqlen < 0:
        raise ArgumentError(f"min_seqlen={min_seqlen!r}; allowed is an int from 0 on")
    return Quantising(asked, min_seqlen) if isinstance(asked, Precision) else None


def is_to_be_quantised(
    quantising: Quantising,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
) -> bool:
    """Whether a call is one of those that were asked for and that have a quantised kernel."""
    if dropout_p or key.shape[-2] < quantising.min_seqlen:
        return False
    return max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM


def as_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs as torch.autocast hands them to F.scaled_dot_product_attention."""
    import torch

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        from .torch_refusals import autocast_dtype

        query, key, value = (
            tensor.to(autocast_dtype(device_type, tensor.dtype)) for tensor in (query, key, value)
        )
    return query, key, value
