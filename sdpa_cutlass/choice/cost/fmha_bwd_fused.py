"""What a fused backward kernel costs: tiles of keys, each of which follows the one before through dQ.

A pair of tiles takes five multiplications, and loads and stores the sums of its rows of dQ, which cost what
_SUMS / block_n multiplications do. A CTA's start and end take as long as _ENDS_STEPS pairs. It starts
_FOLLOWS of a pair behind the CTA whose sums of dQ it adds to: the last one of a head is late by all of them,
which is what few heads pay. Fitted to the backward of FlashAttention's shapes at head_dim 64 and 128 (H200,
2026-11-26): of the twelve problems the faster family is told in ten; in the other two it is 1.4 % ahead at
most.
"""

from __future__ import annotations

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import Problem
from .fmha_bwd import ENDS_CYCLES, PRODUCTS_SLOWDOWN, computed_scores
from .model import LAUNCH_CYCLES, Model, ceil_div

_LAUNCHES = 3
_PRODUCTS = 5 * 1.12  # at the rate of those of `fmha_bwd`
_SUMS = 154
_ENDS_STEPS = 2.6
_FOLLOWS = 0.6


class FmhaBwdFused(Model):
    """The one role, as if its CTAs were spread evenly."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        product = PRODUCTS_SLOWDOWN * 2 * kernel.head_dim / device.mma_flops_per_clock
        self._score = (_PRODUCTS + _SUMS / kernel.block_n) * product  # cycles of an SM for one

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel = self.kernel
        ctas, scores = self._work(problem)
        step = kernel.block_m * kernel.block_n * self._score
        start = (ceil_div(problem.seqlen_k, kernel.block_n) - 1) * _FOLLOWS * step
        ends = ctas * (ENDS_CYCLES + _ENDS_STEPS * step)
        busy = (scores * self._score + ends) / min(max(ctas, 1), self.device.sms)
        return _LAUNCHES * LAUNCH_CYCLES + busy + start, 0

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
