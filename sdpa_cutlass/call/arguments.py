"""The arguments of a call as records: what callers gave, in the order in which every step hands it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..library.registry import Asked, Family
from ..problem import Causal
from .operands import Layout

if TYPE_CHECKING:
    import torch

    from ..dropout import PhiloxState

    ResultTuple = tuple[Any, torch.Tensor | None, PhiloxState | torch.Tensor]  # a Result, or its fields


class Options(NamedTuple):
    """What a call asks for besides its tensors, as the caller gave it."""

    family: Asked = Family.FMHA_FWD
    causal: Causal | str | None = None
    scale: float | None = None
    enable_gqa: bool = True
    kernel: str | None = None
    return_lse: bool = False
    p_dropout: float = 0.0
    layout: Layout | str = "bhsd"
    window: tuple[int, int] | None = None


class Inputs(NamedTuple):
    """The tensors of a call, as the caller gave them. `out` is written; `philox` may also be two integers."""

    query: Any
    key: Any
    value: Any
    out: Any = None
    attn_mask: Any = None
    seqlens_q: Any = None
    seqlens_k: Any = None
    philox: Any = None
    sinks: Any = None


class Result(NamedTuple):
    """What a call gives. `philox` is what the dropout mask is made from; (0, 0) where none was applied."""

    out: Any
    softmax_lse: torch.Tensor | None
    philox: PhiloxState | torch.Tensor


def chosen(result: ResultTuple, return_lse: bool, return_philox: bool) -> torch.Tensor | tuple[Any, ...]:
    """out alone, or the tuple that a public function returns."""
    out, softmax_lse, philox = result
    if return_philox:
        return (out, softmax_lse, philox) if return_lse else (out, philox)
    return (out, softmax_lse) if return_lse else out


class Lengths(NamedTuple):
    """Where the sequences lie, as the caller gave it."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
