"""What is legal among Hopper's fused kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_fwd_sm90/kernel_traits.cuh asserts.
"""

from __future__ import annotations

from typing import Any

from generator.core.rules import RESOURCES, Rule, head_dim_rule
from generator.families.fmha_fwd_sm90.config import (
    MASKED_CONSUMERS,
    OTHER_REGISTERS,
    WARPGROUP_ROWS,
    WARPGROUP_WARPS,
    FmhaFwdSm90,
)

MAX_HEAD_DIM = 256
DROPOUT_BLOCK_N = 32
MAX_BLOCK_N = 256  # of a wgmma, and of a TMA box

# Registers of a consumer's thread after setmaxnreg, by the number of consumers.
CONSUMER_REGISTERS = {2: 240, 3: 160}

# Of every family whose warpgroups load and compute apart.
CONSUMER_TILES: tuple[Rule[Any], ...] = (
    Rule(
        "block_m",
        "block_m is 128 or 192: 64 rows for each of 2 or 3 consumers",
        lambda c: (
            c.tile.block_m in (2 * WARPGROUP_ROWS, 3 * WARPGROUP_ROWS)
            or f"block_m {c.tile.block_m} is not one of 128, 192"
        ),
    ),
    Rule(
        "warps",
        "a warpgroup loads, and every 64 rows have one",
        lambda c: (
            c.tile.warps == (warps := WARPGROUP_WARPS * (c.consumers + 1))
            or f"block_m {c.tile.block_m} needs {warps} warps, not {c.tile.warps}"
        ),
    ),
)

RULES: tuple[Rule[FmhaFwdSm90], ...] = (
    head_dim_rule(MAX_HEAD_DIM),
    Rule(
        "general_causal",
        "general and causal exclude each other",
        lambda c: not (c.general and c.causal) or "a general kernel takes causal at run time",
    ),
    Rule(
        "dropout",
        "dropout only in general kernels, with two consumers",
        lambda c: (
            not c.dropout
            or (c.general and c.consumers == MASKED_CONSUMERS)
            or "a kernel with dropout is general and has two consumers; three leave no registers for it"
        ),
    ),
    Rule(
        "split",
        "split only in general kernels, without dropout",
        lambda c: (
            not c.split
            or (c.general and not c.dropout)
            or "a kernel whose CTAs share keys is general, and has no dropout"
        ),
    ),
    Rule(
        "dropout_block_n",
        f"block_n with dropout is a multiple of {DROPOUT_BLOCK_N}",
        lambda c: (
            not c.dropout
            or c.tile.block_n % DROPOUT_BLOCK_N == 0
            or f"dropout goes by {DROPOUT_BLOCK_N} keys, which do not divide block_n {c.tile.block_n}"
        ),
    ),
    *CONSUMER_TILES,
    Rule(
        "block_n",
        f"block_n is a multiple of 16 up to {MAX_BLOCK_N}",
        lambda c: (
            (c.tile.block_n % 16 == 0 and c.tile.block_n <= MAX_BLOCK_N)
            or f"block_n {c.tile.block_n} is not a multiple of 16 up to {MAX_BLOCK_N}"
        ),
    ),
    Rule(
        "stages",
        "2 to 4 stages",
        lambda c: 2 <= c.tile.stages <= 4 or f"stages {c.tile.stages} is not one of 2, 3, 4",
    ),
    Rule(
        "cluster",
        "one CTA, or two of a plain kernel with two consumers and an SM for each CTA",
        lambda c: (
            c.tile.cluster == 1
            or (c.tile.cluster == 2 and not c.general and c.consumers == 2 and not c.shares_its_sm)
            or f"a cluster of {c.tile.cluster}; plain kernels of 128 rows with an SM for each CTA may have 2"
        ),
    ),
    Rule(
        "consumer_registers",
        "S, P and O leave a consumer's thread enough registers",
        lambda c: (
            (limit := CONSUMER_REGISTERS.get(c.consumers)) is None  # as block_m says
            or (least := c.accumulator_registers + OTHER_REGISTERS) <= limit
            or f"at least {least} registers a thread ({c.accumulator_registers} for S, P and O), "
            f"the limit of {c.consumers} consumers is {limit}"
        ),
    ),
    *(rule for rule in RESOURCES if rule.name == "smem"),
)
