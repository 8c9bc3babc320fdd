"""What torch does around a call, and what it has to be told; imported once torch is.

A direct call reads addresses and launches, and torch's dispatcher does not see it. Where torch records the
operators that run, or differentiates them forward, it has to: there a call is an operator (torch_ops.py).
Autograd by itself is no such place: tensors say that they require grad. Nor is torch.func: its tensors have
no address. torch.compile is asked first of all (calls.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._C import _is_torch_function_mode_enabled, _is_tracing, _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad


def is_recording() -> bool:
    """True inside torch.jit.trace or a TorchDispatchMode (make_fx, FakeTensorMode, ...)."""
    return (
        _len_torch_dispatch_stack() > 0
        or _is_tracing()
        or (_is_torch_function_mode_enabled() and _len_torch_dispatch_stack_pre_dispatch() > 0)
    )


def is_watching() -> bool:
    """True while torch records, and inside a dual_level."""
    return is_recording() or forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """True for a tensor whose forward-mode gradient torch would carry on."""
    return (
        forward_ad._current_level >= 0
        and torch._C._is_fwd_grad_enabled()
        and forward_ad.unpack_dual(tensor).tangent is not None
    )


def _find_increment_version() -> Any:
    """What torch.autograd.graph.increment_version calls: of tensors, in older releases of one tensor."""
    increment = torch._C._increment_version
    try:
        increment((torch.empty(0),))
    except RuntimeError:

        def increment_each(tensors: tuple[torch.Tensor, ...]) -> None:
            for tensor in tensors:
                if not tensor.is_inference():  # these count no versions
                    increment(tensor)

        return increment_each
    return increment


increment_version = _find_increment_version()
"""Says that the memory of the tensors in a tuple was written: what autograd kept of it is stale."""


def tell(launcher: ModuleType) -> None:
    """Gives the compiled launcher what it needs to ask and to say the same."""
    launcher.watch(
        (_len_torch_dispatch_stack, _is_tracing),
        (_is_torch_function_mode_enabled, _len_torch_dispatch_stack_pre_dispatch),
        vars(forward_ad),
        torch.is_grad_enabled,
        increment_version,
    )
