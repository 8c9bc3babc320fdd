"""This library at torch's swap point for flash attention (torch.nn.attention, torch 2.11 and later).

    import sdpa_cutlass.flash_impl                                            # or sdpa_cutlass.enable()
    torch.nn.attention.activate_flash_attention_impl("sdpa_cutlass")
    torch.nn.attention.restore_flash_attention_impl()

Importing registers the name and activates nothing. Once activated, the CUDA kernel of
aten::_scaled_dot_product_flash_attention is ours: it serves whatever torch gives to its flash backend, from
C++ callers and early-bound references to F.scaled_dot_product_attention too. Calls that this library cannot
serve go to the kernel that was there before, and so does dropout, whose random numbers torch's backward would
have to draw again. Backward stays torch's own: it needs only `out` and
softmax_lse, which have torch's meaning here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention

from . import api
from .errors import LaunchError, SdpaError, UnsupportedError
from .torch_refusals import refusal
from .torch_sdpa import HeadDims, count_fallback, count_served, cuda_head_dims

NAME = "sdpa_cutlass"
_OP = "_scaled_dot_product_flash_attention"


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
    kernel = make_kernel(cuda_head_dims(), _original_kernel())
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl(_OP, kernel, "CUDA", with_keyset=True)
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
        detail: object = None
        if reason is None:
            try:
                out, softmax_lse = api.attention(
                    query,
                    key,
                    value,
                    causal="top_left" if is_causal else None,
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
                lengths = (query.shape[2], key.shape[2])
                return out, softmax_lse, None, None, *lengths, seed, offset, debug_mask
        if original is None:
            raise UnsupportedError(f"sdpa_cutlass cannot serve this call ({reason}), and torch has no kernel")
        count_fallback(reason, detail)
        return original.call_boxed(
            keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )

    return kernel


def _original_kernel() -> Any:
    """torch's own CUDA kernel, or None where this build has none or cannot hand it out."""
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        return None
    try:
        return get_kernel(f"aten::{_OP}", "CUDA")
    except RuntimeError:
        return None


register()
