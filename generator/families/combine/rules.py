"""What is legal among the kernels that merge: `RULES`, in the order in which a refusal names them.

They restate what templates/include/sdpa/combine/kernel.cuh asserts.
"""

from __future__ import annotations

from generator.core.rules import RESOURCES, Rule
from generator.families.combine.config import VECTOR, Combine

MAX_HEAD_DIM = 256  # of the attention kernels whose results these are
MAX_STAGES = 8

RULES: tuple[Rule[Combine], ...] = (
    Rule(
        "head_dim",
        f"head_dim is a multiple of {VECTOR} up to {MAX_HEAD_DIM}",
        lambda c: (
            (c.head_dim % VECTOR == 0 and c.head_dim <= MAX_HEAD_DIM)
            or f"head_dim {c.head_dim} is not a multiple of {VECTOR} up to {MAX_HEAD_DIM}"
        ),
    ),
    Rule(
        "stages",
        f"1 to {MAX_STAGES} parts are in flight",
        lambda c: c.tile.stages <= MAX_STAGES or f"stages {c.tile.stages} is more than {MAX_STAGES}",
    ),
    Rule(
        "row",
        "a CTA holds a row",
        lambda c: (
            c.head_dim <= (room := VECTOR * c.tile.threads)
            or f"head_dim {c.head_dim} is more than the {room} columns of {c.tile.warps} warps"
        ),
    ),
    *RESOURCES,
)
