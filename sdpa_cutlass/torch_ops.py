"""torch.ops.sdpa_cutlass: the kernels as torch operators, for torch.compile, torch.export and FakeTensor.

    attention_forward(query, key, value, *, causal=None, scale=None, enable_gqa=True, kernel_name=None,
                      family="fmha_fwd", return_lse=False) -> (out, softmax_lse)
    attention_forward_out(query, key, value, out, *, ...the same...) -> softmax_lse

Arguments, shapes and errors are those of `sdpa_cutlass.attention`; `causal` is None, "top_left" or
"bottom_right", `family` "fmha_fwd" or "unfused", `kernel_name` what is `kernel` there; softmax_lse has no
elements unless `return_lse`. Importing this module registers the operators; the package does so itself when a
public function is traced. Eager calls of the public functions do not come through here: the dispatcher costs
more than the rest of the call.
"""

from __future__ import annotations

from typing import Any

import torch

from . import api, checks
from .problem import Causal
from .registry import Family

# kernel_name, not kernel: Inductor passes options on by name, beside an argument `kernel` of its own.
_OPTIONS = (
    "*, str? causal=None, float? scale=None, bool enable_gqa=True, str? kernel_name=None, "
    'str family="fmha_fwd", bool return_lse=False'
)
# The result is laid out as query is, so a compiler must hand over the strides that it traced.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

_library = torch.library.Library("sdpa_cutlass", "DEF")
_library.define(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define(
    f"attention_forward_out(Tensor query, Tensor key, Tensor value, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    tags=_TAGS,
)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel_name: str | None = None,
    family: str = Family.FMHA_FWD.value,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = api.run(
        Family(family), causal, scale, enable_gqa, kernel_name, return_lse, query, key, value, None
    )
    return out, _no_lse(query) if lse is None else lse


def _forward_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel_name: str | None = None,
    family: str = Family.FMHA_FWD.value,
    return_lse: bool = False,
) -> torch.Tensor:
    _, lse = api.run(
        Family(family), causal, scale, enable_gqa, kernel_name, return_lse, query, key, value, out
    )
    return _no_lse(query) if lse is None else lse


def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel_name: str | None = None,
    family: str = Family.FMHA_FWD.value,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of `_forward`, and every error that does not need data or a library."""
    operands = checks.canonical_operands(query, key, value, enable_gqa=enable_gqa, allow_meta=True)
    checks.causal_alignment(causal)
    if scale is not None:
        checks.softmax_scale(scale, 1)
    Family(family)
    lse = operands.restore(api.empty_lse(operands.query)) if return_lse else _no_lse(query)
    return operands.restore(api.empty_out(operands.query)), lse


def _fake_forward_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, **options: Any
) -> torch.Tensor:
    result, lse = _fake_forward(query, key, value, **options)
    checks.check_out_type(out, query, tuple(result.shape))
    return lse


def _autocast(device_type: str, op: Any) -> Any:
    """A kernel that casts as `checks.autocast_inputs` says, then calls `op` with autocast off."""

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *out: Any, **options: Any) -> Any:
        query, key, value = checks.autocast_inputs(query, key, value)
        with torch.autocast(device_type, enabled=False):
            return op(query, key, value, *out, **options)

    return kernel


def _no_lse(query: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=query.device)


for _name, _kernel, _fake in (
    ("attention_forward", _forward, _fake_forward),
    ("attention_forward_out", _forward_out, _fake_forward_out),
):
    _op = getattr(torch.ops.sdpa_cutlass, _name).default
    torch.library.register_fake(f"sdpa_cutlass::{_name}", _fake, lib=_library)
    for _device_type in ("CPU", "CUDA"):
        _library.impl(_name, torch.compiler.disable(_kernel), _device_type)  # else a graph break traces it
        _library.impl(_name, _autocast(_device_type.lower(), _op), f"Autocast{_device_type}")


def traced(
    family: Family,
    causal: Causal | str | None,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    return_lse: bool,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`api.run` as a call of the operator: what torch.compile traces instead. Returns (out, lse or None)."""
    tensors = {"query": query, "key": key, "value": value}
    for name in tensors:
        if not isinstance(tensors[name], torch.Tensor):
            tensors[name] = torch.as_tensor(tensors[name])  # a NumPy array, which the compiler understands
    options = {
        "causal": causal.value if isinstance(causal, Causal) else causal,
        "scale": None if scale is None else float(scale),
        "enable_gqa": enable_gqa,
        "kernel_name": kernel,
        "family": family.value,
        "return_lse": return_lse,
    }
    ops = torch.ops.sdpa_cutlass
    if out is None:
        out, lse = ops.attention_forward(*tensors.values(), **options)
    else:
        lse = ops.attention_forward_out(*tensors.values(), out, **options)
    return out, lse if return_lse else None
