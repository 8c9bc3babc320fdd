"""The mask function for transformers says, in words, what transformers' sdpa_mask says in a tensor."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sdpa_cutlass.errors import UnsupportedError
from sdpa_cutlass.problem import Causal

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
masks = pytest.importorskip("sdpa_cutlass.integrations.transformers_mask", exc_type=UnsupportedError)

if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    pytest.skip("transformers' own mask function takes other arguments here", allow_module_level=True)

BATCH = 3
SIZES = [
    # Sq, Sk, q_offset, kv_offset
    (7, 7, 0, 0),  # a prompt
    (1, 7, 6, 0),  # a step with a cache that grows
    (4, 11, 7, 0),  # some rows with a cache that grows
    (5, 16, 0, 0),  # a prompt with a cache of full length
    (4, 16, 5, 0),  # some rows with one
    (1, 16, 5, 0),
    (4, 9, 12, 7),  # a cache that forgot its first keys
    (1, 6, 12, 7),
]
PADDINGS = {
    "nobody says": None,
    "none": lambda length: torch.ones(BATCH, length),
    "right": lambda length: torch.arange(length) < torch.tensor([[length], [3], [length - 1]]),
    "left": lambda length: torch.arange(length) >= torch.tensor([[0], [2], [length - 1]]),
    "holes": lambda length: (torch.arange(length) + torch.arange(BATCH)[:, None]) % 3 > 0,
}
PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "window 1": masking_utils.sliding_window_causal_mask_function(1),
    "window 4": masking_utils.sliding_window_causal_mask_function(4),
    "window 40": masking_utils.sliding_window_causal_mask_function(40),
}
if hasattr(masking_utils, "bidirectional_mask_function"):  # not in transformers 4.53
    PATTERNS["full"] = masking_utils.bidirectional_mask_function
if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
    PATTERNS["both sides 2"] = masking_utils.sliding_window_bidirectional_mask_function(2)

TWO_SIDED = ("full", "both sides 2")


def spelled_out(visible: Any, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """bool [B, 1, Sq, Sk] of what `attention` makes of `visible`, by its documentation."""
    end = seqlen_k if visible.end is None else visible.end
    lengths = torch.full((BATCH,), end) if visible.seqlens_k is None else visible.seqlens_k.clamp(0, end)
    lengths = lengths.view(BATCH, 1, 1, 1)
    row, column = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    seen = (column < lengths).expand(BATCH, 1, seqlen_q, seqlen_k)
    offset: Any = 0
    if visible.causal is Causal.BOTTOM_RIGHT or (visible.causal is None and visible.window is not None):
        offset = lengths - seqlen_q
    if visible.causal is not None:
        seen = seen & (column <= row + offset)
    if visible.window is not None:
        left, right = visible.window
        seen = seen & ((column >= row + offset - left) | (left < 0))
        seen = seen & ((column <= row + offset + right) | (right < 0))
    if visible.keys is not None:
        assert visible.keys.shape[1:3] == (1, 1)  # no [Sq, Sk] tensor
        keys = visible.keys
        seen = seen & torch.nn.functional.pad(keys, (0, seqlen_k - keys.shape[3]))
    return seen


def arguments(
    sizes: tuple[int, int, int, int], padding: str, pattern: str, *, static: bool
) -> dict[str, Any]:
    seqlen_q, seqlen_k, q_offset, kv_offset = sizes
    make = PADDINGS[padding]
    return {
        "batch_size": BATCH,
        "q_length": seqlen_q,
        "kv_length": seqlen_k,
        "q_offset": torch.tensor(q_offset) if static else q_offset,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[pattern],
        "attention_mask": None if make is None else make(q_offset + seqlen_q).bool(),
        "allow_is_causal_skip": pattern not in TWO_SIDED,  # as transformers asks
        "device": "cpu",
    }


@pytest.mark.parametrize("static", [False, True], ids=["", "offset in a tensor"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_lengths_and_windows_say_what_the_tensor_says(padding: str, pattern: str, static: bool) -> None:
    in_words = 0
    for sizes in SIZES:
        given = arguments(sizes, padding, pattern, static=static)
        expected = masking_utils.sdpa_mask(
            **given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        mask = masks.visible_keys_mask(**given)
        if mask is None:  # what a layer does without a mask
            causal = Causal.TOP_LEFT if pattern not in TWO_SIDED and sizes[0] > 1 else None
            mask_says = spelled_out(masks.Visible(causal=causal), *sizes[:2])
        elif isinstance(mask, masks.VisibleKeys):
            assert mask.shape == expected.shape
            mask_says = spelled_out(mask.visible, *sizes[:2])
            assert torch.equal(mask.dense(), expected)
        else:  # one row, or rows that a window on both sides does not end with
            assert pattern in TWO_SIDED
            assert sizes[0] == 1 or pattern == "both sides 2"
            assert torch.equal(mask, expected)
            continue
        assert torch.equal(mask_says, expected.expand_as(mask_says)), (sizes, mask)
        in_words += 1
    if pattern not in TWO_SIDED:
        assert in_words == len(SIZES)
    elif not (static and pattern == "both sides 2"):
        assert in_words > 0


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that torch makes meanwhile."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return found


@pytest.mark.parametrize("pattern", ["causal", "window 4", "window 40", "full"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_nothing_of_rows_times_keys_is_made(padding: str, pattern: str) -> None:
    """By the mask function, of 700 rows and keys; and no layer asks its mask for the tensor."""
    if pattern not in PATTERNS:
        pytest.skip("this transformers has no such pattern")
    hook = pytest.importorskip("sdpa_cutlass.integrations.transformers")
    seqlen = 700
    given = arguments((seqlen, seqlen, 0, 0), padding, pattern, static=False)
    given["allow_is_bidirectional_skip"] = pattern in TWO_SIDED
    with Largest() as largest:
        mask = masks.visible_keys_mask(**given)
    assert largest.elements <= BATCH * seqlen
    q, layer = torch.zeros(BATCH, 1, seqlen, 64, dtype=torch.float16), torch.nn.Linear(1, 1)
    layer.is_causal = pattern not in TWO_SIDED
    served = hook.register(devices=["cpu"]).served
    hook.attention_forward(layer, q, q, q, mask)
    assert hook.register(devices=["cpu"]).served == served + 1
    assert mask is None or mask._dense is None
    with Largest() as largest:  # which would have seen it
        masking_utils.sdpa_mask(
            **given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
    assert largest.elements >= seqlen * seqlen


def test_a_cache_that_counts_on_does_not_move_the_mask() -> None:
    """transformers hands over the counter of the cache itself, and the first layer raises it."""
    given = arguments((4, 16, 5, 0), "left", "causal", static=True)
    mask = masks.visible_keys_mask(**given)
    before = masking_utils.sdpa_mask(**given)
    given["q_offset"].add_(4)
    assert torch.equal(mask.dense(), before)
    assert mask.visible.seqlens_k.tolist() == [9] * BATCH


def test_other_functions_become_the_tensor_of_transformers() -> None:
    causal = masking_utils.causal_mask_function

    def every_other(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return column % 2 == row % 2

    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(BATCH, dtype=torch.int64))
    window = masking_utils.sliding_window_overlay(2)
    others = [
        every_other,
        chunked,
        masking_utils.and_masks(causal, every_other),
        masking_utils.or_masks(window, causal),
        masking_utils.and_masks(window, causal, every_other),
        masking_utils.and_masks(masking_utils.sliding_window_causal_mask_function(2), every_other),
    ]
    for function in others:
        given = arguments((7, 7, 0, 0), "none", "causal", static=False) | {"mask_function": function}
        given["allow_is_causal_skip"] = False
        mask = masks.visible_keys_mask(**given)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, masking_utils.sdpa_mask(**given))


def test_whoever_computes_with_a_mask_gets_the_tensor() -> None:
    given = arguments((7, 7, 0, 0), "left", "window 4", static=False)
    mask, expected = masks.visible_keys_mask(**given), masking_utils.sdpa_mask(**given)
    assert (mask.dtype, mask.ndim, mask.device) == (torch.bool, 4, torch.device("cpu"))
    for use in (lambda m: m[:, :, 2:], torch.logical_not, lambda m: torch.cat([m, m]), lambda m: m.float()):
        found = use(mask)
        assert type(found) is torch.Tensor
        assert torch.equal(found, use(expected))
    assert "window=(3, 0)" in repr(mask)


def test_positions_of_earlier_releases_are_understood() -> None:
    """transformers 5.0 and earlier ones say with cache_position where the rows stand."""
    for (seqlen_q, seqlen_k, q_offset, kv_offset), pattern in itertools.product(
        SIZES, ("causal", "window 4")
    ):
        given = arguments((seqlen_q, seqlen_k, q_offset, kv_offset), "left", pattern, static=False)
        expected = masking_utils.sdpa_mask(**given | {"allow_is_causal_skip": False})
        del given["q_length"], given["q_offset"]
        given["cache_position"] = torch.arange(q_offset, q_offset + seqlen_q)
        mask = masks.visible_keys_mask(**given)
        assert torch.equal(spelled_out(mask.visible, seqlen_q, seqlen_k), expected)
