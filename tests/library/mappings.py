"""Every meaning that PyTorch, flash_attn and transformers give to an argument, and what stands for it here.

A row of docs/edge-cases.md is made from each, and test_mappings.py runs its check, of mapping_checks.py, on
every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.library import mapping_checks as checks


@dataclass(frozen=True)
class Mapping:
    """`theirs` is an argument or a result of torch, `ours` what means the same; `check` takes a device."""

    theirs: str
    ours: str
    check: Callable[[str], None]


_OPERATOR = "`aten::_scaled_dot_product_flash_attention`"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| row | PyTorch | here |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.theirs} | {row.ours} |" for name, row in MAPPINGS.items()]
    return "\n".join(lines)


MAPPINGS: dict[str, Mapping] = {
    "sdpa_is_causal": Mapping(
        "`is_causal` of `F.scaled_dot_product_attention`", '`causal="top_left"`', checks.sdpa_is_causal
    ),
    "sdpa_scale_none": Mapping(
        "`scale=None` there", "1/√D with the D of the caller, before any padding", checks.sdpa_scale_none
    ),
    "sdpa_boolean_mask": Mapping(
        "a boolean `attn_mask` there", "`attn_mask`: True lets a key through", checks.sdpa_boolean_mask
    ),
    "sdpa_float_mask": Mapping(
        "a float `attn_mask` there",
        "`attn_mask`: added to the scaled scores, in natural units",
        checks.sdpa_float_mask,
    ),
    "sdpa_enable_gqa": Mapping(
        "`enable_gqa` there", "query head h reads key head h // (Hq / Hkv)", checks.sdpa_enable_gqa
    ),
    "sdpa_dropout_p": Mapping(
        "`dropout_p` there",
        "`p_dropout`: the probability to drop; the bits are not torch's",
        checks.sdpa_dropout_p,
    ),
    "autocast": Mapping(
        "`torch.autocast`", "q, k, v and a float mask are cast to its dtype first", checks.autocast
    ),
    "causal_upper_left": Mapping(
        "`CausalBias`, upper left", '`causal="top_left"`', checks.causal_upper_left
    ),
    "causal_lower_right": Mapping(
        "`CausalBias`, lower right", '`causal="bottom_right"`', checks.causal_lower_right
    ),
    "flash_is_causal": Mapping(
        f"`is_causal` of {_OPERATOR}, the swap point", '`causal="bottom_right"`', checks.flash_is_causal
    ),
    "flash_scale": Mapping("`scale` there", "`scale`; None is 1/√D", checks.flash_scale),
    "flash_logsumexp": Mapping(
        "`logsumexp` there: +∞ in a row that sees no key",
        "`softmax_lse`, natural logarithm, float32 [B, Hq, Sq] contiguous: −∞ in such a row, which the swap "
        "point turns into +∞",
        checks.flash_logsumexp,
    ),
    "flash_grouped_heads": Mapping(
        "fewer key heads there", "`enable_gqa=True`", checks.flash_grouped_heads
    ),
    "flash_debug_mask": Mapping(
        "`return_debug_mask` there", "left to torch; without it an empty tensor", checks.flash_debug_mask
    ),
    "flash_dropout_p": Mapping("`dropout_p` there", "left to torch, whose backward draws the bits again",
                               checks.flash_dropout_p),
    "flash_seeds_and_lengths": Mapping(
        "`rng_state`, `cum_seq_q`, `cum_seq_k`, `max_q`, `max_k` there",
        "no seed is drawn; None, None, Sq, Sk",
        checks.flash_seeds_and_lengths,
    ),
    "flash_requires_grad": Mapping(
        "inputs there that require grad",
        "served, and the operator's backward; with dropout left to torch, both of them",
        checks.flash_requires_grad,
    ),
    "flash_for_cpu_is_causal": Mapping(
        "`is_causal` of `aten::_scaled_dot_product_flash_attention_for_cpu`, which is not replaced",
        '`causal="top_left"`',
        checks.flash_for_cpu_is_causal,
    ),
    "varlen_is_causal": Mapping(
        "`is_causal` of `aten::_flash_attention_forward` with `cum_seq_q`, which is not replaced",
        '`attention_varlen(…, causal="bottom_right")`; `softmax_lse` [Hq, total]',
        checks.varlen_is_causal,
    ),
    "flash_attn_causal": Mapping(
        "`causal` of flash_attn's `flash_attn_func`", '`causal="bottom_right"`', checks.flash_attn_causal
    ),
    "flash_attn_window_size": Mapping(
        "`window_size` there; (-1, -1) is none",
        "`window`, counted from the last row and key, also without a causal mask",
        checks.flash_attn_window_size,
    ),
    "flash_attn_softmax_scale": Mapping(
        "`softmax_scale` there", "`scale`; None is 1/√D", checks.flash_attn_softmax_scale
    ),
    "transformers_is_causal": Mapping(
        "no mask in a layer of transformers: causal for more than one row, unless `is_causal` is False",
        '`causal="top_left"`',
        checks.transformers_is_causal,
    ),
    "transformers_s_aux": Mapping("`s_aux` there", "`sinks`, in natural units", checks.transformers_s_aux),
}  # fmt: skip

if __name__ == "__main__":
    print(table())
