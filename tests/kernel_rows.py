"""Registry rows that no library has."""

from __future__ import annotations

from typing import Any

from sdpa_cutlass.library.registry import Family, KernelInfo, Takes
from sdpa_cutlass.problem import DType

PLAIN = Takes.FULL | Takes.UNDROPPED
GENERAL = (
    PLAIN | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.SMALLER_HEAD_DIM
    | Takes.BOOL | Takes.BIAS16 | Takes.BIAS32
)  # fmt: skip
UNBIASED = GENERAL & ~(Takes.BIAS16 | Takes.BIAS32)
SPLIT = UNBIASED & ~Takes.BOOL | Takes.SPLITS
DETAILS = {
    "block_m": 64,
    "block_n": 64,
    "stages": 1,
    "warps": 4,
    "kv_groups": 1,
    "q_in_regs": 0,
    "cluster": 1,
}


def kernel_row(name: str, takes: Takes = PLAIN, **given: Any) -> KernelInfo:
    """A fused fp16 kernel of head_dim 64. `given`: other fields and details than these."""
    details = tuple((key, int(given.pop(key, value))) for key, value in DETAILS.items())
    usual = {
        "index": 0, "family": Family.FMHA_FWD, "dtype": DType.F16, "arch": 89, "head_dim": 64,
        "smem_bytes": 24576, "ctas_per_sm": 3,
    }  # fmt: skip
    return KernelInfo(name=name, takes=takes, details=details, **{**usual, **given})


def dropping(takes: Takes) -> Takes:
    """`takes` of the kernel's variant with dropout."""
    return takes & ~Takes.UNDROPPED | Takes.DROPOUT
