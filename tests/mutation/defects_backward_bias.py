"""Defects of the gradient of a bias: the batches that share it, its parts and their sum, pairs, stores."""

from __future__ import annotations

from tests.mutation.defects_backward import backward
from tests.mutation.model import Check, Kernels, Mutant

_LAUNCH = "fmha_bwd/launch.cuh"
_BIAS = "fmha_bwd/bias_gradient.cuh"
_VISITS = "fmha_bwd/bias_visits.cuh"
_PARTS = "fmha_bwd/bias_parts.cuh"

BIAS_GRADIENTS: tuple[Mutant, ...] = (
    backward(
        "pairs_of_a_gradient_in_odd_rows",
        _LAUNCH,
        "given.dbias_stride[3] == 1 && strides % 2 == 0",
        "given.dbias_stride[3] == 1",
        "vectors of a bias's gradient start where its rows do, aligned or not",
        Check.RULES,
    ),
    backward(
        "pairs_of_a_gradient_beyond_keys",
        _BIAS,
        "(owned.n_block + 1) * kBlockN <= params.seqlen_k",
        "owned.n_block * kBlockN <= params.seqlen_k",
        "the last block of a bias's gradient is stored whole",
        Check.OUTSIDE,
    ),
    backward(
        "bias_of_one_batch",
        _VISITS,
        "end.bidb = cute::min(first.bidb + params.batches, params.batch);",
        "end.bidb = first.bidb + 1;",
        "a part of the gradient of a bias that batches share has that of its first batch",
    ),
    backward(
        "bias_parts_begin_at_their_number",
        _VISITS,
        "first.bidb = owned.bidb * params.batches;",
        "first.bidb = owned.bidb;",
        "parts of several batches overlap, and the last batches are left out",
    ),
    backward(
        "bias_without_the_last_part",
        _PARTS,
        "first + i < params.num_parts ?",
        "first + i < params.num_parts - 1 ?",
        "the last batches are left out of the gradient of a bias",
    ),
    backward(
        "bias_parts_in_one_place",
        _LAUNCH,
        "params.dbias_stride[0] = stride;",
        "params.dbias_stride[0] = 0;",
        "all parts of the gradient of a bias are stored where the first one is",
    ),
    backward(
        "bias_sums_beyond_the_last_element",
        _PARTS,
        "if (element >= params.num_elements) return;",
        "if (element > params.num_elements) return;",
        "CTAs that add up parts store one element behind the gradient of a bias",
        Check.OUTSIDE,
    ),
    backward(
        "bias_parts_backwards",
        _PARTS,
        "total += loaded[i];",
        "total += loaded[kLoads - 1 - i];",
        "parts of the gradient of a bias are added up in another order",
        Check.IDENTITIES,
    ),
    backward(
        "bias_without_dropout",
        _BIAS,
        "tSrD(i) = keep(i) ? tSrD(i) : 0.f;",
        "tSrD(i) = tSrD(i);",
        "dropped elements have a dP",
        kernels=Kernels.BACKWARD_DROPOUT,
    ),
    backward(
        "bias_of_rows_beyond_a_length",
        _BIAS,
        "        hide_rows(scores, tScS, sequence.seqlen_q - first_row);\n",
        "",
        "a NaN that the bias has beyond a length is its gradient",
    ),
    backward(
        "bias_without_the_last_warp",
        _BIAS,
        "for (int w = 0; w < kNWarps; ++w) total",
        "for (int w = 0; w < kNWarps - 1; ++w) total",
        "a bias that rows share lacks the rows of the last warp",
    ),
    backward(
        "bias_no_barrier",
        _BIAS,
        "      Arch::syncthreads();  // dO and V are visible;",
        "      // dO and V are visible;",
        "dO and V are read before other threads' copies have landed",
        Check.RACES,
    ),
    backward(
        "bias_beyond_its_rows",
        _BIAS,
        "if (row >= params.seqlen_q || key >= params.seqlen_k) return;",
        "if (key >= params.seqlen_k) return;",
        "rows behind the gradient of a bias are written",
        Check.OUTSIDE,
    ),
)
