"""The mask function for transformers: which keys each row sees, in words instead of a [Sq, Sk] tensor.

transformers makes a model's mask once a forward and hands it to every layer. What it describes by a causal
order, a window, padding and a cache's length becomes a `VisibleKeys` here: lengths [B] or a row of booleans
[B, 1, 1, Sk], and a few integers. To everything but this library's attention, `VisibleKeys` is the boolean
tensor [B, 1, Sq, Sk] that transformers' own `sdpa_mask` makes of the same arguments, built when somebody
computes with it. Patterns that this file does not know (packed sequences, chunks, a model's own functions)
and calls that torch traces get that tensor at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils

from ..problem import Causal


@dataclass(frozen=True, kw_only=True, eq=False)
class Visible:
    """What a mask says in the words of `attention`. A limit of a window is -1 where there is none."""

    causal: Causal | None
    window: tuple[int, int] | None = None
    seqlens_k: torch.Tensor | None = None
    """int32 [B]: how many keys count."""
    keys: torch.Tensor | None = None
    """bool [B, 1, 1, Sk]: which keys count."""
    end: int | None = None
    """Keys from here on are seen by no row, and are cut off. None: there are none such."""


class VisibleKeys(torch.Tensor):  # type: ignore[misc]
    """A boolean mask [B, 1, Sq, Sk] without memory, and what it says in `visible`."""

    visible: Visible
    _make_dense: Callable[[], torch.Tensor]
    _dense: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device | str,
        visible: Visible,
        make_dense: Callable[[], torch.Tensor],
    ) -> VisibleKeys:
        """A mask of `shape`; `make_dense` gives it as an ordinary tensor."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.visible, mask._make_dense, mask._dense = visible, make_dense, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Whoever computes with the mask computes with the ordinary tensor."""
        return func(*tree_map(as_dense, args), **tree_map(as_dense, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Without building the tensor."""
        return f"VisibleKeys({tuple(self.shape)}, {self.visible})"

    def dense(self) -> torch.Tensor:
        """The mask as an ordinary boolean tensor, built once."""
        if self._dense is None:
            self._dense = self._make_dense()
        return self._dense


def as_dense(mask: Any) -> Any:
    """`mask`, as an ordinary tensor if it is a VisibleKeys."""
    return mask.dense() if isinstance(mask, VisibleKeys) else mask


class Pattern(NamedTuple):
    """The pattern of a mask function of transformers: causal or not, and a window, both limits inclusive."""

    is_causal: bool
    left: int = -1
    right: int = -1


def pattern_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of `mask_function`; None for a function that this file does not know."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(is_causal=True)
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern(is_causal=False)
    parts = _captured(mask_function, "and_masks", "mask_functions")
    if parts is None or len(parts) != 2:
        return None
    overlay, order = parts
    width = _captured(overlay, "sliding_window_overlay", "sliding_window")
    if type(width) is int and width > 0 and order is masking_utils.causal_mask_function:
        return Pattern(is_causal=True, left=width - 1, right=0)
    width = _captured(overlay, "sliding_window_bidirectional_overlay", "sliding_window")
    if type(width) is int and width >= 0 and pattern_of(order) == Pattern(is_causal=False):
        return Pattern(is_causal=False, left=width, right=width)
    return None


def _captured(function: Any, maker: str, name: str) -> Any:
    """The variable `name` of `function` if `maker` of masking_utils returned it, else None."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    if not function.__qualname__.startswith(f"{maker}.<locals>."):
        return None
    return inspect.getclosurevars(function).nonlocals.get(name)


class _Sizes(NamedTuple):
    """Row i stands at position q_offset + i, key j at kv_offset + j."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    offset: int | torch.Tensor
    """q_offset - kv_offset: row i sees key j, causal, when j <= i + offset."""


def visible_keys_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask function for this library's attention: a VisibleKeys, a bool tensor, or None.

    Takes what transformers gives to its `sdpa_mask`: `q_length` and `q_offset`, or `cache_position` in
    earlier releases; attention_mask is bool [B, tokens]. None means what it means there: nothing is hidden
    but what the layer's `is_causal` hides. One look at the values of the padding says where it lies, which
    waits for the device once for each mask of a forward.
    """
    given = options | {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    if cache_position is None:
        assert q_length is not None
        if isinstance(q_offset, torch.Tensor):
            q_offset = q_offset.clone()  # the cache counts on in place
        given |= {"q_length": q_length, "q_offset": q_offset}
        device = options.get("device", "cpu")
    else:
        given["cache_position"] = cache_position
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    allows_none = bool(options.get("allow_is_causal_skip", True))
    is_for_compiled_decoding = q_length == 1 and not allows_none
    pattern = pattern_of(mask_function)
    if (
        pattern is None
        or is_for_compiled_decoding
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or (attention_mask is not None and attention_mask.dim() != 2)
    ):
        return _dense_mask(given)
    offset = 0 if cache_position is not None and kv_length == q_length else q_offset - kv_offset
    sizes = _Sizes(batch_size, q_length, kv_length, offset)
    visible = _visible(sizes, pattern, _padding(attention_mask, kv_length, kv_offset))
    if visible is None:
        return _dense_mask(given)
    if not pattern.is_causal:
        allows_none = bool(options.get("allow_is_bidirectional_skip", False))
    if allows_none and _is_default(visible):
        return None
    always = given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return VisibleKeys((batch_size, 1, q_length, kv_length), device, visible, lambda: _dense_mask(always))


def _dense_mask(given: dict[str, Any]) -> Any:
    """What transformers' sdpa attention would get."""
    return masking_utils.sdpa_mask(**given)


def _is_default(visible: Visible) -> bool:
    """Whether the attention of a layer does the same without a mask."""
    if visible.window is not None or visible.seqlens_k is not None or visible.keys is not None:
        return False
    return visible.causal is Causal.TOP_LEFT or (visible.causal is None and visible.end is None)


def _visible(sizes: _Sizes, pattern: Pattern, padding: torch.Tensor | None) -> Visible | None:
    """What a mask of these says, or None where `attention` has no words for it."""
    seqlen_q, seqlen_k, offset = sizes.seqlen_q, sizes.seqlen_k, sizes.offset
    window = (pattern.left, pattern.right) if 0 <= pattern.left < seqlen_k - 1 else None
    if not pattern.is_causal:
        if window is None:
            lengths, keys = _lengths_or_keys(padding)
            return Visible(causal=None, seqlens_k=lengths, keys=keys)
        if isinstance(offset, torch.Tensor) or offset != seqlen_k - seqlen_q:
            return None
        return Visible(causal=None, window=window, keys=_keys(padding))  # lengths would move the window
    if isinstance(offset, torch.Tensor):
        ends = (offset + seqlen_q).to(torch.int32).reshape(1).expand(sizes.batch).contiguous()
        return Visible(causal=Causal.BOTTOM_RIGHT, window=window, seqlens_k=ends, keys=_keys(padding))
    end = offset + seqlen_q
    if offset < 0 or end > seqlen_k:
        return None
    if padding is not None:
        padding = padding[:, :end]
    cut = end if end < seqlen_k else None
    if seqlen_q == 1 and window is None:  # the row sees every key that is left
        lengths, keys = _lengths_or_keys(padding)
        return Visible(causal=None, seqlens_k=lengths, keys=keys, end=cut)
    if offset == 0:
        lengths, keys = _lengths_or_keys(padding)
        return Visible(causal=Causal.TOP_LEFT, window=window, seqlens_k=lengths, keys=keys, end=cut)
    return Visible(causal=Causal.BOTTOM_RIGHT, window=window, keys=_keys(padding), end=cut)


def _padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: Any) -> torch.Tensor | None:
    """bool [B, Sk]: which keys are tokens. None where nobody says so."""
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    if isinstance(kv_offset, torch.Tensor):
        positions = torch.arange(kv_length, device=mask.device) + kv_offset
        return mask[:, positions.clamp(max=mask.shape[1] - 1)] & (positions < mask.shape[1])
    mask = mask[:, kv_offset : kv_offset + kv_length]
    return torch.nn.functional.pad(mask, (0, kv_length - mask.shape[1]))


def _lengths_or_keys(padding: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What hides padding [B, Sk]: int32 lengths [B] if it lies behind the tokens, else bool [B, 1, 1, Sk].

    (None, None) where every key is a token.
    """
    if padding is None:
        return None, None
    lengths = padding.sum(-1, dtype=torch.int32)
    is_whole = (lengths == padding.shape[1]).all()
    columns = torch.arange(padding.shape[1], device=padding.device)
    is_behind = (padding == (columns < lengths[:, None])).all()
    whole, behind = torch.stack([is_whole, is_behind]).tolist()  # waits for the device
    if whole:
        return None, None
    return (lengths, None) if behind else (None, padding[:, None, None, :])


def _keys(padding: torch.Tensor | None) -> torch.Tensor | None:
    """What hides padding [B, Sk] where lengths would mean something else: bool [B, 1, 1, Sk], or None."""
    if padding is None or bool(padding.all()):
        return None
    return padding[:, None, None, :]
