"""What the quantised families share: a pass that makes bytes of K and V, and tiles behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..visible_keys import rows_of_tiles
from .model import CLOCK_GHZ, CTA_CYCLES, LAUNCH_CYCLES, Model, ceil_div

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

INT8_PASS_BYTES = 6  # read and written for a key and a column of K and of V
INT8_QK_PASS_BYTES = 3  # of K alone
_PASS_BYTES_PER_CLOCK = 10  # of an SM: 2.4 TB/s on 132
_MASKED_BLOCKS = 0.3  # of a block's cycles, for each that the diagonal crosses


def pass_cycles(kernel: KernelInfo, device: DeviceInfo, problem: Problem, pass_bytes: int) -> float:
    """Of the pass that makes bytes of K and V; it is bound by memory."""
    blocks = problem.batch * problem.num_heads_kv * ceil_div(problem.seqlen_k, kernel.block_n)
    moved = blocks * kernel.block_n * kernel.head_dim * pass_bytes
    return max(moved / (device.sms * _PASS_BYTES_PER_CLOCK), device.dram_us(moved) * CLOCK_GHZ * 1e3)


class TilesBehindAPass(Model):
    """Tiles dealt out to the SMs, behind the pass that makes their bytes. A family says what they take."""

    _block: float  # cycles of an SM, for a block of keys of a tile
    _tile: float = CTA_CYCLES  # and for its beginning and end
    _resident = 1  # CTAs of an SM

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo, *, pass_bytes: int) -> None:
        super().__init__(kernel, device)
        self._pass_bytes = pass_bytes
        self._is_causal = problem.is_causal
        self.rows_of_a_price = kernel.block_m
        self.keys_of_a_price = kernel.block_n

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, sms = self.kernel, self.device.sms
        tiles = ceil_div(problem.seqlen_q, kernel.block_m) * problem.batch * problem.num_heads_q
        tile = self._blocks(problem) * self._block
        if self._is_causal:
            tile += _MASKED_BLOCKS * self._block * ceil_div(kernel.block_m, kernel.block_n)
        # The CTAs of an SM share its rate; the last wave may be a part of one, where tiles are unlike.
        is_dealt = self._is_causal and problem.seqlen_q > kernel.block_m
        rounds = max(tiles / sms, 1) if is_dealt else ceil_div(tiles, sms)
        ends = self._tile * ceil_div(tiles, sms * self._resident)
        made = pass_cycles(kernel, self.device, problem, self._pass_bytes)
        return 2 * LAUNCH_CYCLES + made + rounds * tile + ends, 0

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        kernel = self.kernel
        m_blocks = ceil_div(problem.seqlen_q, kernel.block_m)
        computed = self._blocks(problem) * m_blocks * kernel.block_m * kernel.block_n
        return m_blocks * problem.batch * problem.num_heads_q, problem.visible_scores / max(computed, 1)

    def _blocks(self, problem: Problem) -> float:
        """Blocks of keys of a tile, on average."""
        rows = rows_of_tiles(problem, self.kernel.block_m, 1)
        if rows is None:
            return ceil_div(problem.seqlen_k, self.kernel.block_n)
        return rows.all_rounds(self.kernel.block_n) / rows.count
