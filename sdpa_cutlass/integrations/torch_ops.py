"""torch.ops.sdpa_cutlass: the kernels as torch operators, for torch.compile, torch.export and FakeTensor.

    attention_forward(query, key, value, attn_mask=None, seqlens_q=None, seqlens_k=None, philox=None,
                      sinks=None, *, causal=None, scale=None, enable_gqa=True, kernel_name=None,
                      family="fmha_fwd", return_lse=False, p_dropout=0.0, layout="bhsd", window=None,
                      precision=None)
                      -> (out, softmax_lse)
    attention_forward_out(query, key, value, out, attn_mask=None, ...the same...) -> softmax_lse
    attention_varlen_forward and attention_varlen_forward_out: see varlen_ops.py

Arguments, shapes and errors are those of `sdpa_cutlass.attention`; `causal` is None, "top_left" or
"bottom_right", `family` "fmha_fwd" or "unfused", `kernel_name` what is `kernel` there; softmax_lse has no
elements unless `return_lse`. The operators draw no random numbers: with dropout they need `philox` [2]. A
traced call of `attention` draws it with torch.randint in front of the operator. attention_forward is
differentiable in query, key, value and sinks (torch_autograd.py); other inputs that require grad, and all in
forward mode, are refused. Importing this module registers the operators; the package does so itself when a
public function is traced. Eager calls of the public functions do not come through here: the dispatcher costs
more than the rest of the call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import calls, checks, outputs, planning, rng
from ..call.planning import Inputs, Options, Result
from ..call.precision import asked_of
from ..library.registry import Family
from . import backward_ops, varlen_ops  # noqa: F401  they register their own
from .operators import as_traced, as_window, call_traced, check_has_philox, no_lse, register

# kernel_name, not kernel: Inductor passes options on by name, beside an argument `kernel` of its own.
_TENSORS = (
    "Tensor? attn_mask=None, Tensor? seqlens_q=None, Tensor? seqlens_k=None, Tensor? philox=None, "
    "Tensor? sinks=None"
)
_OPTIONS = (
    "*, str? causal=None, float? scale=None, bool enable_gqa=True, str? kernel_name=None, "
    'str family="fmha_fwd", bool return_lse=False, float p_dropout=0.0, str layout="bhsd", '
    "int[]? window=None, str? precision=None"
)


def _options(
    *,
    causal: str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel_name: str | None = None,
    family: str = Family.FMHA_FWD.value,
    return_lse: bool = False,
    p_dropout: float = 0.0,
    layout: str = "bhsd",
    window: list[int] | None = None,
    precision: str | None = None,
) -> Options:
    return Options(
        asked_of(precision, Family(family)),
        causal,
        scale,
        enable_gqa,
        kernel_name,
        return_lse,
        p_dropout,
        layout,
        as_window(window),
    )


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, philox, sinks)
    return _run(_options(**options), inputs)


def _forward_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    inputs = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, philox, sinks)
    return _run(_options(**options), inputs)[1]


def _run(options: Options, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    check_has_philox(options.p_dropout, inputs.philox)
    out, lse, _ = calls.run_general(*options, *inputs, is_operator=True)
    return out, no_lse(inputs.query) if lse is None else lse


def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of `_forward`, and every error that does not need data or a library."""
    asked = _options(**options)
    check_has_philox(asked.p_dropout, philox)
    inputs = Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, philox, sinks)
    operands = planning.bind(asked, inputs, allow_meta=True).operands
    if philox is not None:
        rng.checked(philox, query)
    lse = operands.restore_lse(outputs.empty_lse(operands)) if asked.return_lse else no_lse(query)
    return operands.restore(outputs.empty_out(operands)), lse


def _fake_forward_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    result, lse = _fake_forward(query, key, value, *rest, **options)
    outputs.check_out_type(out, query, tuple(result.shape))
    return lse


def _differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A call whose query, key or value requires grad."""
    from . import torch_autograd

    inputs = Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, philox, sinks)
    return torch_autograd.recorded(_options(**options), inputs)


register(
    "attention_forward",
    f"(Tensor query, Tensor key, Tensor value, {_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    3,
    _differentiable,
)
register(
    "attention_forward_out",
    f"(Tensor query, Tensor key, Tensor value, Tensor(a!) out, {_TENSORS}, {_OPTIONS}) -> Tensor",
    _forward_out,
    _fake_forward_out,
    4,
)


def traced(options: Options, inputs: Inputs) -> Result:
    """`calls.run_general` as a call of the operator: what torch.compile traces instead."""
    return call_traced(
        "attention_forward",
        options,
        inputs,
        [as_traced(value) for value in inputs[4:7]],
        family=(options.family if isinstance(options.family, Family) else Family.FMHA_FWD).value,
        layout=checks.tensor_layout(options.layout).value,
    )
