"""Why torch has to serve a call of F.scaled_dot_product_attention, or one of its flash operator.

The cheapest facts come first, because a call that torch serves in the end should cost little more than it
does without this library: types, dtype, gradients and device before modes, sizes and addresses. Nothing here
reads data, and torch.compile traces `refusal`. What only the checks of a call find out is not here: such
calls raise an SdpaError, and torch_sdpa.py hands them to torch then.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import is_autocast_enabled, is_grad_enabled
from torch._C import (
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _is_any_autocast_enabled,
)

from ..library.torch_state import has_tangent, is_recording

if TYPE_CHECKING:
    from .head_dims import HeadDims

_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
DTYPES = frozenset((torch.float16, torch.bfloat16))
_DTYPE_REASONS = {dtype: f"dtype {dtype}" for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_HAS_CUDNN_BY_DEFAULT = torch.__version__ >= (2, 5)
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def refusal(
    served: dict[Any, HeadDims],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str | None:
    """One of few reasons why torch has to serve this call, or None.

    query [..., Sq, D], key [..., Sk, D], value [..., Sk, Dv]; `served` says for each torch.device which head
    dimensions have kernels.
    """
    tracing = _is_dynamo_compiling()
    if not tracing and not (
        type(query) in _TYPES
        and type(key) in _TYPES
        and type(value) in _TYPES
        and (attn_mask is None or type(attn_mask) in _TYPES)
    ):
        return "tensor subclass or vmap"
    dtype = query.dtype
    if not tracing and dtype not in DTYPES and not _is_any_autocast_enabled():
        return _DTYPE_REASONS[dtype]
    wants_gradient = is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )
    device = query.device
    head_dims = served.get(device)
    if head_dims is None:
        return "device" if tracing else _device_reason(device)
    if wants_gradient and (
        query.dim() < 2 or value.dim() < 2 or max(query.shape[-1], value.shape[-1]) > head_dims.backward
    ):
        return "requires grad"
    if (dtype not in DTYPES or attn_mask is not None) and is_autocast_enabled(device.type):
        dtype = autocast_dtype(device.type, dtype)
        mask_dtype = None if attn_mask is None else autocast_dtype(device.type, attn_mask.dtype)
    else:
        mask_dtype = None if attn_mask is None else attn_mask.dtype
    if dtype not in DTYPES:
        return _DTYPE_REASONS[dtype]
    if attn_mask is not None:
        if is_causal:
            return "attn_mask with is_causal"
        if mask_dtype not in (torch.bool, torch.float32, dtype):
            return f"attn_mask's dtype {mask_dtype}"
    if not tracing:
        if is_recording():  # torch.jit.trace makes tensors of sizes
            return "dispatch mode or tracing"
        if (
            query.is_nested
            or key.is_nested
            or value.is_nested
            or (attn_mask is not None and attn_mask.is_nested)
        ):
            return "nested tensor"  # strided ones have no sizes to look at; dynamo takes none
    if (
        query.dim() < 2
        or value.dim() < 2
        or not _has_kernel(
            head_dims, query.shape[-1], value.shape[-1], has_mask=attn_mask is not None, dropout_p=dropout_p
        )
    ):
        return "head_dim"
    if tracing:
        return None
    return _other_than_memory((query, key, value) if attn_mask is None else (query, key, value, attn_mask))


def names_backends() -> bool:
    """True where torch.nn.attention.sdpa_kernel, or a process-wide switch, excludes a backend of torch's.

    Whoever names the backends has decided who serves. The order of priorities is no decision: the default of
    torch sets one too.
    """
    return not (
        _get_flash_sdp_enabled()
        and _get_mem_efficient_sdp_enabled()
        and _get_math_sdp_enabled()
        and (_get_cudnn_sdp_enabled() or not _HAS_CUDNN_BY_DEFAULT)
    )


# What torch.compiler.assume_constant_result sets, without importing dynamo, which cannot trace the switches.
names_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """What torch.autocast makes of a tensor of `dtype`."""
    eligible = dtype.is_floating_point and dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if eligible else dtype


@functools.cache
def _device_reason(device: torch.device) -> str:
    """Kept, because a device takes a microsecond to print."""
    return f"device {device}"


def _other_than_memory(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why kernels would get these tensors of plain types wrong, or None."""
    if any(has_tangent(tensor) for tensor in tensors):
        return "forward-mode gradient"
    for tensor in tensors:
        if tensor.is_neg():  # the memory holds the negatives
            return "negative bit"
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside vmap; sparse
            return "tensor subclass or vmap"
        if not address and tensor.numel():  # functionalised, or zeros that were never written
            return "tensor without memory"
    return None


def _has_kernel(
    head_dims: HeadDims, head_dim: int, head_dim_v: int, *, has_mask: bool, dropout_p: float
) -> bool:
    """Whether some fused kernel takes these head dimensions, padded where need be."""
    if not has_mask and dropout_p == 0 and head_dim == head_dim_v and head_dim in head_dims.plain:
        return True
    largest = head_dims.general if dropout_p == 0 else head_dims.dropout
    return 0 < head_dim <= largest and 0 < head_dim_v <= largest
