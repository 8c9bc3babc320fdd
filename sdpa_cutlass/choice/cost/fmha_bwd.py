"""What a backward kernel costs: tiles of keys and tiles of query rows, which share the SMs of one launch.

A pair of tiles takes four multiplications where keys are owned and three where rows are, at the card's rate
for mma.sync, and exp2 and the arithmetic around it for every score. Rougher than the forward's model and
fitted to nothing: it only has to rank tiles of the same kernel.
"""

from __future__ import annotations

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import Problem
from .model import CTA_CYCLES, LAUNCH_CYCLES, Model, ceil_div

_KEYS_PRODUCTS = 4
_ROWS_PRODUCTS = 3
_SCORE_CYCLES = (
    12 / 128
)  # of one SM, for one score: exp2, a select, four multiplications and additions, two roundings


class FmhaBwd(Model):
    """Both roles of one launch, as if their CTAs were spread evenly."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        product = 2 * kernel.head_dim / device.mma_flops_per_clock
        self._keys = _KEYS_PRODUCTS * product + _SCORE_CYCLES
        self._rows = _ROWS_PRODUCTS * product + _SCORE_CYCLES
        self._dq_block_m = kernel.detail("dq_block_m")
        self._dq_block_n = kernel.detail("dq_block_n")

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, device = self.kernel, self.device
        ctas, computed = self._sides(problem)
        scores = computed[0] * self._keys + computed[1] * self._rows
        waves = max(ctas / (device.sms * max(kernel.ctas_per_sm, 1)), 1)
        busy = max(scores / device.sms, max(scores / ctas, 0))
        return 2 * LAUNCH_CYCLES + waves * CTA_CYCLES + busy, 0

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        ctas, (of_keys, of_rows) = self._sides(problem)
        needed = 2 * problem.batch * problem.num_heads_q * problem.visible_scores
        return ctas, needed / max(of_keys + of_rows, 1)

    def _sides(self, problem: Problem) -> tuple[int, tuple[float, float]]:
        """CTAs, and the scores that those of keys and those of rows compute."""
        kernel = self.kernel
        share = problem.visible_scores / max(problem.seqlen_q * problem.seqlen_k, 1)
        key_tiles = ceil_div(problem.seqlen_k, kernel.block_n)
        row_tiles = ceil_div(problem.seqlen_q, self._dq_block_m)
        rows = ceil_div(problem.seqlen_q, kernel.block_m) * kernel.block_m
        keys = ceil_div(problem.seqlen_k, self._dq_block_n) * self._dq_block_n
        heads = problem.batch * problem.num_heads_q
        ctas = problem.batch * (key_tiles * problem.num_heads_kv + row_tiles * problem.num_heads_q)
        of_keys = heads * key_tiles * kernel.block_n * rows * share
        of_rows = heads * row_tiles * self._dq_block_m * keys * share
        return ctas, (of_keys, of_rows)
