"""register(): attn_implementation="sdpa_cutlass" for the models of the transformers library.

    import sdpa_cutlass.integrations.transformers as sdpa_cutlass_transformers
    usage = sdpa_cutlass_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sdpa_cutlass")

Importing registers nothing. Needs transformers 4.53 or later; what its releases hand to an attention function
is in `attention_forward`, what to a mask function in transformers_mask.py. A call that this library does not
serve goes to transformers' own attention: to its sdpa attention, or, where that would ignore an argument
(sinks, softcap), to the eager attention of the model's file. `Usage` counts such calls by reason.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import Any

import torch

from ..errors import LaunchError, SdpaError, UnsupportedError
from ..problem import Causal
from ..public import api
from .head_dims import HeadDims, served_head_dims
from .torch_refusals import refusal
from .usage import Usage

try:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    from .transformers_mask import Visible, VisibleKeys, as_dense, visible_keys_mask
except ImportError as error:
    raise UnsupportedError(
        "transformers is not installed, or is too old to have AttentionMaskInterface (4.53 and later do): "
        f"{error}"
    ) from error

NAME = "sdpa_cutlass"
SECOND_NAME = "cutlass_attention"
"""For models that transformers keeps from torch's sdpa, such as gpt-oss: it refuses each name with "sdpa"."""

logger = logging.getLogger("sdpa_cutlass")

_usage = Usage()
_served: dict[Any, HeadDims] = {}


def register(*, devices: Collection[str] | None = None, log_fallbacks: bool = False) -> Usage:
    """Registers NAME and SECOND_NAME as attention implementations of transformers, in the whole process.

    devices: "cuda", "cpu" or both. By default CUDA, and CPU tensors only where there is no GPU that the
        library can use: the host library is for tests and is slow.
    log_fallbacks: log the first call of each reason that transformers serves, as a warning of the logger
        "sdpa_cutlass". At debug level every such call is logged.

    Models that have the implementation already go on with it when this is called again. Returns the counts
    of all calls since the first `register`: `served`, and `fallbacks` by reason. Calls inside compiled code
    are not counted.

    Raises LibraryError or DriverError when the library cannot be used on these devices.
    """
    _served.update(served_head_dims(devices))
    _usage.log_fallbacks = log_fallbacks
    for name in (NAME, SECOND_NAME):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, visible_keys_mask)
    return _usage


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer of transformers calls. Not for use by hand.

    query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] → (out [B, Sq, Hq, Dv], None).
    attention_mask: a VisibleKeys, a mask that broadcasts to [B, Hq, Sq, Sk] (more columns are cut off, as
    transformers does), or None: causal, row i seeing the keys 0..i, if `is_causal` (by default the module's,
    or True) and Sq > 1.

    Raises UnsupportedError for a call that neither side can compute: the message names the argument.
    """
    tracing = torch.compiler.is_compiling()
    visible = _as_visible(attention_mask, key.shape[2])
    sinks = options.get("s_aux")
    reason = _unserved_option(options)
    detail: object = None
    if reason is None:
        reason = refusal(_served, query, key, value, visible.keys, dropout, False)
    if reason is None:
        if attention_mask is None and query.shape[2] > 1:
            causes = getattr(module, "is_causal", True) if is_causal is None else is_causal
            visible = Visible(causal=Causal.TOP_LEFT if causes else None)
        if tracing:
            return _serve(query, key, value, visible, dropout, scaling, sinks), None
        try:
            out = _serve(query, key, value, visible, dropout, scaling, sinks)
        except LaunchError:
            raise  # a failure of a kernel, not a refusal
        except SdpaError as error:
            reason, detail = type(error).__name__, error
        else:
            _usage.served += 1
            return out, None
    if not tracing:
        _count_fallback(reason, detail)
    own = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    return _fall_back(module, query, key, value, attention_mask, own, options)


def _as_visible(mask: torch.Tensor | None, seqlen_k: int) -> Visible:
    """What a layer's mask says. An ordinary tensor says all of it, a causal order included.

    GPT-2 of transformers 4.53 makes masks of one column more than there are keys.
    """
    if mask is None:
        return Visible(causal=None)
    if isinstance(mask, VisibleKeys):
        return mask.visible
    return Visible(causal=None, keys=mask[..., :seqlen_k])


_UNSERVED = ("softcap", "position_bias", "cache", "head_mask")
"""Options of layers that change the result and that `attention` does not have."""


def _unserved_option(options: dict[str, Any]) -> str | None:
    """The first option that this library does not serve."""
    for name in _UNSERVED:
        if options.get(name) is not None:
            return name
    if options.get("output_attentions"):
        return "output_attentions"
    return None


def _serve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: Visible,
    dropout: float,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, Sq, Hq, Dv] from this library."""
    more: dict[str, Any] = {}
    if visible.window is not None:
        more["window"] = visible.window
    if sinks is not None:
        more["sinks"] = sinks
    if visible.end is not None:
        key, value = key[:, :, : visible.end], value[:, :, : visible.end]
    out = api.attention(
        query,
        key,
        value,
        attn_mask=visible.keys,
        causal=visible.causal,
        scale=scaling,
        p_dropout=dropout,
        seqlens_k=visible.seqlens_k,
        **more,
    )
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2).contiguous()


def _count_fallback(reason: str | None, detail: object) -> None:
    assert reason is not None
    _usage.fallbacks[reason] += 1
    message = reason if detail is None else f"{reason}: {detail}"
    if _usage.log_fallbacks and _usage.fallbacks[reason] == 1:
        logger.warning("attention left to transformers (told once): %s", message)
    logger.debug("attention left to transformers: %s", message)


def _fall_back(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    own: dict[str, Any],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' sdpa attention, or the model's eager one where sdpa would ignore an option."""
    mask = as_dense(attention_mask)
    ignored = [name for name in ("s_aux", "softcap") if options.get(name) is not None]
    if not ignored:
        return sdpa_attention_forward(module, query, key, value, mask, **own, **options)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedError(
            f"{' and '.join(ignored)} of {type(module).__name__}: this call is not served by sdpa_cutlass, "
            "transformers' sdpa attention would ignore it, and the model's file has no eager attention"
        )
    is_causal = getattr(module, "is_causal", True) if own["is_causal"] is None else own["is_causal"]
    if mask is None and is_causal and query.shape[2] > 1:
        shape = (query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, hidden)
    more = {name: value for name, value in own.items() if name != "is_causal"}
    return eager(module, query, key, value, mask, **more, **options)
