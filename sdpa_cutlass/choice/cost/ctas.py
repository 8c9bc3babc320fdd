"""CTAs of the families for mma.sync: how many share an SM, how many there are, how their KV groups merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..visible_keys import rows_of_tiles
from .corrections import name_of
from .model import SMEM_BYTES_PER_CLOCK, SMEM_PER_CTA, ceil_div

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 256  # of a thread, as they are allotted
# Of kernels that are promised fewer CTAs than fit, in code for sm_89 and for sm_90, where there is no mask.
REGISTERS = {
    "fmha_fwd_sm89_d32_m128n64_s2_w4": 168,
    "fmha_fwd_sm89_d32_m32n128_s1_w4_g2": 168,
    "fmha_fwd_sm89_d32_m32n128_s1_w4_g2_causal": 168,
    "fmha_fwd_sm89_d32_m64n128_s1_w4_general_split": 168,
    "fmha_fwd_sm89_d32_m64n64_s2_w4_general": 128,
    "fmha_fwd_sm89_d32_m64n64_s2_w4_general_dropout": 128,
    "fmha_fwd_sm89_d64_m16n32_s1_w2_g2_general_split": 152,
    "fmha_fwd_sm89_d96_m64n64_s1_w4_causal": 168,
}
_MERGE_CYCLES_PER_WARP = 86.8  # all warps of the CTA wait for each other


def resident_ctas(kernel: KernelInfo, device: DeviceInfo) -> int:
    """CTAs that share an SM: those promised on sm_89, more where the card or the code has room for them."""
    by_smem = device.smem_per_sm // (kernel.smem_bytes + SMEM_PER_CTA)
    registers = REGISTERS.get(name_of(kernel), _MAX_REGISTERS)
    by_registers = _REGISTERS_PER_SM // (registers * kernel.threads)
    return max(kernel.ctas_per_sm, min(by_smem, by_registers))


def grid_of(kernel: KernelInfo, problem: Problem, num_splits: int) -> tuple[int, float]:
    """CTAs, and the share of the scores they compute that some row sees; split kernels pack query heads."""
    heads = problem.num_heads_q // problem.num_heads_kv if kernel.is_split else 1
    m_blocks = ceil_div(problem.seqlen_q * heads, kernel.block_m)
    blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
    limited_rows = rows_of_tiles(problem, kernel.block_m, heads)
    if limited_rows is not None:
        blocks = limited_rows.all_rounds(kernel.block_n) / limited_rows.count
    computed = blocks * m_blocks * kernel.block_m * kernel.block_n / heads
    tiles = m_blocks * problem.batch * problem.num_heads_q // heads
    return tiles * max(num_splits, 1), problem.visible_scores / max(computed, 1)


def merge_cycles(kernel: KernelInfo) -> float:
    """Of a CTA's KV groups: all but the own slice of O, and the statistics, written and read."""
    if kernel.kv_groups == 1:
        return 0.0
    merge_floats = (kernel.kv_groups - 1) * kernel.head_dim + 8 * kernel.kv_groups
    merge_bytes = 8 * kernel.block_m * merge_floats
    return _MERGE_CYCLES_PER_WARP * kernel.warps + merge_bytes / SMEM_BYTES_PER_CLOCK
