"""Defects of the kernels that merge partial results: maximum, weights, sinks, order, rows and strides."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_KERNEL = "combine/kernel.cuh"
_LAUNCH = "combine/launch.cuh"


def _combine(name: str, old: str, new: str, defect: str, by: Check, *, header: str = _KERNEL) -> Mutant:
    return Mutant(
        name=f"combine_{name}", header=header, old=old, new=new, defect=defect, kernels=Kernels.COMBINE, by=by
    )


COMBINES: tuple[Mutant, ...] = (
    # ---- maximum and weights ----
    _combine(
        "maximum_of_the_first_part",
        "for (int i = 0; i < params.num_parts; ++i) max = larger(max, lse_of(i));",
        "max = larger(max, lse_of(0));",
        "later parts do not enter the maximum: large weights overflow",
        Check.NUMERICS,
    ),
    _combine(
        "maximum_without_the_sink",
        "    float max = sink;\n",
        "    float max = kNoKey;\n",
        "the weight of a large sink overflows: out is 0 as it should be, and lse infinite",
        Check.LSE,
    ),
    _combine(
        "maximum_ignores_nan",
        "return b > a || b != b ? b : a;",
        "return b > a ? b : a;",
        "a part whose lse is NaN is not seen behind another one of +inf",
        Check.LSE,
    ),
    _combine(
        "weights_are_not_rescaled",
        "Arch::exp2((lse - max) * kLog2e);",
        "Arch::exp2(lse * kLog2e);",
        "weights are not relative to the maximum",
        Check.NUMERICS,
    ),
    _combine(
        "weights_to_base_two",
        "Arch::exp2((lse - max) * kLog2e);",
        "Arch::exp2(lse - max);",
        "lse is taken for a logarithm to base 2",
        Check.NUMERICS,
    ),
    _combine(
        "no_key_has_a_weight",
        "return lse == kNoKey ? 0.f : Arch::exp2",
        "return Arch::exp2",
        "-inf less -inf is NaN",
        Check.NUMERICS,
    ),
    _combine(
        "parts_weigh_alike",
        "add(out, part_weight, part[i]);",
        "add(out, 1.f, part[i]);",
        "outs are added without their weights",
        Check.NUMERICS,
    ),
    _combine(
        "sum_is_the_last_batchs",
        "    for (int first = 0; first < params.num_parts; first += kStages) {\n",
        "    for (int first = 0; first < params.num_parts; first += kStages) {\n"
        "      if (first > 0) sum = 0.f;\n",
        "the sum of weights starts again with each batch of parts",
        Check.NUMERICS,
    ),
    _combine(
        "not_normalised",
        "out[i] *= scale;",
        "out[i] *= sum == 0.f ? 0.f : 1.f;",
        "out is not divided by the sum of weights",
        Check.NUMERICS,
    ),
    _combine(
        "infinity_is_normalised",
        "const float scale = max == INFINITY ? 1.f : sum == 0.f",
        "const float scale = sum == 0.f",
        "a sink of +inf gives NaN for 0",
        Check.NUMERICS,
    ),
    # ---- sinks ----
    _combine(
        "sink_for_each_batch_of_parts",
        "      Vector part[kStages];\n",
        "      if (first > 0) sum += weight(sink, max);\n      Vector part[kStages];\n",
        "the sink joins the sum once for every batch of parts",
        Check.NUMERICS,
    ),
    _combine(
        "sink_for_each_part",
        "sum += part_weight;",
        "sum += part_weight + (i > 0 ? weight(sink, max) : 0.f);",
        "the sink joins the sum with every part",
        Check.NUMERICS,
    ),
    _combine(
        "sink_of_another_head",
        "params.sinks[bidh * params.sink_stride]",
        "params.sinks[bidh * params.sink_stride * 0]",
        "every head has the sink of the first",
        Check.NUMERICS,
    ),
    _combine(
        "sink_stays_outside_the_sum",
        "float sum = weight(sink, max);",
        "float sum = 0.f;",
        "the sink enters the maximum alone",
        Check.NUMERICS,
    ),
    # ---- lse ----
    _combine(
        "lse_without_the_maximum",
        "max + kLn2 * Arch::log2(sum);",
        "kLn2 * Arch::log2(sum);",
        "lse is that of the relative weights",
        Check.LSE,
    ),
    _combine(
        "lse_to_base_two",
        "max + kLn2 * Arch::log2(sum);",
        "max + Arch::log2(sum);",
        "the logarithm of the sum is to base 2",
        Check.LSE,
    ),
    _combine(
        "lse_of_infinity",
        "params.lse[index] = max == INFINITY || sum == 0.f",
        "params.lse[index] = sum == 0.f",
        "an lse of +inf becomes NaN",
        Check.LSE,
    ),
    # ---- parts, rows, strides ----
    _combine(
        "last_part_is_left_out",
        "lse[i] = first + i < params.num_parts ?",
        "lse[i] = first + i < params.num_parts - (params.num_parts > 4 ? 1 : 0) ?",
        "of more than four parts the last is missing",
        Check.NUMERICS,
    ),
    _combine(
        "parts_go_backwards",
        "if (lse[i] != kNoKey) part[i] = load(first + i);",
        "if (lse[i] != kNoKey) part[i] = load(first + i);\n"
        "        if (i == kStages - 1) {\n"
        "          const float swapped = lse[1];\n"
        "          lse[1] = lse[2], lse[2] = swapped;\n"
        "          const Vector moved = part[1];\n"
        "          part[1] = part[2], part[2] = moved;\n"
        "        }",
        "the second and third part of a batch change places in the sum",
        Check.IDENTITIES,
    ),
    _combine(
        "hidden_parts_are_read",
        "if (lse[i] != kNoKey) part[i] = load(first + i);",
        "if (first + i < params.num_parts) part[i] = load(first + i);",
        "what a part without keys holds counts, with the weight 0",
        Check.NUMERICS,
    ),
    _combine(
        "row_is_its_neighbours",
        "bidb * stride[0] + bidh * stride[1] + row * stride[2];",
        "bidb * stride[0] + bidh * stride[1] + (row ^ 1) * stride[2];",
        "rows change places in lse and out alike, and lse is stored where it belongs",
        Check.LSE,
    ),
    _combine(
        "batch_and_head_change_places",
        "bidb * stride[0] + bidh * stride[1] + row * stride[2];",
        "bidh * stride[0] + bidb * stride[1] + row * stride[2];",
        "the strides of batch and head are taken for each other",
        Check.NUMERICS,
    ),
    _combine(
        "rows_beyond_the_end",
        "row_of_cta >= params.rows_per_cta || index >= params.num_rows",
        "row_of_cta >= params.rows_per_cta",
        "the last CTA reads and writes rows that there are not",
        Check.GUARD_PAGES,
    ),
    _combine(
        "half_a_row_in_float32",
        "to[1] = make_float4(out[4], out[5], out[6], out[7]);",
        "to[1] = make_float4(out[0], out[1], out[2], out[3]);",
        "the second half of a float32 vector is the first",
        Check.NUMERICS,
    ),
    _combine(
        "out_in_another_type",
        "out_dtype == SDPA_DTYPE_F16 ? packed",
        "out_dtype != SDPA_DTYPE_F16 ? packed",
        "fp16 and bf16 results are taken for each other",
        Check.NUMERICS,
    ),
    _combine(
        "stride_of_lse_in_elements",
        "part.lse_stride[axis] = from.lse_stride[axis] * int64_t{sizeof(float)};",
        "part.lse_stride[axis] = from.lse_stride[axis] * int64_t{2};",
        "rows of lse are half as far apart",
        Check.NUMERICS,
        header=_LAUNCH,
    ),
    _combine(
        "a_list_is_one_part",
        "params.step = is_list ? 1 : 0;",
        "params.step = 0;",
        "every part of a list is the first",
        Check.NUMERICS,
        header=_LAUNCH,
    ),
    _combine(
        "parts_of_a_stack_are_the_first",
        "params.lse_part_stride = is_list ? 0 : p.lse_part_stride * int64_t{sizeof(float)};",
        "params.lse_part_stride = 0;",
        "every part along a leading dimension has the lse of the first",
        Check.IDENTITIES,
        header=_LAUNCH,
    ),
)
