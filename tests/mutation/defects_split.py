"""Defects of split kernels: which keys a CTA has, how the CTAs of a tile meet, how the last one merges.

CTAs of a tile may run one after the other here, so a missing fence or barrier where they meet changes no
result: the engine's rules for that meeting (arch/simt/arrivals.hpp) have to find it, in any order of CTAs.
"""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_SPLIT = "fmha_fwd/split.cuh"
_Q_LOAD = "fmha_fwd/q_load.cuh"
_MERGE = "fmha_fwd/group_merge.cuh"
_KEY_SPLIT = "attention/key_split.cuh"
_PARTS = "attention/split_parts.cuh"
_KERNEL = "fmha_fwd/kernel.cuh"
_LAUNCH = "fmha_fwd/launch.cuh"
_ARRIVES = "last = Arch::increment(arrivals) == static_cast<uint32_t>(num_active - 1);"
_FIRST_PART = "first_part = int64_t{tile_index} * params.num_splits;\n    const int num_rows"
_ROWS = "cute::min(+kBlockM, sequence.num_rows - tile.m_block * kBlockM);"


def _split(name: str, old: str, new: str, defect: str, by: Check, *, header: str = _SPLIT) -> Mutant:
    return Mutant(
        name=f"split_{name}", header=header, old=old, new=new, defect=defect, kernels=Kernels.SPLIT, by=by
    )


def _alone(name: str, old: str, new: str, defect: str, *, header: str) -> Mutant:
    return Mutant(
        name=f"split_alone_{name}",
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.SPLIT_ALONE,
        by=Check.NUMERICS,
    )


SPLITS: tuple[Mutant, ...] = (
    # ---- without KV groups ----
    _alone(
        "reads_one_row_too_few",
        "if (row_of(i) < sequence.seqlen_q - first_row &&",
        "if (row_of(i) < sequence.seqlen_q - first_row - 1 &&",
        "the last row of Q is not read",
        header=_Q_LOAD,
    ),
    _alone(
        "ignores_a_negative_scale",
        "sign = params.negate_q ? 0x80008000u : 0u;",
        "sign = 0u;",
        "Q keeps its sign under a negative scale",
        header=_Q_LOAD,
    ),
    _alone(
        "sums_of_a_lane",
        "row_sum[i] = SoftmaxState::across_quad(softmax.row_sum[i]);",
        "row_sum[i] = softmax.row_sum[i];",
        "a part's row sums are those of one lane",
        header=_MERGE,
    ),
    # ---- which keys ----
    _split(
        "begins_a_block_late",
        "s.first_block = keys.n_block_min + index * share;",
        "s.first_block = keys.n_block_min + index * share + (index > 0 ? 1 : 0);",
        "the keys of a split begin one block late",
        Check.NUMERICS,
        header=_KEY_SPLIT,
    ),
    _split(
        "ends_a_block_late",
        "sequence.seqlen_k - first_key, num_blocks * Traits::kBlockN);",
        "sequence.seqlen_k - first_key, (num_blocks + 1) * Traits::kBlockN);",
        "the first key block of the next split counts twice",
        Check.NUMERICS,
        header=_KEY_SPLIT,
    ),
    _split(
        "causal_offset_not_shifted",
        "    sequence.causal_offset -= first_key;\n",
        "",
        "the diagonal of every split is that of the first",
        Check.NUMERICS,
        header=_KEY_SPLIT,
    ),
    _split(
        "reads_the_first_keys",
        "    sequence.first_row_k += first_key;\n",
        "",
        "every split reads the keys of the first",
        Check.NUMERICS,
        header=_KEY_SPLIT,
    ),
    _split(
        "empty_ones_take_part",
        "    if (split.index >= split.num_active) return;\n",
        "",
        "splits without keys leave a result and arrive",
        Check.NUMERICS,
        header=_KERNEL,
    ),
    _split(
        "empty_tile_is_not_stored",
        "if (split_index == 0) Epilogue<Traits>::store_empty",
        "if (split_index == 1) Epilogue<Traits>::store_empty",
        "rows without keys are stored by a split that need not exist",
        Check.OUTSIDE,
        header=_KERNEL,
    ),
    # ---- where every row sees every key ----
    _split(
        "sees_all_of_a_padded_sequence",
        "p.seqlens_q || p.seqlens_k ||",
        "p.seqlens_q ||",
        "a sequence's own number of keys is not asked for",
        Check.NUMERICS,
        header=_LAUNCH,
    ),
    _split(
        "sees_all_under_a_causal_mask",
        "params.sees_all = !(p.is_causal || p.has_window",
        "params.sees_all = !(p.has_window",
        "a causal mask hides nothing",
        Check.NUMERICS,
        header=_LAUNCH,
    ),
    _split(
        "sees_keys_that_do_not_exist",
        "sequence.seqlen_k / Traits::kBlockN, 0, 0}",
        "(sequence.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN, 0, 0}",
        "the last block of keys counts as whole",
        Check.NUMERICS,
        header="attention/key_range.cuh",
    ),
    _split(
        "only_split_forgets_a_block",
        "return {0, keys.n_block_min, keys.n_block_max - keys.n_block_min, 1};",
        "return {0, keys.n_block_min, keys.n_block_max - keys.n_block_min - 1, 1};",
        "where one CTA has all keys of a tile, it leaves the last block out",
        Check.NUMERICS,
        header=_KEY_SPLIT,
    ),
    _split(
        "every_row_is_the_first",
        "source = rows[i / 4 % Traits::kMmaM * 2 + i % 2]",
        "source = rows[i / 4 % Traits::kMmaM * 2]",
        "a thread reads one of its two rows of Q twice",
        Check.NUMERICS,
        header=_Q_LOAD,
    ),
    # ---- where the CTAs of a tile meet ----
    _split(
        "no_fence_before_arriving",
        "      Arch::fence_device();\n      " + _ARRIVES,
        "      " + _ARRIVES,
        "the count may be seen before the part that it stands for",
        Check.RULES,
    ),
    _split(
        "no_barrier_before_arriving",
        "Arch::syncthreads();  // the CTA has written its part\n",
        "\n",
        "a CTA counts itself in while its other threads still write its part",
        Check.RULES,
    ),
    _split(
        "no_fence_behind_the_last_arrival",
        "      if (last) *arrivals = 0;\n      Arch::fence_device();\n",
        "      if (last) *arrivals = 0;\n",
        "the last CTA may read parts from before the others' arrivals",
        Check.RULES,
    ),
    _split(
        "no_barrier_behind_the_last_arrival",
        "return Arch::syncthreads_or(last);",
        "return Arch::any(last);",
        "the warps of the last CTA do not hear that it is the last",
        Check.RULES,
    ),
    _split(
        "count_is_not_reset",
        "      if (last) *arrivals = 0;\n",
        "",
        "the next launch begins with the count of this one",
        Check.IDENTITIES,
    ),
    _split(
        "last_but_one_merges",
        _ARRIVES,
        _ARRIVES.replace("num_active - 1", "num_active - 2"),
        "the CTA that arrives last but one merges",
        Check.IDENTITIES,
    ),
    _split(
        "waits_for_empty_splits",
        "is_last(params.arrivals + tile_index, split.num_active)",
        "is_last(params.arrivals + tile_index, params.num_splits)",
        "the last CTA waits for splits without keys, which never arrive",
        Check.IDENTITIES,
    ),
    _split(
        "tiles_share_a_count",
        "is_last(params.arrivals + tile_index, split.num_active)",
        "is_last(params.arrivals + tile_index / 2, split.num_active)",
        "two tiles count on one counter",
        Check.IDENTITIES,
    ),
    # ---- what they leave ----
    _split(
        "part_of_another_split",
        "store_part(params, first_part + split.index,",
        "store_part(params, first_part + split.index / 2 * 2,",
        "two splits leave their results in one place",
        Check.NUMERICS,
    ),
    _split(
        "part_of_another_tile",
        _FIRST_PART,
        _FIRST_PART.replace("{tile_index}", "{tile_index / 2}"),
        "two tiles leave their results in one place",
        Check.NUMERICS,
    ),
    _split(
        "rows_of_parts_overlap",
        "(part * Traits::kBlockM + row) * Traits::kHeadDim;",
        "(part * Traits::kBlockM + row) * (Traits::kHeadDim - 4);",
        "the last columns of a row lie where the next one begins",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "parts_in_32_bits",
        _FIRST_PART,
        _FIRST_PART.replace(
            "int64_t{tile_index} * params.num_splits", "int8_t(tile_index * params.num_splits)"
        ),
        "the offset of a part overflows",
        Check.GUARD_PAGES,
    ),
    # ---- the merge ----
    _split(
        "no_weights",
        "weight = Arch::exp2(stat[i].x - max);",
        "weight = 1.f;",
        "parts are added as if their references were one",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "row_max_of_one_ignored",
        "for (int i = 0; i < kBatch; ++i) batch_max = fmaxf(batch_max, stat[i].x);",
        "for (int i = 1; i < kBatch; ++i) batch_max = fmaxf(batch_max, stat[i].x);",
        "the reference of the first split does not count: its weight overflows",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "sums_not_weighted",
        "sum += weight * stat[i].y;",
        "sum += stat[i].y;",
        "row sums are added as if their references were one",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "batches_not_rescaled",
        "      sum *= scale;\n",
        "",
        "more than eight splits: row sums of a batch are not brought to the next one's reference",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "statistics_of_neighbouring_rows",
        "load<kIsSameLaunch>(stats + s * Traits::kBlockM);",
        "load<kIsSameLaunch>(stats + s);",
        "the statistics of another row stand for those of another split",
        Check.NUMERICS,
        header=_PARTS,
    ),
    _split(
        "order_of_arrival_decides",
        " s = first + i;",
        " s = first + i < num_active ? (first + i + Arch::block_idx()) % num_active : first + i;",
        "parts are added from that of the last CTA on: its last bits depend on who was last",
        Check.IDENTITIES,
        header=_PARTS,
    ),
    # ---- the second launch ----
    _split(
        "second_launch_leaves_a_row_out",
        "const int row = index / Parts::kVectors;",
        "const int row = index / Parts::kVectors + 1;",
        "the second launch takes each row for the next one, and leaves the last one of a tile",
        Check.OUTSIDE,
    ),
    _split(
        "second_launch_merges_whole_tiles",
        "    if (split.num_active == 1) return;  // its CTA stored it\n",
        "",
        "where one split has all keys of a tile, what lay in the workspace is stored",
        Check.NUMERICS,
    ),
    _split(
        "second_launch_writes_behind_the_last_row",
        "first_row + row >= sequence.num_rows || first_row",
        "first_row",
        "rows behind the last one are merged",
        Check.OUTSIDE,
    ),
    _split(
        "second_launch_and_the_last_cta",
        "params.arrivals = merges_in_second_launch<Traits>(p) ? nullptr : p.split_arrivals;",
        "params.arrivals = p.split_arrivals;",
        "what the second launch merges is counted and merged before as well",
        Check.IDENTITIES,
        header="fmha_fwd/launch.cuh",
    ),
    # ---- what is stored ----
    _split(
        "one_row_too_many",
        _ROWS,
        _ROWS.replace("tile.m_block * kBlockM)", "tile.m_block * kBlockM + 1)"),
        "a row behind the last one is stored",
        Check.OUTSIDE,
    ),
    _split(
        "rows_beyond_a_length",
        "    if (out_row >= sequence.seqlen_q) {\n      sum = 0.f;",
        "    if (false) {\n      sum = 0.f;",
        "rows beyond a sequence's length are not 0 and -inf",
        Check.NUMERICS,
    ),
    _split(
        "empty_rows_may_be_nan",
        "      out = make_float4(0.f, 0.f, 0.f, 0.f);  // it may be NaN\n",
        "",
        "rows behind a sequence's length become NaN where a value of the sequence is",
        Check.IDENTITIES,
    ),
    _split(
        "columns_beyond_head_dim",
        "    if (col < Traits::head_dim_v(params))\n      *reinterpret_cast<uint2 *>",
        "    *reinterpret_cast<uint2 *>",
        "a smaller head_dim: columns behind a row are written",
        Check.OUTSIDE,
    ),
    _split(
        "lse_of_the_first_tile",
        "*Base::lse_at(params, tile, sequence, out_row) =",
        "*Base::lse_at(params, tile, sequence, row) =",
        "softmax_lse of every tile of a head goes to the rows of the first",
        Check.OUTSIDE,
    ),
    _split(
        "lse_of_the_wrong_row",
        "return lse + head * params.lse_head_stride + position;",
        "return lse + (params.heads_per_kv.divisor - 1 - head) * params.lse_head_stride + position;",
        "softmax_lse of the heads of a key head is stored in reverse",
        Check.LSE,
        header="fmha_fwd/epilogue.cuh",
    ),
    _split(
        "merge_begins_with_a_weight",
        "Merged merged = {kNoKey, 0.f, ",
        "Merged merged = {kNoKey, 1.f, ",
        "a row without keys in any split counts as one with a key",
        Check.IDENTITIES,
        header=_PARTS,
    ),
)
