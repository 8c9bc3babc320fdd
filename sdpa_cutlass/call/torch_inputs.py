"""What is done to the arguments of a call before they are checked, and which calls torch has to take.

Tensors without memory (FakeTensor, functional tensors, those of torch.func) are for torch's dispatcher: such
a call becomes an operator. So does one that torch records, and for that its arguments take the types that
operators have. Views with the negative bit become copies: their memory holds the negatives.
"""

from __future__ import annotations

import sys
from typing import Any

from ..arrays.tensors import as_tensor, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from . import checks, extras, shard
from .arguments import Form, Inputs, Options
from .binding import upper_bound
from .operands import is_virtual

_BOUNDS = slice(Inputs._fields.index("max_seqlen_q"), Inputs._fields.index("max_seqlen_k") + 1)  # no tensors
_ALWAYS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")  # where they are arguments at all
_OPTIONAL = tuple(
    name
    for name in (*Inputs._fields[: _BOUNDS.start], *Inputs._fields[_BOUNDS.stop :])
    if name not in (*_ALWAYS, "out", "philox")
)


def are_plain_tensors(inputs: Inputs) -> bool:
    """Whether q, k, v and what else is given are tensors of torch's own type whose memory holds their values.

    True of nearly all calls, and asked in a tenth of the time that the functions below take.
    """
    torch = sys.modules.get("torch")
    if torch is None or not type(inputs.query) is type(inputs.key) is type(inputs.value) is torch.Tensor:
        return False
    try:
        for value in (*inputs[: _BOUNDS.start], *inputs[_BOUNDS.stop :]):
            if value is None:
                continue
            if type(value) is not torch.Tensor or not value.data_ptr() or value.is_neg():
                return False
    except RuntimeError:  # it has no address
        return False
    return True


def read_arrays(inputs: Inputs) -> dict[str, Any]:
    """The arrays and tensors that a call reads, by name; those that it has to have even if they are None."""
    found = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.cu_seqlens_q is not None:
        found["cu_seqlens_q"], found["cu_seqlens_k"] = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    for name in _OPTIONAL:
        if (value := getattr(inputs, name)) is not None:
            found[name] = value
    if inputs.philox is not None and is_tensor(inputs.philox):
        found["philox"] = inputs.philox
    return found


def needs_dispatcher(tensors: dict[str, Any], *, is_operator: bool) -> bool:
    """True when one of `tensors`, some of which may be None, has no memory and torch can serve it.

    Raises UnsupportedError where torch would have to write through "out" and cannot; ArgumentError where it
    has had its turn: `is_operator` says that an operator's kernel asks.
    """
    virtual = {name: tensor for name, tensor in tensors.items() if tensor is not None and is_virtual(tensor)}
    for name, tensor in virtual.items():
        if is_operator:
            raise ArgumentError(
                f"{name} has no memory (its storage was freed); allowed is a tensor with data"
            )
        if tensors.get("out") is not None and type(tensor) is sys.modules["torch"].Tensor:
            raise UnsupportedError(
                f"out is given and {name} has no memory, as inside torch.func: nothing can be written there; "
                "leave out away"
            )
    return bool(virtual)


def resolved(inputs: Inputs) -> Inputs:
    """`inputs` itself, or with copies in place of views that have the negative bit."""
    negative = {}
    for name, value in zip(Inputs._fields, inputs, strict=True):
        if value is not None and name != "out" and is_tensor(value) and value.is_neg():
            negative[name] = value.resolve_neg()
    return inputs._replace(**negative) if negative else inputs


def with_flags(options: Options) -> Options:
    """`options` with booleans for flags. Raises ArgumentTypeError for what is neither true nor false."""
    enable_gqa: object = options.enable_gqa
    return_lse: object = options.return_lse
    if type(enable_gqa) is type(return_lse) is bool:
        return options
    return options._replace(
        enable_gqa=flag("enable_gqa", enable_gqa), return_lse=flag("return_lse", return_lse)
    )


def flag(name: str, value: Any) -> bool:
    """`value` as a bool. Raises ArgumentTypeError where it is none, such as an array."""
    if isinstance(value, bool):
        return value
    try:
        return bool(value)
    except Exception as error:
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; allowed is a bool") from error


def recordable(options: Options) -> Options:
    """`options` in the types that operators take.

    Under torch.jit.trace sizes are tensors, and so is what callers compute from them: they become numbers.
    """
    if options.kernel is not None and not isinstance(options.kernel, str):
        raise ArgumentTypeError(
            f"kernel={options.kernel!r} is a {type(options.kernel).__name__}; allowed is a name or None"
        )
    scale, p_dropout = number(options.scale), number(options.p_dropout)
    if scale is not None:
        checks.softmax_scale(scale, 0)
    extras.dropout_probability(p_dropout)
    return with_flags(options)._replace(
        causal=options.causal if shard.read(options.causal) else checks.causal_alignment(options.causal),
        layout=checks.tensor_layout(options.layout),
        scale=scale,
        p_dropout=p_dropout,
        window=None if options.window is None else extras.checked_window(options.window),
    )


def recordable_inputs(inputs: Inputs) -> Inputs:
    """Arrays as tensors, sizes as numbers. What is not given stays None, and integers for philox stay too."""
    packed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

    def recordable(name: str, value: Any) -> Any:
        if value is None and not (inputs.form is Form.PACKED and name in packed):
            return None
        if name == "philox" and isinstance(value, (tuple, list)):
            return value
        if name in ("max_seqlen_q", "max_seqlen_k"):
            return upper_bound(name, number(value))
        return as_tensor(name, value, writable=name == "out")

    return Inputs(*map(recordable, Inputs._fields, inputs))


def number(value: Any) -> Any:
    """`value`, or what it holds if it is a tensor that torch.jit.trace made of a size."""
    if is_tensor(value) and value.dim() == 0 and sys.modules["torch"]._C._is_tracing():
        return value.item()
    return value
