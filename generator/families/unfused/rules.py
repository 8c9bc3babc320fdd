"""What is legal in the baseline: `RULES`, in the order in which a refusal names them."""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule, head_dim_rule
from generator.families.unfused.config import Unfused

MAX_HEAD_DIM = 128  # the widest tile of the second GEMM

RULES: tuple[Rule[Unfused], ...] = (
    head_dim_rule(MAX_HEAD_DIM),
    Rule(
        "stages",
        "3 to 5 stages",
        lambda c: 3 <= c.tile.stages <= 5 or f"stages {c.tile.stages} is not one of 3, 4, 5",
    ),
    Rule(
        "unfused_warps",
        "4 or 8 warps",
        lambda c: c.tile.warps in (4, 8) or f"warps {c.tile.warps} is not one of 4, 8",
    ),
    Rule(
        "unfused_block",
        "tiles come in steps of 64x64",
        lambda c: (
            c.tile.block_m % 64 == c.tile.block_n % 64 == 0
            or f"block {c.tile.block_m}x{c.tile.block_n} is not in steps of 64x64"
        ),
    ),
    Rule(
        "unfused_warp_tile",
        "a warp has at least 32x32 outputs",
        lambda c: (
            (outputs := c.tile.block_m * c.tile.block_n // c.tile.warps) >= 32 * 32
            or f"each of {c.tile.warps} warps has {outputs} outputs, fewer than 32x32"
        ),
    ),
    *RESOURCES,
)
