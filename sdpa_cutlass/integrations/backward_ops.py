"""torch.ops.sdpa_cutlass.attention_backward and attention_varlen_backward: gradients as torch operators.

    attention_backward(dout, query, key, value, out, softmax_lse, dlse=None, attn_mask=None, seqlens_q=None,
                       seqlens_k=None, philox=None, sinks=None, *, needs, causal=None, scale=None,
                       enable_gqa=True, kernel_name=None, p_dropout=0.0, layout="bhsd", window=None)
                       -> (dq, dk, dv)
    attention_varlen_backward(dout, query, key, value, out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
                              max_seqlen_q, max_seqlen_k, dlse=None, philox=None, sinks=None, *, needs,
                              causal=None, scale=None, enable_gqa=True, kernel_name=None, p_dropout=0.0,
                              window=None)
                              -> (dq, dk, dv)

They follow attention_forward and attention_varlen_forward: `out` and `softmax_lse` are what those gave,
`dout` and `dlse` the gradients of it, and with dropout `philox` is what the forward took. `kernel_name` is
that of a backward kernel. `needs`: which of
dq, dk and dv to make; the others have no elements. Gradients have shapes and dtypes of their inputs, and
their strides where those are dense. What requires grad here is refused: there is no second derivative.
`torch_autograd.py` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..call import backward, binding, checks
from ..call.arguments import Inputs, Lengths, Options
from ..call.binding import Bound
from .operators import as_window, define

if TYPE_CHECKING:
    from .torch_autograd import Call, Rest

_RESULTS = "Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor softmax_lse"
_OPTIONS = (
    "*, bool[3] needs, str? causal=None, float? scale=None, bool enable_gqa=True, str? kernel_name=None, "
    "float p_dropout=0.0, "
)


def _run(
    bound: Bound,
    likes: backward.Tensors,
    results: backward.Results | None,
    philox: Any,
    needs: Sequence[bool],
    kernel: str | None,
) -> list[torch.Tensor]:
    """The gradients; without `results`, only their form."""
    asked = (needs[0], needs[1], needs[2])
    if results is None:
        grads = backward.empty_gradients(bound, likes, asked)
    else:
        grads = backward.gradients(bound, likes, results, philox, asked, kernel)
    return [like.new_empty(0) if grad is None else grad for grad, like in zip(grads, likes, strict=True)]


def _padded(
    is_fake: bool,
    tensors: Sequence[torch.Tensor],
    rest: Sequence[torch.Tensor | None],
    needs: Sequence[bool],
    layout: str = "bhsd",
    window: list[int] | None = None,
    kernel_name: str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, query, key, value, out, lse = tensors
    dlse, mask, seqlens_q, seqlens_k, philox, sinks = rest
    asked = Options(layout=layout, window=as_window(window), **options)
    inputs = Inputs(query, key, value, None, mask, seqlens_q, seqlens_k, None, sinks)
    bound = binding.bind(asked, inputs, allow_meta=is_fake)
    results = None if is_fake else backward.Results(out, lse, dout, dlse)
    dq, dk, dv = _run(bound, (query, key, value), results, philox, needs, kernel_name)
    return dq, dk, dv


def _packed(
    is_fake: bool,
    tensors: Sequence[torch.Tensor],
    lengths: Lengths,
    rest: Sequence[torch.Tensor | None],
    needs: Sequence[bool],
    window: list[int] | None = None,
    kernel_name: str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, query, key, value, out, lse = tensors
    dlse, philox, sinks = rest
    asked = Options(layout="bshd", window=as_window(window), **options)
    bound = binding.bind_packed(asked, Inputs(query, key, value, sinks=sinks), lengths, allow_meta=is_fake)
    likes = (query[None], key[None], value[None])
    results = None if is_fake else backward.Results(out, lse, dout, dlse)
    grads = _run(bound, likes, results, philox, needs, kernel_name)
    dq, dk, dv = (grad[0] if needed else grad for grad, needed in zip(grads, needs, strict=True))
    return dq, dk, dv


def _with_defaults(rest: Sequence[Any], count: int) -> list[Any]:
    """Trailing arguments that were left out are None."""
    return [*rest, *(None for _ in range(count - len(rest)))]


def _backward(*args: Any, needs: Sequence[bool], **options: Any) -> tuple[torch.Tensor, ...]:
    return _padded(False, args[:6], _with_defaults(args[6:], 6), needs, **options)


def _fake_backward(*args: Any, needs: Sequence[bool], **options: Any) -> tuple[torch.Tensor, ...]:
    return _padded(True, args[:6], _with_defaults(args[6:], 6), needs, **options)


def _varlen_backward(*args: Any, needs: Sequence[bool], **options: Any) -> tuple[torch.Tensor, ...]:
    lengths, rest = Lengths(*args[6:10]), _with_defaults(args[10:], 3)
    return _packed(False, args[:6], lengths, rest, needs, **options)


def _fake_varlen_backward(*args: Any, needs: Sequence[bool], **options: Any) -> tuple[torch.Tensor, ...]:
    lengths, rest = Lengths(*args[6:10]), _with_defaults(args[10:], 3)
    return _packed(True, args[:6], lengths, rest, needs, **options)


define(
    "attention_backward",
    f"({_RESULTS}, Tensor? dlse=None, Tensor? attn_mask=None, Tensor? seqlens_q=None, "
    f'Tensor? seqlens_k=None, Tensor? philox=None, Tensor? sinks=None, {_OPTIONS}str layout="bhsd", '
    "int[]? window=None) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
define(
    "attention_varlen_backward",
    f"({_RESULTS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"Tensor? dlse=None, Tensor? philox=None, Tensor? sinks=None, {_OPTIONS}int[]? window=None) "
    "-> (Tensor, Tensor, Tensor)",
    _varlen_backward,
    _fake_varlen_backward,
)


def _arguments(options: Options) -> dict[str, Any]:
    """What both directions take by name."""
    causal = checks.causal_alignment(options.causal)
    return {
        "causal": None if causal is None else causal.value,
        "scale": options.scale,
        "enable_gqa": options.enable_gqa,
        "p_dropout": options.p_dropout,
        "window": None if options.window is None else list(options.window),
    }


def forward(call: Call, options: Options, query: Any, key: Any, value: Any, rest: Rest) -> tuple[Any, Any]:
    """out and softmax_lse by the forward's operator."""
    more = {**_arguments(options), "kernel_name": options.kernel, "return_lse": True}
    ops = torch.ops.sdpa_cutlass
    if call.bounds is not None:
        lengths = (rest.cu_seqlens_q, rest.cu_seqlens_k, *call.bounds)
        result = ops.attention_varlen_forward(query, key, value, *lengths, rest.philox, rest.sinks, **more)
    else:
        result = ops.attention_forward(
            query, key, value, *rest[:5], layout=checks.tensor_layout(options.layout).value,
            family=options.family.value, **more,
        )  # fmt: skip
    return result[0], result[1]


def gradients(
    call: Call, query: Any, key: Any, value: Any, rest: Rest, results: backward.Results, needs: Sequence[bool]
) -> tuple[Any, ...]:
    """dq, dk and dv by the operator; None for those that `needs` does not ask for."""
    more = {**_arguments(call.options), "needs": list(needs)}
    out, lse, dout, dlse = results
    tensors = (dout, query, key, value, out, lse)
    ops = torch.ops.sdpa_cutlass
    if call.bounds is not None:
        lengths = (rest.cu_seqlens_q, rest.cu_seqlens_k, *call.bounds)
        grads = ops.attention_varlen_backward(*tensors, *lengths, dlse, rest.philox, rest.sinks, **more)
    else:
        layout = checks.tensor_layout(call.options.layout).value
        grads = ops.attention_backward(*tensors, dlse, *rest[:5], layout=layout, **more)
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))
