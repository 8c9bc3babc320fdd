"""CTAs of the families for mma.sync: how many share an SM, how many there are, how their KV groups merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..visible_keys import rows_of_tiles
from .model import SMEM_BYTES_PER_CLOCK, SMEM_PER_CTA, ceil_div

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 256  # of a thread, as they are allotted
_MERGE_CYCLES_PER_WARP = 86.8  # all warps of the CTA wait for each other


def resident_ctas(kernel: KernelInfo, device: DeviceInfo) -> int:
    """CTAs that share an SM: those promised on sm_89, more where the card has room for them."""
    by_smem = device.smem_per_sm // (kernel.smem_bytes + SMEM_PER_CTA)
    by_registers = _REGISTERS_PER_SM // (_MAX_REGISTERS * kernel.threads)
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
