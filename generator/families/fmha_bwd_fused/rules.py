"""What is legal among the fused backward kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_bwd_fused/kernel_traits.cuh asserts, and the keys role of
fmha_bwd/kernel_traits.cuh.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule, head_dim_rule
from generator.families.fmha_bwd.rules import MAX_WARPS, PADDED_ROWS
from generator.families.fmha_bwd_fused.config import FmhaBwdFused
from generator.families.fmha_fwd.config import COPY_ELEMENTS, GENERAL_BLOCK_N, MMA_M
from generator.families.fmha_fwd.rules import smem_cols

MAX_HEAD_DIM = 128
MIN_BLOCK_M = 32  # rows of dS are whole chunks of shared memory


def dq_warps(config: FmhaBwdFused) -> tuple[int, int]:
    """Warps along rows and along columns of a tile of dQ."""
    along_rows = max(min(config.tile.block_m // MMA_M, config.tile.warps // 2), 1)
    return along_rows, config.tile.warps // along_rows


def load_rows_per_pass(config: FmhaBwdFused) -> int:
    """Rows that one pass of the CTA's 16-byte loads covers."""
    return config.tile.threads // (smem_cols(config.head_dim) // COPY_ELEMENTS)


def _divides_dq(config: FmhaBwdFused) -> bool:
    rows, columns = dq_warps(config)
    return (
        rows * columns == config.tile.warps
        and config.tile.block_m % (MMA_M * rows) == 0
        and config.head_dim % (MMA_M * columns) == 0
    )


RULES: tuple[Rule[FmhaBwdFused], ...] = (
    head_dim_rule(MAX_HEAD_DIM),
    Rule(
        "stages",
        "tiles are loaded ahead: 2 stages or more",
        lambda c: c.tile.stages >= 2 or f"{c.tile.stages} stage is less than 2",
    ),
    Rule(
        "warps",
        f"2 to {MAX_WARPS} warps",
        lambda c: 2 <= c.tile.warps <= MAX_WARPS or f"{c.tile.warps} warps are not 2 to {MAX_WARPS}",
    ),
    Rule(
        "owned",
        "block_n is a multiple of 16 keys for each warp",
        lambda c: (
            c.tile.block_n % (keys := MMA_M * c.tile.warps) == 0
            or f"block_n {c.tile.block_n} is not a multiple of {keys}: {MMA_M} for each warp"
        ),
    ),
    Rule(
        "rows",
        f"block_m divides {PADDED_ROWS}, and is a multiple of {MIN_BLOCK_M}",
        lambda c: (
            (c.tile.block_m % MIN_BLOCK_M == 0 and PADDED_ROWS % c.tile.block_m == 0)
            or f"block_m {c.tile.block_m} does not divide {PADDED_ROWS}, or is no multiple of {MIN_BLOCK_M}"
        ),
    ),
    Rule(
        "keys",
        f"block_n is a multiple of {GENERAL_BLOCK_N}",
        lambda c: (
            c.tile.block_n % GENERAL_BLOCK_N == 0
            or f"block_n {c.tile.block_n} is not a multiple of {GENERAL_BLOCK_N}"
        ),
    ),
    Rule(
        "loads",
        "a pass of the loads covers whole tiles",
        lambda c: (
            all(n % (covered := load_rows_per_pass(c)) == 0 for n in (c.tile.block_m, c.tile.block_n))
            or f"{c.tile.threads} threads load {covered} rows at once, which do not divide every tile"
        ),
    ),
    Rule(
        "dq",
        "warps divide a tile of dQ into 16 rows and 16 columns or multiples of these",
        lambda c: (
            _divides_dq(c)
            or f"{c.tile.warps} warps do not divide {c.tile.block_m} rows and {c.head_dim} columns of dQ"
        ),
    ),
    *RESOURCES,
)
