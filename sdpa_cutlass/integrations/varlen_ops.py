"""torch.ops.sdpa_cutlass.attention_varlen_forward and ..._out: packed sequences as torch operators.

    attention_varlen_forward(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                             philox=None, sinks=None, *, causal=None, scale=None, enable_gqa=True,
                             kernel_name=None, return_lse=False, p_dropout=0.0, window=None, precision=None)
                             -> (out, softmax_lse)
    attention_varlen_forward_out(query, key, value, out, cu_seqlens_q, ...the same...) -> softmax_lse

Arguments and errors are those of `sdpa_cutlass.attention_varlen`; everything else is as torch_ops.py says.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import binding, outputs, packed_calls, rng
from ..call.arguments import Inputs, Lengths, Options, Result
from ..call.precision import asked_of
from .operators import as_traced, as_window, call_traced, check_has_philox, no_lse, register

_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPTIONS = (
    "Tensor? philox=None, Tensor? sinks=None, *, str? causal=None, float? scale=None, bool enable_gqa=True, "
    "str? kernel_name=None, bool return_lse=False, float p_dropout=0.0, int[]? window=None, "
    "str? precision=None"
)


def _options(
    *,
    causal: str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel_name: str | None = None,
    return_lse: bool = False,
    p_dropout: float = 0.0,
    window: list[int] | None = None,
    precision: str | None = None,
) -> Options:
    return Options(
        asked_of(precision),
        causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
        kernel=kernel_name,
        return_lse=return_lse,
        p_dropout=p_dropout,
        layout="bshd",
        window=as_window(window),
    )


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _run(_options(**options), Inputs(query, key, value, philox=philox, sinks=sinks), lengths)


def _forward_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _run(_options(**options), Inputs(query, key, value, out, philox=philox, sinks=sinks), lengths)[1]


def _run(options: Options, inputs: Inputs, lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    check_has_philox(options.p_dropout, inputs.philox)
    out, lse, _ = packed_calls.run(
        *options[:7], options.window, *inputs[:4], *lengths, inputs.philox, inputs.sinks, is_operator=True
    )
    return out, no_lse(inputs.query) if lse is None else lse


def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of `_forward`, and every error that does not need data or a library."""
    asked = _options(**options)
    check_has_philox(asked.p_dropout, philox)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    operands = binding.bind_packed(
        asked, Inputs(query, key, value, sinks=sinks), lengths, allow_meta=True
    ).operands
    if philox is not None:
        rng.checked(philox, query)
    lse = outputs.empty_lse(operands)[0] if asked.return_lse else no_lse(query)
    return operands.restore(outputs.empty_out(operands))[0], lse


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
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    philox: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A call whose query, key or value requires grad."""
    from . import torch_autograd

    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    inputs = Inputs(query, key, value, philox=philox, sinks=sinks)
    return torch_autograd.recorded(_options(**options), inputs, lengths)


register(
    "attention_varlen_forward",
    f"(Tensor query, Tensor key, Tensor value, {_LENGTHS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    differentiable=_differentiable,
)
register(
    "attention_varlen_forward_out",
    f"(Tensor query, Tensor key, Tensor value, Tensor(a!) out, {_LENGTHS}, {_OPTIONS}) -> Tensor",
    _forward_out,
    _fake_forward_out,
)


def traced(options: Options, inputs: Inputs, lengths: Lengths) -> Result:
    """`varlen.run` as a call of the operator: what torch.compile traces instead."""
    rest = (
        as_traced(lengths.cu_seqlens_q),
        as_traced(lengths.cu_seqlens_k),
        lengths.max_seqlen_q,
        lengths.max_seqlen_k,
    )
    return call_traced("attention_varlen_forward", options, inputs, rest)
