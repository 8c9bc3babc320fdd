"""The arguments of attention, listed once: records that every step of a call hands on.

A field's name, default and place are those of the argument everywhere. Its `Argument` says how torch's
operators take it, whose schemas follow from here, and which functions have it. Public functions write their
signatures out for readers and type checkers, and a test holds them to this list.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from ..library.registry import Asked, Family
from ..problem import Causal
from .operands import Layout

if TYPE_CHECKING:
    import torch

    from ..dropout import PhiloxState

    ResultTuple = tuple[Any, torch.Tensor | None, PhiloxState | torch.Tensor]  # a Result, or its fields


class Form(Enum):
    """How a call's sequences lie in its tensors; the values are the names of the public functions."""

    PADDED = "attention"  # [batch, heads, seqlen, head_dim], all of one length
    PACKED = "attention_varlen"  # [total, heads, head_dim], one behind the other


class Argument(NamedTuple):
    """How torch's operators take an argument, and the only form of calls that has it; None for both."""

    type: str  # of a schema
    form: Form | None = None


_PADDED = Argument("Tensor?", Form.PADDED)
_READ = Argument("Tensor?")


class Options(NamedTuple):
    """What a call asks for besides its tensors, as the caller gave it."""

    family: Annotated[Asked, Argument("str", Form.PADDED)] = Family.FMHA_FWD
    causal: Annotated[Causal | str | None, Argument("str?")] = None
    scale: Annotated[float | None, Argument("float?")] = None
    enable_gqa: Annotated[bool, Argument("bool")] = True
    kernel: Annotated[str | None, Argument("str?")] = None
    return_lse: Annotated[bool, Argument("bool")] = False
    p_dropout: Annotated[float, Argument("float")] = 0.0
    layout: Annotated[Layout | str, Argument("str", Form.PADDED)] = "bhsd"
    window: Annotated[tuple[int, int] | None, Argument("int[]?")] = None


class Inputs(NamedTuple):
    """The tensors of a call, as the caller gave them. `out` is written; `philox` may also be two integers."""

    query: Annotated[Any, Argument("Tensor")]
    key: Annotated[Any, Argument("Tensor")]
    value: Annotated[Any, Argument("Tensor")]
    out: Annotated[Any, Argument("Tensor(a!)")] = None
    attn_mask: Annotated[Any, _PADDED] = None
    seqlens_q: Annotated[Any, _PADDED] = None
    seqlens_k: Annotated[Any, _PADDED] = None
    cu_seqlens_q: Annotated[Any, Argument("Tensor", Form.PACKED)] = None
    cu_seqlens_k: Annotated[Any, Argument("Tensor", Form.PACKED)] = None
    max_seqlen_q: Annotated[Any, Argument("SymInt", Form.PACKED)] = None
    max_seqlen_k: Annotated[Any, Argument("SymInt", Form.PACKED)] = None
    philox: Annotated[Any, _READ] = None
    sinks: Annotated[Any, _READ] = None

    @property
    def form(self) -> Form:
        return Form.PADDED if self.cu_seqlens_q is None else Form.PACKED


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


def arguments_of(record: type[Options] | type[Inputs], form: Form) -> dict[str, Argument]:
    """What calls of `form` take of a record, by name and in its order."""
    hints = get_type_hints(record, include_extras=True)
    found = {name: hints[name].__metadata__[0] for name in record._fields}
    return {name: argument for name, argument in found.items() if argument.form in (None, form)}


def as_schema(record: type[Options] | type[Inputs], form: Form, *without: str) -> str:
    """These arguments as torch's schemas write them, those of `without` left out."""

    def text(name: str, argument: Argument) -> str:
        if argument.type in ("Tensor", "Tensor(a!)", "SymInt"):
            return f"{argument.type} {name}"
        default = record._field_defaults[name]
        default = default.value if isinstance(default, Family) else default
        return f"{argument.type} {name}=" + (f'"{default}"' if isinstance(default, str) else str(default))

    return ", ".join(text(*item) for item in arguments_of(record, form).items() if item[0] not in without)
