"""What a backward kernel costs: tiles of keys and tiles of query rows, which share the SMs of one launch.

A pair of tiles takes four multiplications where keys are owned and three where rows are, at half of the
card's rate for mma.sync: they wait for shared memory, and softmax is hidden behind them. With one stage dK
and dV have CTAs of their own, and S is computed in both: five multiplications, which wait for the operands
that load in turns. Fitted to the backward of FlashAttention's shapes at head_dim 64 and 128 (H200,
2026-11-25: twelve within 9 %, the median 3 %), 192 and 256 (H100, 2026-11-26: twelve within 13 %, the median
2 %).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..visible_keys import rows_of_tiles
from .model import LAUNCH_CYCLES, Model, ceil_div

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem


_KEYS_PRODUCTS = 4
_SPLIT_KEYS_PRODUCTS = 5
_ROWS_PRODUCTS = 3
PRODUCTS_SLOWDOWN = 1.95  # of mma.sync alone
_TURNS_SLOWDOWN = 1.11  # of those with one stage
ENDS_CYCLES = 2800  # of a CTA: first loads, last stores


class FmhaBwd(Model):
    """All roles of one launch, as if their CTAs were spread evenly."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        product = PRODUCTS_SLOWDOWN * 2 * kernel.head_dim / device.mma_flops_per_clock
        self._key_roles = 1
        if kernel.stages == 1:
            self._key_roles = 2
            product *= _TURNS_SLOWDOWN
        keys_products = _KEYS_PRODUCTS if self._key_roles == 1 else _SPLIT_KEYS_PRODUCTS
        self._keys = keys_products * product  # cycles of an SM for a score
        self._rows = _ROWS_PRODUCTS * product
        self._dq_block_m = kernel.detail("dq_block_m")
        self._dq_block_n = kernel.detail("dq_block_n")

    def cost(self, problem: Problem) -> tuple[float, int]:
        sms = self.device.sms
        ctas, computed = self._sides(problem)
        scores = computed[0] * self._keys + computed[1] * self._rows
        # The CTAs of an SM share its rate; fewer CTAs than SMs leave some idle.
        return 2 * LAUNCH_CYCLES + (scores + ctas * ENDS_CYCLES) / min(max(ctas, 1), sms), 0

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        ctas, (of_keys, of_rows) = self._sides(problem)
        needed = 2 * problem.batch * problem.num_heads_q * problem.visible_scores
        return ctas, needed / max(of_keys + of_rows, 1)

    def _sides(self, problem: Problem) -> tuple[int, tuple[float, float]]:
        """CTAs, and the scores that those of keys and those of rows compute."""
        kernel = self.kernel
        key_tiles = self._key_roles * ceil_div(problem.seqlen_k, kernel.block_n)
        row_tiles = ceil_div(problem.seqlen_q, self._dq_block_m)
        heads = problem.batch * problem.num_heads_q
        ctas = problem.batch * (key_tiles * problem.num_heads_kv + row_tiles * problem.num_heads_q)
        of_keys = heads * computed_scores(problem, kernel.block_m, kernel.block_n)
        of_rows = heads * computed_scores(problem, self._dq_block_m, self._dq_block_n)
        return ctas, (of_keys, of_rows)


def computed_scores(problem: Problem, block_m: int, block_n: int) -> float:
    """Scores of one head in the blocks that are not skipped."""
    m_blocks = ceil_div(problem.seqlen_q, block_m)
    rows = rows_of_tiles(problem, block_m, 1)
    n_blocks = ceil_div(problem.seqlen_k, block_n) if rows is None else rows.all_rounds(block_n) / rows.count
    return m_blocks * block_m * n_blocks * block_n
