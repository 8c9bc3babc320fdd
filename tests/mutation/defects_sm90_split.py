"""Defects of Hopper's split kernels: which keys a CTA has, what it leaves, how parts become one."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_SPLIT = "fmha_fwd_sm90/split.cuh"


def _split(
    name: str, old: str, new: str, defect: str, by: Check = Check.NUMERICS, *, header: str = _SPLIT
) -> Mutant:
    return Mutant(
        name=f"hopper_split_{name}",
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.HOPPER_SPLIT,
        by=by,
    )


HOPPER_SPLITS: tuple[Mutant, ...] = (
    # ---- which keys ----
    _split(
        "masks_as_the_first",
        "const Sequence same_sequence = sequence_of<Traits>(params, tile);",
        "const Sequence same_sequence = Sequence::make(params, tile.bidb);",
        "scores of later splits are masked as if their keys were the first ones",
        header="fmha_fwd_sm90/mainloop.cuh",
    ),
    _split(
        "tiles_without_keys_left_out",
        "if (split.index > 0 && split.index >= split.num_active) return;",
        "if (split.index >= split.num_active) return;",
        "rows without keys are not written",
        Check.OUTSIDE,
        header="fmha_fwd_sm90/kernel.cuh",
    ),
    # ---- what is left for others ----
    _split(
        "rows_of_one_consumer",
        "const int row = consumer * kWarpgroupRows + get<0>(tOcO(i, 0));",
        "const int row = get<0>(tOcO(i, 0));",
        "consumers leave their rows in the same place",
    ),
    _split(
        "sums_of_a_lane",
        "    softmax.finish();\n",
        "",
        "a part's row sums are those of one lane",
    ),
    _split(
        "only_part_left_as_well",
        "tile.m_block).num_active <= 1) return false;",
        "tile.m_block).num_active < 1) return false;",
        "a part that is alone is left in the workspace, where none was asked for",
        Check.GUARD_PAGES,
    ),
    _split(
        "statistics_in_the_parts",
        "num_part_rows<Traits>(p) * Traits::kHeadDim);",
        "num_part_rows<Traits>(p));",
        "statistics lie where parts of O do",
        header="fmha_fwd_sm90/launch.cuh",
    ),
    # ---- the second launch ----
    _split(
        "two_parts_not_merged",
        "if (status.ok() && p.num_splits > 1)",
        "if (status.ok() && p.num_splits > 2)",
        "the parts of two splits are not merged",
        Check.OUTSIDE,
        header="fmha_fwd_sm90/launch.cuh",
    ),
    _split(
        "leaves_before_the_launch_ahead",
        "    Arch::wait_for_launch_ahead();\n    if (row",
        "    if (row",
        "parts are read, and the next launch begins, before all CTAs have left theirs",
        Check.RULES,
    ),
    _split(
        "merges_behind_its_tile",
        "if (row >= Traits::kBlockM || first_row",
        "if (first_row",
        "threads behind a tile merge parts of another split into the next tile's rows",
    ),
    _split(
        "packed_rows_of_the_first",
        "out_row = sequence.first_row_q + first_row + row;",
        "out_row = first_row + row;",
        "packed sequences are stored where the first one is",
        Check.OUTSIDE,
    ),
    _split(
        "no_sinks",
        "} else if (params.sinks.data != nullptr) {",
        "} else if (false) {",
        "merged rows have no sink",
    ),
    _split(
        "rows_beyond_a_length",
        "if (first_row + row >= sequence.seqlen_q) {",
        "if (false) {",
        "rows beyond a sequence's length are not 0 and -inf",
    ),
)
