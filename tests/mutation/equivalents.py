"""Random mutants that no test can find, each with the reason: they are not drawn again.

A key is (header, line, line as it becomes), without the spaces around the lines.
"""

from __future__ import annotations

_DENSE_MASK = "attention/dense_mask.cuh"
_DROPOUT = "attention/dropout.cuh"
_SET_PARAMS = "attention/set_params.hpp"
_SOFTMAX = "attention/softmax.cuh"

_EITHER_WAY = "at exactly this size the reference may move or stay, sharp or not: both are within the bounds"

EQUIVALENTS: dict[tuple[str, str, str], str] = {
    (
        _DENSE_MASK,
        "for (int w = kWords - 1; w > 0; --w)",
        "for (int w = kWords - 0; w > 0; --w)",
    ): "the word behind a run is one that is fetched later, or behind the thread's last, and nobody reads it",
    (
        _DROPOUT,
        "static constexpr int kColumns = kMmaM == 1 && kBlockN % 64 == 0 ? 64 : 32;"
        "  // keys that are decided together",
        "static constexpr int kColumns = kMmaM != 1 && kBlockN % 64 == 0 ? 64 : 32;"
        "  // keys that are decided together",
    ): "how many keys are decided together changes registers and speed, not which are dropped",
    (
        _SET_PARAMS,
        "params.causal_offset = p.is_causal ? p.causal_offset : 0;",
        "params.causal_offset = p.is_causal ? p.causal_offset : 1;",
    ): "nothing reads the offset unless the kernel, or the problem, is causal",
    (
        _SOFTMAX,
        "is_large |= fabsf(max[i]) > kSharp && max[i] != kNoKey;",
        "is_large |= fabsf(max[i]) >= kSharp && max[i] != kNoKey;",
    ): _EITHER_WAY,
    (
        _SOFTMAX,
        "moves |= block_max[i] * softmax_scale_log2 - row_max[i] > kSlack;",
        "moves |= block_max[i] * softmax_scale_log2 - row_max[i] >= kSlack;",
    ): _EITHER_WAY,
    (
        _SOFTMAX,
        "moves |= fabsf(row_max[i]) > kSharp && (!kHasBias || block_max[i] > -INFINITY);",
        "moves |= fabsf(row_max[i]) >= kSharp && (!kHasBias || block_max[i] > -INFINITY);",
    ): _EITHER_WAY,
}
