"""Defects of Hopper's quantised kernels: what is loaded, which operand is which, what O gets and when."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_MAINLOOP = "fmha_fwd_q8_sm90/mainloop.cuh"
_LOAD = "fmha_fwd_q8_sm90/tile_load.cuh"
_Q = "fmha_fwd_q8_sm90/q_fragment.cuh"


def _hopper(
    name: str,
    header: str,
    old: str,
    new: str,
    defect: str,
    by: Check = Check.NUMERICS,
    *,
    alone: bool = False,
) -> Mutant:
    return Mutant(
        name=f"quantized_hopper_{name}",
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.QUANTIZED_HOPPER,
        by=by,
        alone=alone,
    )


QUANTIZED_HOPPER: tuple[Mutant, ...] = (
    # ---- what is loaded ----
    _hopper(
        "v_from_where_k_lies",
        "fmha_fwd_q8_sm90/launch.cuh",
        "blocks, Traits::Block::kV, Traits::kSwizzleBytesV",
        "blocks, 0, Traits::kSwizzleBytesV",
        "the bytes of K are taken for those of V",
    ),
    _hopper(
        "key_scales_of_the_first_block",
        _LOAD,
        "params.k_scale + int64_t{block} * 4",
        "params.k_scale + int64_t{first_block} * 4",
        "every block of a head has the scales of its first keys",
    ),
    _hopper(
        "value_scales_of_the_first_block",
        _LOAD,
        "params.blocks + int64_t{block} * Block::kBytes",
        "params.blocks + int64_t{first_block} * Block::kBytes",
        "every block of a head has the scales of its first tokens",
    ),
    _hopper(
        "bytes_of_scales_not_expected",
        _LOAD,
        "2 * Traits::kTileBytes + Traits::kScaleBytesV + Traits::kScaleBytesK",
        "2 * Traits::kTileBytes + Traits::kScaleBytesV",
        "a stage counts as full before all of it has come",
        Check.RULES,
    ),
    _hopper(
        "stage_not_waited_for",
        _LOAD,
        "      Arch::mbarrier_wait(&smem.empty[slot.index], slot.phase ^ 1);\n",
        "",
        "blocks are loaded over those that are being read",
        Check.RULES,
    ),
    _hopper(
        "stage_released_by_some",
        "fmha_fwd_q8_sm90/kernel.cuh",
        "Arch::mbarrier_init(&smem.empty[i], Traits::kNWarps);",
        "Arch::mbarrier_init(&smem.empty[i], Traits::kNWarps - 1);",
        "a block may be loaded over one that a warp still reads",
        Check.RULES,
    ),
    _hopper(
        "unseen_blocks_kept",
        _MAINLOOP,
        "      fmha_fwd_sm90::release_unread<Arch>(&smem.empty[slot.index]);\n",
        "",
        "a warpgroup never gives back the blocks that it does not see",
        Check.RULES,
    ),
    # ---- Q ----
    _hopper(
        "sign_of_the_scale_lost",
        _Q,
        "params.negate_q ? 0x80008000u : 0u",
        "params.negate_q ? 0u : 0u",
        "a negative softmax_scale counts as its magnitude",
    ),
    _hopper(
        "columns_beyond_head_dim",
        _Q,
        "row < sequence.seqlen_q && col < params.head_dim)",
        "row < sequence.seqlen_q)",
        "a smaller head_dim reads what lies behind its rows",
    ),
    _hopper(
        "largest_of_a_lane",
        _Q,
        "      amax = cute::max(amax, Arch::shfl_xor(amax, 1));\n",
        "",
        "lanes of a quad scale their columns of a row differently",
    ),
    # ---- the loop ----
    _hopper(
        "sums_of_two_blocks",
        _MAINLOOP,
        "      mma_pv.accumulate_ = GMMA::ScaleOut::Zero;\n",
        "",
        "P V of a block starts with the sums of the one before",
    ),
    _hopper(
        "weight_of_the_next_block",
        _MAINLOOP,
        "fmaf(softmax.late_weight[i], static_cast<float>",
        "fmaf(weight[i], static_cast<float>",
        "sums enter O with the weight of the block behind theirs",
    ),
    _hopper(
        "late_weight_not_moved",
        "fmha_fwd_q8/softmax.cuh",
        "    if constexpr (Traits::kAddsLate) late_weight[i] *= scores_scale;\n",
        "",
        "a block whose sums are under way keeps the weight of the former reference",
    ),
    _hopper(
        "unseen_scores_decide_the_reference",
        _MAINLOOP,
        "most[i] = SoftmaxState::largest(scores, i);",
        "most[i] = cute::max(most[i], SoftmaxState::largest(scores, i));",
        "P of a masked block refers to keys that the row does not see",
    ),
    _hopper(
        "largest_of_some_columns",
        _MAINLOOP,
        "for (int j = 2; j < kCols; j += 2) max",
        "for (int j = 4; j < kCols; j += 2) max",
        "the largest score may be missed, and its P wraps",
    ),
    _hopper(
        "keys_in_their_order",
        _MAINLOOP,
        "\n                                          .compose(_, typename Traits::KeyOrder{}));",
        ");",
        "scores are masked as if columns were keys",
        alone=True,
    ),
    _hopper(
        "halves_of_p_swapped",
        _MAINLOOP,
        "const int half = h % 2, tile = 2 * (2 * k + h / 2);",
        "const int half = h % 2, tile = 2 * (2 * k + 1 - h / 2);",
        "P meets V of other keys",
    ),
    _hopper(
        "rows_of_the_first_consumer",
        "fmha_fwd_q8_sm90/kernel.cuh",
        "params, sequence, tile.m_block * Traits::kConsumers + consumer);",
        "params, sequence, tile.m_block * Traits::kConsumers);",
        "every warpgroup visits the blocks of the first one",
    ),
)
