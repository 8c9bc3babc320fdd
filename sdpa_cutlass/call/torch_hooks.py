"""What every call asks torch, before torch is imported and after: functions of torch, once it is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_grad_enabled() -> bool:
    """Whether torch records what is computed: only asked about inputs that require grad."""
    return bool(sys.modules["torch"].is_grad_enabled())


def expects_gradients(query: Any, key: Any, value: Any, attn_mask: Any, sinks: Any) -> bool:
    """Whether torch records what is computed from these."""
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ) and is_grad_enabled()


def is_autocast_enabled(tensor: Any) -> bool:
    """Whether torch casts what is computed on the tensor's kind of device."""
    return bool(sys.modules["torch"].is_autocast_enabled(tensor.device.type))


def _find_is_dynamo_compiling() -> bool:
    """Stands in for torch's function where torch was imported after this package, until the first eager call.

    Not while tracing: compiled code depends on the global and would be compiled again.
    """
    global is_dynamo_compiling, is_watching, increment_version
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    from ..library import torch_state

    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    is_watching, increment_version = torch_state.is_watching, torch_state.increment_version
    return False


def _without_torch(*_: object) -> bool:
    return False


# Those of torch_state.py, once torch is there.
is_watching: Callable[[], bool] = _without_torch
increment_version: Callable[[tuple[Any, ...]], object] = _without_torch
is_dynamo_compiling: Callable[[], bool] = _find_is_dynamo_compiling
if sys.modules.get("torch"):  # found now, so that code compiled before the first eager call stays valid
    _find_is_dynamo_compiling()
