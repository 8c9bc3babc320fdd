"""Defects of Hopper's general kernels whose CTAs compute several tiles, and of keys hidden by position."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_POSITIONS = "fmha_fwd_sm90/position_mask.cuh"


def _general(name: str, header: str, old: str, new: str, defect: str, by: Check = Check.NUMERICS) -> Mutant:
    return Mutant(
        name=name, header=header, old=old, new=new, defect=defect, kernels=Kernels.HOPPER_GENERAL, by=by
    )


HOPPER_TURNS: tuple[Mutant, ...] = (
    # ---- several tiles ----
    _general(
        "hopper_later_tiles_look_like_the_first",
        "fmha_fwd_sm90/kernel_traits.cuh",
        "kTakesTurns ? Arch::forget_origin(static_cast<int>(index)) : Arch::block_idx_again();",
        "Arch::block_idx_again();",
        "a CTA's second tile is masked and stored as its first one",
    ),
    _general(
        "hopper_sequences_of_any_length_in_turn",
        "fmha_fwd_sm90/launch.cuh",
        "!Traits::kTakesTurns || p.seqlens_q || p.seqlens_k || p.cu_seqlens_q || p.cu_seqlens_k",
        "!Traits::kTakesTurns",
        "a CTA whose first tile lies beyond its sequence leaves the others out",
        Check.OUTSIDE,
    ),
    _general(
        "hopper_tile_without_keys_is_not_found_again",
        "fmha_fwd_sm90/mainloop.cuh",
        "[slot_q.index][consumer]);\n      under_last_pv();\n",
        "[slot_q.index][consumer]);\n",
        "rows without keys are stored where another tile's are",
    ),
    # ---- which keys a row sees ----
    _general(
        "hopper_diagonal_hidden",
        _POSITIONS,
        "row + sequence.causal_offset + 1 - first_col",
        "row + sequence.causal_offset - first_col",
        "a causal row does not see the key on its diagonal",
    ),
    _general(
        "hopper_window_begins_a_key_early",
        _POSITIONS,
        "row + sequence.window_offset - first_col",
        "row + sequence.window_offset - 1 - first_col",
        "the last key before a row's window is seen",
    ),
    _general(
        "hopper_odd_columns_hidden",
        _POSITIONS,
        "cute::min(left % 8, 2u)",
        "cute::min(left % 8, 1u)",
        "the second of two neighbouring columns is hidden where the next one is",
    ),
)
