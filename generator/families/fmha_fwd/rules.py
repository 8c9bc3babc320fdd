"""What is legal among the fused kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_fwd/kernel_traits.cuh asserts. The loads of Q need no rule: what
block_m has to be a multiple of for the MMA covers them.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule, head_dim_rule
from generator.families.fmha_fwd.config import (
    COPY_ELEMENTS,
    GENERAL_BLOCK_N,
    MMA_M,
    MMA_N,
    RING_TILES,
    FmhaFwd,
)

MAX_HEAD_DIM = 256
MAX_WARPS = 16


def smem_cols(head_dim: int) -> int:
    """Columns of the swizzled shared-memory atom: the widest of 64, 32 and 16 that divides head_dim."""
    return next((cols for cols in (64, 32) if head_dim % cols == 0), 16)


def load_rows_per_pass(config: FmhaFwd) -> int:
    """Rows of K or V that one pass of a KV group's 16-byte loads covers."""
    threads_per_row = smem_cols(config.head_dim) // COPY_ELEMENTS
    return 32 * config.tile.warps_m // threads_per_row


RULES: tuple[Rule[FmhaFwd], ...] = (
    Rule(
        "dropout",
        "dropout only in general kernels",
        lambda c: c.general or not c.dropout or "only the general kernels have dropout",
    ),
    Rule(
        "split",
        "split only in general kernels, with no dropout and no _qreg",
        lambda c: (
            not c.split
            or (c.general and not c.dropout and not c.tile.q_in_regs)
            or "a split kernel is general, with no dropout and no Q in registers"
        ),
    ),
    Rule(
        "unbiased",
        "unbiased only in general kernels without dropout or splits",
        lambda c: (
            not c.unbiased
            or (c.general and not c.dropout and not c.split)
            or "an unbiased kernel is general, without dropout and not split"
        ),
    ),
    Rule(
        "general_causal",
        "general and causal exclude each other",
        lambda c: not (c.general and c.causal) or "a general kernel takes causal at run time",
    ),
    head_dim_rule(MAX_HEAD_DIM),
    Rule(
        "warps",
        f"1 to {MAX_WARPS} warps",
        lambda c: c.tile.warps <= MAX_WARPS or f"{c.tile.warps} warps are more than {MAX_WARPS}",
    ),
    Rule(
        "kv_groups",
        "1, 2, 4 or 8 KV groups",
        lambda c: (
            c.tile.kv_groups in (1, 2, 4, 8) or f"kv_groups {c.tile.kv_groups} is not one of 1, 2, 4, 8"
        ),
    ),
    Rule(
        "kv_groups_divide_warps",
        "KV groups have equally many warps",
        lambda c: (
            c.tile.warps % c.tile.kv_groups == 0
            or f"{c.tile.warps} warps cannot be shared out to {c.tile.kv_groups} KV groups"
        ),
    ),
    Rule(
        "kv_groups_divide_head_dim",
        "head_dim is a multiple of 8 columns for each KV group",
        lambda c: (
            c.tile.kv_groups == 1
            or c.head_dim % (columns := MMA_N * c.tile.kv_groups) == 0
            or f"{c.tile.kv_groups} KV groups complete {MMA_N} columns at a time, "
            f"and {columns} do not divide head_dim {c.head_dim}"
        ),
    ),
    Rule(
        "block_m",
        "block_m is a multiple of 16 rows for each warp of a KV group",
        lambda c: (
            c.tile.block_m % (rows := MMA_M * c.tile.warps_m) == 0
            or f"block_m {c.tile.block_m} is not a multiple of {rows} "
            f"({MMA_M} for each of {c.tile.warps_m} warps)"
        ),
    ),
    Rule(
        "block_n",
        "block_n is a multiple of 16",
        lambda c: c.tile.block_n % 16 == 0 or f"block_n {c.tile.block_n} is not a multiple of 16",
    ),
    Rule(
        "general_block_n",
        "block_n of a general kernel is a multiple of 32, of a split one of 16",
        lambda c: (
            not c.general
            or c.split  # has neither masks nor dropout
            or c.tile.block_n % GENERAL_BLOCK_N == 0
            or f"masks and dropout go by {GENERAL_BLOCK_N} keys, which do not divide block_n {c.tile.block_n}"
        ),
    ),
    Rule(
        "stages",
        "1 to 4 stages",
        lambda c: c.tile.stages <= 4 or f"stages {c.tile.stages} is not one of 1, 2, 3, 4",
    ),
    Rule(
        "kv_groups_stages",
        "one stage with KV groups",
        lambda c: (
            c.tile.kv_groups == 1
            or c.tile.stages == 1
            or f"KV groups work on rings of {RING_TILES} tiles, so stages is 1, not {c.tile.stages}"
        ),
    ),
    Rule(
        "q_in_regs",
        "Q in registers only without KV groups",
        lambda c: (
            not c.tile.q_in_regs
            or c.tile.kv_groups == 1
            or f"with {c.tile.kv_groups} KV groups, Q is in registers anyway and never in shared memory"
        ),
    ),
    Rule(
        "load",
        "the K and V loads of a KV group cover whole tiles",
        lambda c: (
            c.tile.block_n % (rows := load_rows_per_pass(c)) == 0
            or f"one pass of the K and V loads covers {rows} rows, "
            f"which do not divide block_n {c.tile.block_n}"
        ),
    ),
    *RESOURCES,
)
