"""Defects of the kernels that make gradients: statistics, ranges, masks, dropout, sums, pipeline, stores."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_STATISTICS = "fmha_bwd/preprocess.cuh"
_LOOP = "fmha_bwd/mainloop.cuh"
_RANGE = "fmha_bwd/row_range.cuh"
_DROPOUT = "fmha_bwd/dropout.cuh"
_KERNEL = "fmha_bwd/kernel.cuh"
_TURNS = "fmha_bwd/turns_mainloop.cuh"
_LAUNCH = "fmha_bwd/launch.cuh"
_MASK = "fmha_bwd/dense_mask.cuh"


def backward(
    name: str,
    header: str,
    old: str,
    new: str,
    defect: str,
    by: Check = Check.NUMERICS,
    kernels: Kernels = Kernels.BACKWARD,
    *,
    alone: bool = False,
) -> Mutant:
    return Mutant(
        name=f"backward_{name}",
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=kernels,
        by=by,
        alone=alone,
    )


def _turns(name: str, header: str, old: str, new: str, defect: str, by: Check = Check.NUMERICS) -> Mutant:
    return backward(f"turns_{name}", header, old, new, defect, by, Kernels.BACKWARD_TURNS)


BACKWARDS: tuple[Mutant, ...] = (
    # ---- row statistics ----
    backward(
        "delta_without_dlse",
        _STATISTICS,
        "params.p_keep * (delta - dlse)",
        "params.p_keep * delta",
        "the gradient of softmax_lse is left out",
    ),
    backward(
        "delta_without_p_keep",
        _STATISTICS,
        "params.p_keep * (delta - dlse)",
        "delta - dlse",
        "delta and dP are scaled apart under dropout",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "lse_in_natural_units",
        _STATISTICS,
        ": lse * kLog2e;",
        ": lse;",
        "P is taken to base 2 with an lse to base e",
    ),
    # ---- the loop ----
    backward(
        "dp_without_dropout",
        _LOOP,
        "tSrD(i) = keep(i) ? tSrD(i) : 0.f;",
        "tSrD(i) = tSrD(i);",
        "dropped elements have a dP",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "dv_without_dropout",
        _LOOP,
        "Tensor pairs = packed(tSrS, keep);",
        "Tensor pairs = packed(tSrS, KeepAll{});",
        "dropped elements add to dV",
        kernels=Kernels.BACKWARD_DROPOUT,
        alone=True,
    ),
    backward(
        "hidden_elements_keep_their_ds",
        _LOOP,
        "if (Traits::kHasMask || needs_mask) {",
        "if (false) {",
        "0 times a NaN of a value that the row does not see",
        Check.IDENTITIES,
    ),
    backward(
        "last_head_of_a_group_is_missed",
        _LOOP,
        "const int num_heads = kOwnsKeys ? params.heads_per_kv : 1;",
        "const int num_heads = kOwnsKeys ? params.heads_per_kv - (params.heads_per_kv > 1) : 1;",
        "dK and dV lack the last query head of their key head",
    ),
    backward(
        "dropout_of_the_first_head",
        _LOOP,
        "tile.bidb * params.num_heads_q + tile.bidh + head;",
        "tile.bidb * params.num_heads_q + tile.bidh;",
        "later query heads of a key head take the first one's dropout mask",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "mask_of_the_first_head",
        _LOOP,
        "tile.bidh + head, first_own, first_stream,",
        "tile.bidh, first_own, first_stream,",
        "later query heads of a key head take the first one's mask",
    ),
    backward(
        "stage_filled_too_early",
        _LOOP,
        "int free_slot = kStages - 1;",
        "int free_slot = 0;",
        "the next tiles are loaded over those that are read",
        Check.RACES,
    ),
    backward(
        "no_barrier",
        _LOOP,
        "        Arch::syncthreads();  // B0 and B1 of this tile",
        "        // B0 and B1 of this tile",
        "tiles are read before other threads' copies have landed",
        Check.RACES,
    ),
    # ---- ranges and masks by position ----
    backward(
        "range_starts_late",
        _RANGE,
        "return {first_row / Traits::kBlockM, (",
        "return {(first_row + Traits::kBlockM - 1) / Traits::kBlockM, (",
        "the first block of rows under the diagonal is left out",
    ),
    backward(
        "range_ends_early",
        _RANGE,
        "(end_row + Traits::kBlockM - 1) / Traits::kBlockM,",
        "end_row / Traits::kBlockM,",
        "the last, partial block of rows is left out",
    ),
    backward(
        "whole_block_too_early",
        _RANGE,
        "(first_full + Traits::kBlockM - 1) / Traits::kBlockM,",
        "first_full / Traits::kBlockM,",
        "a block on the diagonal is not masked",
    ),
    backward(
        "causal_offset_has_the_other_sign",
        _RANGE,
        "const int first = key - sequence.causal_offset - first_row;",
        "const int first = key + sequence.causal_offset - first_row;",
        "the diagonal of the bottom-right alignment is mirrored",
    ),
    backward(
        "one_row_too_many",
        _RANGE,
        "row < first || row >= end",
        "row < first || row > end",
        "a row behind a key's window adds to its gradient",
    ),
    # ---- dropout of transposed tiles ----
    backward(
        "shuffle_with_another_lane",
        _DROPOUT,
        "Arch::shfl_xor(own[i], 4)",
        "Arch::shfl_xor(own[i], 8)",
        "words of other keys decide",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "halves_of_a_philox_block_swapped",
        _DROPOUT,
        "key / 16 % 2 != 0",
        "key / 16 % 2 == 0",
        "keys 0 to 15 of a block take the words of keys 16 to 31",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    # ---- dense masks ----
    backward(
        "pairs_not_transposed",
        _MASK,
        "kOwnsKeys ? arch::transpose(pairs[i][j]) : pairs[i][j]",
        "pairs[i][j]",
        "where keys are owned, what a mask has for two keys goes to two rows",
    ),
    backward(
        "pairs_of_floats_are_one",
        _MASK,
        "fmaf(pair.y, kLog2e,",
        "fmaf(pair.x, kLog2e,",
        "where rows are owned, a key takes what a mask of 32 bits has for the key before it",
    ),
    _turns(
        "pairs_of_floats_as_they_are",
        _MASK,
        "        if constexpr (kOwnsKeys) pair = arch::transpose(pair);\n",
        "",
        "where keys are owned, what a mask of 32 bits has for two keys goes to two rows",
    ),
    _turns(
        "pairs_of_half_a_float",
        "arch/movmatrix.hpp",
        "bits[0] = (lower & 0xffffu) | upper << 16;",
        "bits[0] = upper << 16;",
        "every second element of a mask of 32 bits lacks its lower half",
    ),
    backward(
        "pairs_of_half_a_block",
        _MASK,
        "first_stream + get<1>(coords(0, 2 * j)) + turned",
        "first_stream + get<1>(coords(0, 2 * (j & ~1))) + turned",
        "every second block of a mask is that before it",
    ),
    backward(
        "mask_instead_of_positions",
        _LOOP,
        "if (needs_mask) {  // behind the scale, which may be negative or 0, and the bias, which may be NaN",
        "if (needs_mask && !Traits::kHasMask) {",
        "a mask shows keys that positions hide",
    ),
    # ---- stores ----
    backward(
        "scale_twice",
        _KERNEL,
        "store(dk, params.score_scale, 0",
        "store(dk, params.score_scale * params.score_scale, 0",
        "dK is scaled twice",
    ),
    backward(
        "dv_without_p_keep",
        _KERNEL,
        "store(dv, params.dropout.keep_scale, 1",
        "store(dv, 1.f, 1",
        "dV is not divided by p_keep",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "rows_beyond_a_length_are_stored",
        "fmha_bwd/epilogue.cuh",
        "return attends ? pair : 0u;",
        "return pair;",
        "keys beyond a length have gradients",
        Check.NUMERICS,
    ),
    backward(
        "too_many_rows_are_stored",
        "fmha_bwd/epilogue.cuh",
        "tensor.row_stride, first_row, num_rows, num_cols",
        "tensor.row_stride, first_row, 1 << 30, num_cols",
        "rows behind the tensor are written",
        Check.OUTSIDE,
    ),
    # ---- a role for each gradient ----
    _turns(
        "role_of_dv_is_not_launched",
        _LAUNCH,
        "(p.dk != nullptr) + (p.dv != nullptr) : 1;",
        "1 : 1;",
        "as many CTAs are launched as if dK and dV had one role",
        Check.OUTSIDE,
    ),
    _turns(
        "role_of_dv_follows_dk_always",
        _KERNEL,
        "const int first_dv = params.dk.data != nullptr ? params.num_key_tiles : 0;",
        "const int first_dv = params.num_key_tiles;",
        "CTAs make a dK that nobody asks for in place of dV",
        Check.GUARD_PAGES,
    ),
    _turns(
        "no_barrier_before_the_first_operand",
        _TURNS,
        "        Arch::syncthreads();  // the first operand is visible;",
        "        // the first operand is visible;",
        "B1, or Q for dV, is read before other threads' copies have landed",
        Check.RACES,
    ),
    _turns(
        "no_barrier_before_dq_and_dk",
        _TURNS,
        "          Arch::syncthreads();  // B0 is visible; B1 was read",
        "          // B0 is visible; B1 was read",
        "the next B1 is loaded over this one, which others still read",
        Check.RACES,
    ),
    _turns(
        "no_barrier_before_dv",
        _TURNS,
        "          Arch::syncthreads();  // B1 is visible; B0 was read",
        "          // B1 is visible; B0 was read",
        "the next Q is loaded over this one, which others still read",
        Check.RACES,
    ),
    _turns(
        "next_head_is_missed",
        _TURNS,
        "is_last ? head + 1 : head,",
        "head,",
        "the first tile of a query head is multiplied with the last head's other operand",
    ),
    _turns(
        "hidden_elements_keep_their_ds",
        _TURNS,
        "if (Traits::kHasMask || needs_mask) {",
        "if (false) {",
        "0 times a NaN of a value that the row does not see",
        Check.IDENTITIES,
    ),
    _turns(
        "dropout_is_left_out",
        _TURNS,
        "values(i) = keep(i) ? values(i) : 0.f;",
        "values(i) = values(i);",
        "dropped elements have a dP, and add to dV",
    ),
)
