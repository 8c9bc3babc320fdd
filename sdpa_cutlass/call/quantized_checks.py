"""What can be quantised ahead: keys and values in 16 bits, where torch need not see what becomes of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays.tensors import as_tensor, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..library.registry import Family, Precision
from . import torch_hooks
from .checks import check_form
from .operands import check_no_grad, is_virtual
from .precision import asked_of

if TYPE_CHECKING:
    import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

SHAPE = "[batch, num_heads_kv, seqlen_k, head_dim]"


def precision_of(precision: object) -> Precision:
    """What `quantize_kv` was asked for. Raises ArgumentTypeError or ArgumentError."""
    asked = asked_of(precision)
    if isinstance(asked, Family):
        raise ArgumentError(f"precision={precision!r} quantises nothing; allowed are 'int8_qk' and 'int8'")
    return asked


def checked_pair(key: object, value: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors of one form, whose memory holds their values. Raises the package's errors."""
    refuse_tracing("key")
    tensors = {"key": as_tensor("key", key), "value": as_tensor("value", value)}
    first = tensors["key"]
    for name, tensor in tensors.items():
        if not is_tensor(tensor):
            raise ArgumentTypeError(f"{name} is no torch.Tensor; nothing else can be quantised ahead")
        if is_virtual(tensor):
            raise UnsupportedError(
                f"{name} is a {type(tensor).__name__} without memory, as inside torch.func or of a "
                "FakeTensorMode; nothing can be quantised there"
            )
        check_form(name, tensor, first, ("cpu", "cuda"), of="key")
        if tensor.dim() != 4:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; allowed is {SHAPE}")
    if tensors["value"].shape[:3] != first.shape[:3]:
        raise ArgumentError(
            f"value has shape {tuple(tensors['value'].shape)}; key has {tuple(first.shape)}: batch, "
            "num_heads_kv and seqlen_k must be the same"
        )
    check_no_grad(tensors)
    resolved = [tensor.resolve_neg() for tensor in tensors.values()]
    return resolved[0], resolved[1]


def refuse_tracing(name: str) -> None:
    """Raises UnsupportedError where torch would have to see what is done with `name`."""
    if torch_hooks.is_dynamo_compiling() or torch_hooks.is_watching():
        raise UnsupportedError(
            f"{name}: torch does not see what becomes of a QuantizedKV, and here it is tracing or computes "
            "forward-mode gradients; call it outside"
        )


def out_of_graphs(function: _Function) -> _Function:
    """`function`, which torch.compile leaves out of its graphs, with all that it calls."""
    found: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not found:
            if "torch._dynamo" not in sys.modules:  # then nothing was compiled; to import it takes a second
                return function(*args, **kwargs)
            found.append(sys.modules["torch"].compiler.disable(function))
        return found[0](*args, **kwargs)

    return call  # type: ignore[return-value]
