"""What is legal among the backward kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_bwd/kernel_traits.cuh asserts.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule, head_dim_rule
from generator.families.fmha_bwd.config import FmhaBwd
from generator.families.fmha_fwd.config import COPY_ELEMENTS, GENERAL_BLOCK_N, MMA_M
from generator.families.fmha_fwd.rules import smem_cols

MAX_HEAD_DIM = 256
MAX_WARPS = 16
PADDED_ROWS = 128  # row statistics come in multiples of this


def load_rows_per_pass(config: FmhaBwd) -> int:
    """Rows that one pass of the CTA's 16-byte loads covers."""
    return config.tile.threads // (smem_cols(config.head_dim) // COPY_ELEMENTS)


RULES: tuple[Rule[FmhaBwd], ...] = (
    head_dim_rule(MAX_HEAD_DIM),
    Rule(
        "warps",
        f"1 to {MAX_WARPS} warps",
        lambda c: c.tile.warps <= MAX_WARPS or f"{c.tile.warps} warps are more than {MAX_WARPS}",
    ),
    Rule(
        "owned",
        "what a CTA owns is a multiple of 16 rows for each warp",
        lambda c: (
            all(owned % (rows := MMA_M * c.tile.warps) == 0 for owned, _ in c.tile.sides())
            or f"block_n {c.tile.block_n} or dq_block_m {c.tile.dq_block_m} is not a multiple of {rows} "
            f"({MMA_M} for each of {c.tile.warps} warps)"
        ),
    ),
    Rule(
        "rows",
        f"tiles of query rows divide {PADDED_ROWS}, and have 16 at least",
        lambda c: (
            all(rows >= MMA_M and PADDED_ROWS % rows == 0 for rows in (c.tile.block_m, c.tile.dq_block_m))
            or f"block_m {c.tile.block_m} or dq_block_m {c.tile.dq_block_m} does not divide {PADDED_ROWS}"
        ),
    ),
    Rule(
        "keys",
        f"tiles of keys are multiples of {GENERAL_BLOCK_N}",
        lambda c: (
            all(keys % GENERAL_BLOCK_N == 0 for keys in (c.tile.block_n, c.tile.dq_block_n))
            or f"block_n {c.tile.block_n} or dq_block_n {c.tile.dq_block_n} is not a multiple of "
            f"{GENERAL_BLOCK_N}"
        ),
    ),
    Rule(
        "loads",
        "a pass of the loads covers whole tiles",
        lambda c: (
            all(rows % (covered := load_rows_per_pass(c)) == 0 for side in c.tile.sides() for rows in side)
            or f"{c.tile.threads} threads load {covered} rows at once, which do not divide every tile"
        ),
    ),
    *RESOURCES,
)
