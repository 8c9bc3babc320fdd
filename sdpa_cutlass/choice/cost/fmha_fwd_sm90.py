"""What a kernel of fmha_fwd_sm90 costs: one CTA an SM, whose consumers share the tensor cores.

For a block of keys the consumers of a CTA need
    mma      block_n·head_dim/16 clocks each              S = Q·Kᵀ and O += P·V, at wgmma's rate
    ex2      4·block_n clocks each                        16 a clock
Exponentials of one consumer run under the products of the others, but for a part that is the larger, the
fewer products there are to hide it, and the fewer consumers. The constants were fitted to measurements on an
H200 (2026-11-24, fp16, 16384 tokens, S = 2048 and 8192, full and causal): 425 to 691 TFLOP/s over five
head_dims and two tiles each. Its clock falls under that load, which _CLOCK_LOSS stands for. What general
kernels and short causal tiles cost is an estimate. Lengths are unknown here: sequences count as full.
"""

from __future__ import annotations

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import Problem
from ..visible_keys import rows_of_tiles
from .model import CTA_CYCLES, LAUNCH_CYCLES, Model, ceil_div

_WARPGROUP_ROWS = 64
_MMA_CLOCKS = 1 / 16  # of a warpgroup, for a key and a column of head_dim
_EX2_CLOCKS = 4  # of a warpgroup, for a key
_TILE_CYCLES = 2500  # a tile's first product and last store, behind the first tile
_CLOCK_LOSS = 1.2
# The share of the exponentials that nothing hides, where there are as many clocks of products: by consumers.
_EXPOSED = {2: 0.74, 3: 0.52}
_HIDDEN_BY_MMA = {2: 0.68, 3: 0.87}  # of that share, for each time that there are as many products again
_LEAST_EXPOSED = 0.1  # of it
# Under a causal mask consumers of a CTA have unlike numbers of blocks, and wait for each other.
_CAUSAL_LOSS = {2: 1.0, 3: 1.08}
_GENERAL_SLOWDOWN = 1.04
# grid.hpp decides by these: the most keys of causal tiles that are taken in turn, and the clocks each saves.
_MOST_KEYS = 1024
_SAVED_BY_TILE = 2000


class FmhaFwdSm90(Model):
    """Equal tiles are dealt out to the SMs at once, and so are causal ones that are short. Other causal
    tiles, and those of general kernels, start as SMs become free, the longest first.
    """

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        consumers = kernel.block_m // _WARPGROUP_ROWS
        mma = consumers * kernel.block_n * kernel.head_dim * _MMA_CLOCKS
        ex2 = consumers * kernel.block_n * _EX2_CLOCKS
        exposed = _EXPOSED[consumers] * max(1 - _HIDDEN_BY_MMA[consumers] * (mma / ex2 - 1), _LEAST_EXPOSED)
        self._block = (mma + min(exposed, 1) * ex2) * _CLOCK_LOSS
        self._is_limited = problem.is_causal or problem.window is not None
        if self._is_limited:
            self._block *= _CAUSAL_LOSS[consumers]
        if kernel.is_general:
            self._block *= _GENERAL_SLOWDOWN
        self._clocks_by_key = consumers * (kernel.head_dim // 16 + 2)
        self.rows_of_a_price = kernel.block_m
        self.keys_of_a_price = kernel.block_n

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, sms = self.kernel, self.device.sms
        heads = problem.batch * problem.num_heads_q
        tiles = ceil_div(problem.seqlen_q, kernel.block_m) * heads
        if not self._is_limited and not kernel.is_general:
            tile = ceil_div(problem.seqlen_k, kernel.block_n) * self._block + _TILE_CYCLES
            return LAUNCH_CYCLES + CTA_CYCLES + ceil_div(tiles, sms) * tile, 0
        mean_blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
        most_blocks = mean_blocks
        rows = rows_of_tiles(problem, kernel.block_m, 1)
        if rows is not None:
            mean_blocks = rows.all_rounds(kernel.block_n) / rows.count
            most_blocks = rows.rounds(0, kernel.block_n)
        ends = CTA_CYCLES - (_SAVED_BY_TILE if self._takes_turns(problem, tiles) else 0)
        longest = most_blocks * self._block + CTA_CYCLES
        # The SMs end apart, by less the more tiles each has had.
        apart = longest * sms / (2 * tiles)
        return LAUNCH_CYCLES + max(tiles * (mean_blocks * self._block + ends) / sms + apart, longest), 0

    def _takes_turns(self, problem: Problem, tiles: int) -> bool:
        """Whether CTAs take several causal tiles: num_ctas of grid.hpp."""
        sms = self.device.sms
        if self.kernel.is_general or tiles <= sms:
            return False
        keys = min(problem.seqlen_k, max(problem.seqlen_q + problem.causal_offset, 0))
        whole = ceil_div(keys, self.kernel.block_n) * self.kernel.block_n  # where grid.hpp counts keys
        return keys <= _MOST_KEYS and whole * self._clocks_by_key * 5 // 4 <= _SAVED_BY_TILE * tiles // sms

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        kernel = self.kernel
        heads = problem.batch * problem.num_heads_q
        m_blocks = ceil_div(problem.seqlen_q, kernel.block_m)
        blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
        rows = rows_of_tiles(problem, kernel.block_m, 1)
        if rows is not None:
            blocks = rows.all_rounds(kernel.block_n) / rows.count
        computed = blocks * m_blocks * kernel.block_m * kernel.block_n
        return m_blocks * heads, problem.visible_scores / max(computed, 1)
