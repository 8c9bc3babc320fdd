"""What is legal among Hopper's quantised kernels: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/fmha_fwd_q8_sm90/kernel_traits.cuh asserts.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule
from generator.families.fmha_fwd_q8.config import Math
from generator.families.fmha_fwd_q8.rules import BLOCK_N
from generator.families.fmha_fwd_q8_sm90.config import OTHER_REGISTERS, FmhaFwdQ8Sm90
from generator.families.fmha_fwd_sm90.rules import CONSUMER_REGISTERS, CONSUMER_TILES

HEAD_DIMS = (64, 128)  # bytes of a row of K: as many as a swizzle has
MIN_STAGES, MAX_STAGES = 2, 8  # a block's P V goes on while the next block's Q Kᵀ reads another stage

RULES: tuple[Rule[FmhaFwdQ8Sm90], ...] = (
    Rule(
        "head_dim",
        f"head_dim is {HEAD_DIMS[0]} or {HEAD_DIMS[1]}; smaller ones are filled up with zeros",
        lambda c: (
            c.head_dim in HEAD_DIMS or f"head_dim {c.head_dim} is neither {HEAD_DIMS[0]} nor {HEAD_DIMS[1]}"
        ),
    ),
    Rule(
        "math",
        "both products are of bytes",
        lambda c: c.math is Math.INT8 or f"math {c.math.value} is not {Math.INT8.value}",
    ),
    Rule(
        "block_n",
        f"block_n is {BLOCK_N}",
        lambda c: c.tile.block_n == BLOCK_N or f"block_n {c.tile.block_n} is not {BLOCK_N}",
    ),
    *CONSUMER_TILES,
    Rule(
        "stages",
        f"{MIN_STAGES} to {MAX_STAGES} stages",
        lambda c: (
            MIN_STAGES <= c.tile.stages <= MAX_STAGES
            or f"stages {c.tile.stages} is not one of {MIN_STAGES} to {MAX_STAGES}"
        ),
    ),
    Rule(
        "consumer_registers",
        "Q, S, P, the sums of P V and O leave a consumer's thread enough registers",
        lambda c: (
            (limit := CONSUMER_REGISTERS.get(c.consumers)) is None  # as block_m says
            or (least := c.accumulator_registers + OTHER_REGISTERS) <= limit
            or f"at least {least} registers a thread ({c.accumulator_registers} for operands and sums), "
            f"the limit of {c.consumers} consumers is {limit}"
        ),
    ),
    *(rule for rule in RESOURCES if rule.name == "smem"),
)
