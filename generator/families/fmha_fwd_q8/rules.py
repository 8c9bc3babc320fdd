"""What is legal among the quantised kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_fwd_q8/kernel_traits.cuh asserts.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule
from generator.families.fmha_fwd_q8.config import MMA_M, FmhaFwdQ8

BLOCK_N = 64  # keys that share groups of K, the rule for tokens of zeros and rows of packed sequences
K_STEP = 32  # bytes of a k-step of the MMA
MAX_HEAD_DIM = 256  # beyond, the sums of Q Kᵀ leave the integers that a float holds next to 1.5 · 2^23
WARPS = (4, 8)  # the pre-pass has 4, whatever the attention has

RULES: tuple[Rule[FmhaFwdQ8], ...] = (
    Rule(
        "head_dim",
        f"head_dim is a multiple of {K_STEP} up to {MAX_HEAD_DIM}; smaller ones are filled up with zeros",
        lambda c: (
            (c.head_dim % K_STEP == 0 and c.head_dim <= MAX_HEAD_DIM)
            or f"head_dim {c.head_dim} is not a multiple of {K_STEP} up to {MAX_HEAD_DIM}"
        ),
    ),
    Rule(
        "block_n",
        f"block_n is {BLOCK_N}",
        lambda c: c.tile.block_n == BLOCK_N or f"block_n {c.tile.block_n} is not {BLOCK_N}",
    ),
    Rule(
        "warps",
        f"{WARPS[0]} or {WARPS[1]} warps",
        lambda c: c.tile.warps in WARPS or f"{c.tile.warps} warps are neither {WARPS[0]} nor {WARPS[1]}",
    ),
    Rule(
        "kv_groups",
        "split kernels have a KV group for each warp, others one for all",
        lambda c: (
            c.tile.kv_groups == (wanted := c.tile.warps if c.split else 1)
            or f"kv_groups {c.tile.kv_groups} is not {wanted}"
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
        "stages",
        "2 to 4 stages, and 1 with KV groups",
        lambda c: (
            c.tile.stages in (allowed := (1,) if c.split else (2, 3, 4))
            or f"stages {c.tile.stages} is not one of {', '.join(map(str, allowed))}"
        ),
    ),
    *RESOURCES,
)
