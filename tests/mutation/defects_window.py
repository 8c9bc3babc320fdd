"""Defects of windows and sinks: which blocks a tile visits, which scores count, how a sink joins."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_RANGE = "attention/key_range.cuh"
_SEQUENCE = "attention/sequence.cuh"
_SINKS = "attention/sinks.cuh"
_EPILOGUE = "fmha_fwd/epilogue.cuh"


def _window(
    name: str,
    header: str,
    old: str,
    new: str,
    defect: str,
    *,
    kernels: Kernels = Kernels.GENERAL,
    by: Check = Check.NUMERICS,
) -> Mutant:
    return Mutant(name=name, header=header, old=old, new=new, defect=defect, kernels=kernels, by=by)


WINDOWS: tuple[Mutant, ...] = (
    # ---- which blocks ----
    _window(
        "window_begins_a_block_late",
        _RANGE,
        "before_first / Traits::kBlockN, (before_last",
        "(before_first + Traits::kBlockN - 1) / Traits::kBlockN, (before_last",
        "the block in which the first row's window begins is left out",
    ),
    _window(
        "window_whole_from_a_block_too_early",
        _RANGE,
        "(before_last + Traits::kBlockN - 1) / Traits::kBlockN};",
        "before_last / Traits::kBlockN};",
        "the block in which the last row's window begins is not masked",
    ),
    _window(
        "window_left_end_goes_by_the_first_row",
        _RANGE,
        "before_last = cute::max(last_position + sequence.window_offset, 0);",
        "before_last = cute::max(first_position + sequence.window_offset, 0);",
        "the left end is masked for the first row alone",
    ),
    _window(
        "window_of_a_split_is_not_moved",
        "attention/key_split.cuh",
        "    sequence.window_offset -= first_key;\n",
        "",
        "a split takes its window from the first key of all",
        kernels=Kernels.SPLIT,
    ),
    _window(
        "window_splits_count_from_the_first_key",
        "attention/key_split.cuh",
        "s.first_block = keys.n_block_min + index * share;",
        "s.first_block = index * share;",
        "splits take blocks before the window, and leave out the last ones",
        kernels=Kernels.SPLIT,
    ),
    _window(
        "window_left_end_is_not_visited",
        "fmha_fwd/mainloop.cuh",
        "      } while (n_block >= n_block_min);",
        "      } while (false);",
        "the loop ends with the blocks that everyone sees",
    ),
    # ---- which scores ----
    _window(
        "window_one_key_short",
        "attention/mask.cuh",
        "col < num_before)",
        "col <= num_before)",
        "the first key of a row's window is hidden",
    ),
    _window(
        "window_left_counts_its_own_key",
        _SEQUENCE,
        "s.within(int64_t{offset} - params.window_left)",
        "s.within(int64_t{offset} - params.window_left - 1)",
        "rows see one key more to the left",
    ),
    _window(
        "window_right_counts_its_own_key",
        _SEQUENCE,
        "s.within(int64_t{offset} + params.window_right)",
        "s.within(int64_t{offset} + params.window_right - 1)",
        "rows see one key less to the right",
    ),
    _window(
        "window_aligned_to_the_tensor",
        "attention/set_params.hpp",
        "params.causal_offset = p.is_causal || p.has_window ? p.causal_offset : 0;",
        "params.causal_offset = p.is_causal ? p.causal_offset : 0;",
        "without a causal mask, a window counts from the first row and key",
    ),
    _window(
        "window_offset_wraps",
        _SEQUENCE,
        "return static_cast<int>(cute::max(int64_t{-seqlen_q}, cute::min(int64_t{seqlen_k}, offset)));",
        "return static_cast<int>(offset);",
        "an offset and a limit that are large together wrap",
        by=Check.IDENTITIES,
    ),
    # ---- sinks ----
    _window(
        "sink_in_log2_units",
        _SINKS,
        "const float sink_log2 = sink * kLog2e;",
        "const float sink_log2 = sink;",
        "a sink is taken in the softmax's own units",
    ),
    _window(
        "sink_leaves_the_sum_alone",
        _SINKS,
        "row_sum = row_sum * scale + 1.f;",
        "row_sum = row_sum + 1.f;",
        "the sum keeps its old reference when a sink is larger",
    ),
    _window(
        "sink_leaves_out_alone",
        _SINKS,
        "    return scale;\n",
        "    return 1.f;\n",
        "O keeps its old reference when a sink is larger",
    ),
    _window(
        "sink_of_rows_beyond_the_sequence",
        _EPILOGUE,
        "if (params.sinks.data != nullptr && row < sequence.seqlen_q) {",
        "if (params.sinks.data != nullptr) {",
        "rows beyond their sequence get the sink as softmax_lse",
        by=Check.LSE,
    ),
    _window(
        "sink_of_the_first_head_of_a_tile",
        _EPILOGUE,
        "        if constexpr (Traits::kIsSplit) bidh += params.heads_per_kv.rem(row);\n",
        "",
        "all heads of a tile have the first one's sink",
        kernels=Kernels.SPLIT,
    ),
    _window(
        "sink_of_rows_without_keys_is_forgotten",
        _EPILOGUE,
        "        with_sink(params, tile, sequence, out_row, row_max, row_sum);\n",
        "",
        "a tile without keys stores -inf as softmax_lse",
        by=Check.LSE,
    ),
    _window(
        "sink_of_every_split",
        "fmha_fwd/split.cuh",
        "make_float2(merged.row_max[i], merged.row_sum[i]));",
        "make_float2(merged.row_max[i], merged.row_sum[i] + (params.sinks.data != nullptr ? 1.f : 0.f)));",
        "each split adds to the denominator for the sink",
        kernels=Kernels.SPLIT,
    ),
)
