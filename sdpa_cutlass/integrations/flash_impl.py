"""This library at torch's swap point for flash attention (torch.nn.attention, torch 2.11 and later).

    import sdpa_cutlass.integrations.flash_impl                               # or sdpa_cutlass.enable()
    torch.nn.attention.activate_flash_attention_impl("sdpa_cutlass")
    torch.nn.attention.restore_flash_attention_impl()

Importing registers the name and activates nothing. Once activated, the CUDA kernel of
aten::_scaled_dot_product_flash_attention is ours: it serves what torch gives to its flash backend, from C++
callers and early-bound references to F.scaled_dot_product_attention too. What the operator means is not what
F.scaled_dot_product_attention means: `is_causal` is bottom_right here, and softmax_lse is +inf in a row that
sees no key.

So is that of aten::_scaled_dot_product_flash_attention_backward, by which autograd differentiates the first:
training is served, in the same bits every time. The kernels that were there before keep the calls that this
library cannot serve, and dropout, whose random numbers torch's backward would have to draw again. Varlen and
nested calls use other operators, which are not replaced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention

from ..errors import LaunchError, SdpaError, UnsupportedError
from ..problem import Causal
from ..public import api
from . import backward_ops  # noqa: F401  registers the operators
from .head_dims import HeadDims, cuda_head_dims
from .torch_refusals import DTYPES, refusal
from .usage import count_fallback, count_served

NAME = "sdpa_cutlass"
_OP = "_scaled_dot_product_flash_attention"
_BACKWARD = _OP + "_backward"


def register() -> bool:
    """Registers NAME at the swap point. False when this torch has none."""
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None:
        return False
    register_impl(NAME, register_fn=activate)
    return True


class _Handle:
    """Keeps the registration alive until torch removes it."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None


def activate() -> _Handle:
    """What torch calls to activate NAME. Raises LibraryError or DriverError when no GPU can be served."""
    head_dims = cuda_head_dims()
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl(_OP, make_kernel(head_dims, _original_kernel(_OP)), "CUDA", with_keyset=True)
    backward = make_backward_kernel(head_dims, _original_kernel(_BACKWARD))
    library.impl(_BACKWARD, backward, "CUDA", with_keyset=True)
    return _Handle(library)


def make_kernel(served: dict[Any, HeadDims], original: Any) -> Any:
    """The kernel of the aten operator for the devices in `served`; `original` takes the other calls."""

    def kernel(
        keyset: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = "debug mask" if return_debug_mask else "dropout_p" if dropout_p else None
        if reason is None:
            reason = refusal(served, query, key, value, None, dropout_p, is_causal)
        if reason is None and not _operator_takes(query, key, value):
            reason = "shapes or dtypes"
        detail: object = None
        if reason is None:
            try:
                with torch.no_grad():  # autograd has its node already
                    out, softmax_lse = api.attention(
                        query,
                        key,
                        value,
                        causal=Causal.BOTTOM_RIGHT if is_causal else None,
                        scale=scale,
                        return_lse=True,
                    )
            except LaunchError:
                raise
            except SdpaError as error:
                reason, detail = type(error).__name__, error
            else:
                count_served()
                seed, offset = (
                    torch.empty(size, dtype=torch.uint64, device=query.device) for size in ((2,), ())
                )
                debug_mask = torch.empty(0, dtype=query.dtype, device=query.device)
                seqlen_q, seqlen_k = query.shape[2], key.shape[2]
                num_hidden = seqlen_q - seqlen_k if is_causal or seqlen_k == 0 else 0
                if num_hidden > 0:  # rows that see no key
                    softmax_lse[:, :, :num_hidden] = torch.inf
                return out, softmax_lse, None, None, seqlen_q, seqlen_k, seed, offset, debug_mask
        given = (keyset, query, key, value, dropout_p, is_causal, return_debug_mask)
        return _pass_on(original, given, scale, reason, detail)

    return kernel


def make_backward_kernel(served: dict[Any, HeadDims], original: Any) -> Any:
    """That of the operator's backward: gradients of query, key and value. Who made `out` does not matter."""

    def kernel(
        keyset: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        *others: Any,
        scale: float | None = None,
    ) -> Any:
        dropout_p, is_causal = others[4:6]
        head_dims = served.get(query.device)
        reason = "dropout_p" if dropout_p else "device" if head_dims is None else None
        if reason is None and not _operator_takes(query, key, value):
            reason = "shapes or dtypes"
        detail: object = None
        if reason is None:
            try:
                with torch.no_grad():
                    grads = torch.ops.sdpa_cutlass.attention_backward(
                        grad_out,
                        query,
                        key,
                        value,
                        out,
                        logsumexp,  # +inf in rows that see no key is as good as -inf: no score counts there
                        needs=[True, True, True, False],
                        causal=Causal.BOTTOM_RIGHT.value if is_causal else None,
                        scale=scale,
                    )
            except LaunchError:
                raise
            except SdpaError as error:
                reason, detail = type(error).__name__, error
            else:
                return tuple(grads[:3])
        given = (keyset, grad_out, query, key, value, out, logsumexp, *others)
        return _pass_on(original, given, scale, reason, detail)

    return kernel


def _pass_on(original: Any, given: tuple[Any, ...], scale: float | None, reason: str, detail: object) -> Any:
    """What torch's own kernel makes of a call that is not served. Raises UnsupportedError without one."""
    if original is None:
        raise UnsupportedError(f"sdpa_cutlass cannot serve this call ({reason}), and torch has no kernel")
    count_fallback(reason, detail)
    return original.call_boxed(*given, scale=scale)


def _operator_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's operator takes these tensors; ours broadcasts, pads and casts more than it does.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], of one dtype.
    """
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.dim() == key.dim() == 4
        and key.shape == value.shape
        and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    )


def _original_kernel(operator: str) -> Any:
    """torch's own CUDA kernel of it, or None where this build has none or cannot hand it out."""
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        return None
    try:
        return get_kernel(f"aten::{operator}", "CUDA")
    except RuntimeError:
        return None


register()
