"""What a fused backward kernel costs: tiles of keys, each of which follows the one before through dQ.

Times of an H200 (2026-11-26) are not fitted yet. A pair of tiles takes five multiplications, at the rate that
those of `fmha_bwd` were measured to have. A CTA starts FOLLOWS of a step behind the one whose sums of dQ it
adds to, so the last one of a head starts late: that is what few heads pay.
"""

from __future__ import annotations

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import Problem
from .fmha_bwd import ENDS_CYCLES, PRODUCTS_SLOWDOWN, computed_scores
from .model import LAUNCH_CYCLES, Model, ceil_div

IS_CHOSEN = False
"""Whether fused kernels compete with those of `fmha_bwd` at their price. Without it they come last, and run
when they are named or forced: they are 4 % faster at best, at head_dim 64, and slower at 128."""

_LAUNCHES = 3
_PRODUCTS = 5
_FOLLOWS = 0.6


class FmhaBwdFused(Model):
    """The one role, as if its CTAs were spread evenly."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        product = PRODUCTS_SLOWDOWN * 2 * kernel.head_dim / device.mma_flops_per_clock
        self._score = _PRODUCTS * product  # cycles of an SM for one

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel = self.kernel
        ctas, scores = self._work(problem)
        start = (ceil_div(problem.seqlen_k, kernel.block_n) - 1) * _FOLLOWS * kernel.block_m * kernel.block_n
        busy = (scores * self._score + ctas * ENDS_CYCLES) / min(max(ctas, 1), self.device.sms)
        return _LAUNCHES * LAUNCH_CYCLES + busy + start * self._score, 0

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        ctas, scores = self._work(problem)
        needed = problem.batch * problem.num_heads_q * problem.visible_scores
        return ctas, needed / max(scores, 1)

    def _work(self, problem: Problem) -> tuple[int, float]:
        """CTAs, and the scores that they compute."""
        kernel = self.kernel
        ctas = problem.batch * problem.num_heads_kv * ceil_div(problem.seqlen_k, kernel.block_n)
        heads = problem.batch * problem.num_heads_q
        return ctas, heads * computed_scores(problem, kernel.block_m, kernel.block_n)
