"""What all operators of torch.ops.sdpa_cutlass share: registration, autocast, and the traced arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..call import checks, extras, rng
from ..call.operands import check_no_grad
from ..dropout import checked_philox
from ..errors import ArgumentError, UnsupportedError
from ..library import torch_state

# The result is laid out as query is, so a compiler must hand over the strides that it traced.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

_library = torch.library.Library("sdpa_cutlass", "DEF")


def _autocast(device_type: str, op: Any, mask_position: int | None) -> Any:
    """A kernel that casts as torch.autocast does, then calls `op` with autocast off."""

    def kernel(*args: Any, **options: Any) -> Any:
        query, key, value = checks.autocast_inputs(*args[:3])
        rest = list(args[3:])
        if mask_position is not None and len(args) > mask_position:
            rest[mask_position - 3] = extras.autocast_mask(args[mask_position], query)
        with torch.autocast(device_type, enabled=False):
            return op(query, key, value, *rest, **options)

    return kernel


def check_has_philox(p_dropout: float, philox: torch.Tensor | None) -> None:
    """Raises ArgumentError: an operator that drew random numbers would not be pure."""
    if philox is None and 0 < p_dropout < 1:
        raise ArgumentError(f"philox is None and p_dropout={p_dropout!r}; the operator needs a tensor [2]")


def no_lse(query: torch.Tensor) -> torch.Tensor:
    """Stands for softmax_lse where it was not asked for."""
    return torch.empty(0, dtype=torch.float32, device=query.device)


_DIFFERENTIABLE = frozenset({"query", "key", "value", "attn_mask", "sinks"})
_BACKENDS = frozenset({torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA})


def _autograd(op: Any, backend_kernel: Any, differentiable: Any = None) -> Any:
    """A kernel that refuses what torch would differentiate, and hands everything else on.

    To the backend's kernel if that comes next: the dispatcher would take longer than the rest of the call.
    `differentiable`, if given, takes the arguments of calls of which an input requires grad that has one.
    """
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            tensors = _tensors_of(names, args)
            is_asked = any(
                name in _DIFFERENTIABLE and tensor.requires_grad for name, tensor in tensors.items()
            )
            if differentiable is not None and is_asked:
                _check_no_tangents(tensors)
                if torch.is_grad_enabled():
                    _check_no_transform(names)
                    return differentiable(*args, **options)
            _check_no_derivatives(tensors)
        rest = keyset & torch._C._after_ADInplaceOrView_keyset
        if rest.highestPriorityTypeId() in _BACKENDS:
            return backend_kernel(*args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)

    return kernel


def _tensors_of(names: Sequence[str], args: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among `args`, which leave out trailing defaults, and in lists among them."""
    found = {}
    for name, value in zip(names, args, strict=False):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found |= {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return found


def _check_no_transform(names: Sequence[str]) -> None:
    """Raises UnsupportedError where torch.func has the operator: it takes no node that an operator makes."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{', '.join(names[:3])}: torch.func cannot differentiate this operator, nor a batch of calls "
            "under vmap; call sdpa_cutlass.attention or attention_varlen without vmap instead"
        )


def _check_no_derivatives(tensors: dict[str, torch.Tensor]) -> None:
    check_no_grad(tensors)
    _check_no_tangents(tensors)


def _check_no_tangents(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if torch_state.has_tangent(tensor):
            raise UnsupportedError(
                f"{name} has a forward-mode gradient, and this version computes none: pass {name}.detach()"
            )


def define(name: str, schema: str, kernel: Any, fake: Any, differentiable: Any = None) -> Any:
    """Defines torch.ops.sdpa_cutlass.`name`, which autocast leaves alone, and gives it back.

    `differentiable`: what a call is of which any of query, key, value, attn_mask and sinks requires grad. By
    default it is refused.
    """
    _library.define(f"{name}{schema}", tags=_TAGS)
    op = getattr(torch.ops.sdpa_cutlass, name).default
    torch.library.register_fake(f"sdpa_cutlass::{name}", fake, lib=_library)
    _library.impl(
        name, torch.compiler.disable(_autograd(op, kernel, differentiable)), "Autograd", with_keyset=True
    )
    for device_type in ("CPU", "CUDA"):
        _library.impl(name, torch.compiler.disable(kernel), device_type)  # else a graph break traces it
    return op


def register(
    name: str,
    schema: str,
    kernel: Any,
    fake: Any,
    mask_position: int | None = None,
    differentiable: Any = None,
) -> Any:
    """`define` for an operator of attention: its first arguments are query, key and value."""
    op = define(name, schema, kernel, fake, differentiable)
    for device_type in ("CPU", "CUDA"):
        _library.impl(name, _autocast(device_type.lower(), op, mask_position), f"Autocast{device_type}")
    return op


def as_traced(value: Any) -> Any:
    """A tensor; a NumPy array, which the compiler understands, becomes one. A length stays one."""
    is_known = value is None or isinstance(value, (torch.Tensor, int, torch.SymInt))
    return value if is_known else torch.as_tensor(value)


def as_window(window: list[int] | None) -> tuple[int, int] | None:
    """`window` of an operator, checked."""
    return None if window is None else extras.checked_window(window)


def traced_philox(p_dropout: float, philox: Any, query: torch.Tensor) -> torch.Tensor | None:
    """What the operator takes as philox: a tensor, drawn on query's device where dropout needs one."""
    if philox is None:
        return rng.draw_on_device(query.device) if 0 < p_dropout < 1 else None
    if isinstance(philox, torch.Tensor):
        return philox
    seed, offset = checked_philox(philox)
    signed = [value - 2**64 if value >= 2**63 else value for value in (seed, offset)]
    return torch.tensor(signed, dtype=torch.int64, device=query.device)
