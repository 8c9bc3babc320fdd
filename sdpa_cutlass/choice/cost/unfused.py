"""What the baseline costs: two GEMMs and a softmax between them, one launch each.

Most of it is the logits, which cross memory four times in 16 bits: written by the first GEMM, read and
written by the softmax, read by the second GEMM. Their price, the same for every tile, and what a causal mask
does not save were fitted to `piped` in the committed results of an H200 (2026-11-22). The price is 8 bytes a
logit at about 4.4 TB/s, which is near that card's DRAM. docs/predictions.md says how good the fit is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import Problem
from ..visible_keys import CausalRows
from .model import (
    CTA_CYCLES,
    L2_BYTES_PER_CLOCK,
    LAUNCH_CYCLES,
    SMEM_BYTES_PER_CLOCK,
    SMEM_PER_CTA,
    Model,
    ceil_div,
)

_SMEM_PER_SM = 102400  # sm_89
_LOGIT_CLOCKS = 0.42  # of an SM, for a logit
_CAUSAL_REST = 0.4  # of the work at tiles that a causal mask hides


class Unfused(Model):
    """Q·Kᵀ in tiles of the row, a softmax that reads logits and writes P, P·V in tiles as wide as head_dim.

    Rougher than the fused model. Only the GEMMs tell tiles of the same pipeline apart.
    """

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        self._resident = max(_SMEM_PER_SM // (kernel.smem_bytes + SMEM_PER_CTA), 1)

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, device = self.kernel, self.device
        heads = problem.batch * problem.num_heads_q

        def gemm(rows: int, columns: int, depth: int, block_m: int, block_n: int) -> float:
            ctas = ceil_div(rows, block_m) * ceil_div(columns, block_n) * heads
            operand_bytes = 2 * (block_m + block_n) * depth
            mma = 2 * block_m * block_n * depth / device.mma_flops_per_clock
            smem = math.sqrt(kernel.warps) * operand_bytes / SMEM_BYTES_PER_CLOCK
            store = 2 * block_m * block_n / L2_BYTES_PER_CLOCK
            tile = max(mma, smem, operand_bytes / L2_BYTES_PER_CLOCK) + store
            return _spread(ctas, self._resident, device.sms, CTA_CYCLES, tile.__mul__)

        rows, keys = problem.seqlen_q, problem.seqlen_k
        qk_cycles = gemm(rows, keys, problem.head_dim, kernel.block_m, kernel.block_n)
        pv_cycles = gemm(rows, kernel.head_dim, keys, min(kernel.block_m, 128), kernel.head_dim)
        logits = heads * rows * keys
        work = qk_cycles + pv_cycles + _LOGIT_CLOCKS * logits / device.sms
        if problem.is_causal:
            tiles = CausalRows(problem, kernel.block_m, 1)
            seen = tiles.all_rounds(kernel.block_n) / (tiles.count * ceil_div(keys, kernel.block_n))
            work *= _CAUSAL_REST + (1 - _CAUSAL_REST) * seen
        return 3 * LAUNCH_CYCLES + CTA_CYCLES + work, 0

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        kernel, rows, keys = self.kernel, problem.seqlen_q, problem.seqlen_k
        heads = problem.batch * problem.num_heads_q
        ctas = ceil_div(rows, kernel.block_m) * ceil_div(keys, kernel.block_n) * heads
        return ctas, heads * rows * keys / (ctas * kernel.block_m * kernel.block_n)


def _spread(ctas: int, ctas_per_sm: int, sms: int, ends: float, body: Callable[[int], float]) -> float:
    """Cycles until the busiest SM has run its share of the CTAs.

    `body(resident)` is what that many CTAs take together, `ends` a CTA's prologue and epilogue: exposed
    once, and in later waves hidden in part behind the neighbours.
    """
    share = ceil_div(ctas, sms)
    resident = min(ctas_per_sm, share)
    full, rest = divmod(share, resident)
    cycles = ends + full * body(resident) + (full - 1) * ends / resident
    if rest:
        cycles += body(rest) + ends / resident
    return cycles
