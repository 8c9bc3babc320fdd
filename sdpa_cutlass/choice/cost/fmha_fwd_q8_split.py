"""What a split kernel of fmha_fwd_q8 costs: rounds of blocks of keys, and the meeting of the CTAs of a tile.

A prediction: nothing of it was measured. In a round each warp of a CTA takes a block of keys of its own. What
it issues is counted as for the other quantised kernels (fmha_fwd_q8.py), for 16 rows, whatever of them exist;
a warp that waits for nobody still takes its own chain of latencies. Next to that every warp loads its blocks
for itself, which the others share: half of that time counts as not hidden, and so these kernels lose where
rows are many. A mask by position is asked for in the blocks that need one alone. The number of splits is that
of fmha_fwd: the fastest of those whose CTAs all run at once.
"""

from __future__ import annotations

from ...library.device import DeviceInfo
from ...library.registry import Accuracy, KernelInfo
from ...problem import Problem
from ..visible_keys import rows_of_tiles
from .fmha_fwd import MAX_SPLIT_TILES, meeting_cycles
from .fmha_fwd_q8 import issue_cycles, pass_cycles
from .model import (
    CTA_CYCLES,
    L2_BYTES_PER_CLOCK,
    LAUNCH_CYCLES,
    SMEM_BYTES_PER_CLOCK,
    SMEM_PER_CTA,
    Model,
    ceil_div,
)

_CHAIN_CYCLES = 900  # of a block, in which its warp waits
_LOADING_SHARE = 0.5  # of the time that loads take, next to what is issued
_MERGE_CYCLES_PER_WARP = 160  # all warps of the CTA wait for each other
_MAX_SPLITS = 128  # more than in 16 bits: a CTA has half of the bytes
_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 256  # of a thread, as they are allotted


class FmhaFwdQ8Split(Model):
    """CTAs that share the keys of a tile, behind the pass that makes their bytes."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        groups, head_dim = kernel.kv_groups, kernel.head_dim
        columns = (
            2 * head_dim if kernel.accuracy is Accuracy.INT8 else 3 * head_dim
        )  # bytes of a key and value
        loads = groups * kernel.block_n * columns / L2_BYTES_PER_CLOCK
        issue = issue_cycles(kernel, device, kernel.block_m // 16 * groups)
        by_smem = device.smem_per_sm // (kernel.smem_bytes + SMEM_PER_CTA)
        by_registers = _REGISTERS_PER_SM // (_MAX_REGISTERS * kernel.threads)
        self._resident = max(1, min(by_smem, by_registers))
        # Of a round, by the CTAs that share an SM.
        self._round = [
            max(count * (issue + _LOADING_SHARE * loads), count * loads, issue + _CHAIN_CYCLES)
            for count in range(self._resident + 1)
        ]
        merge_bytes = 8 * kernel.block_m * ((groups - 1) * head_dim + 8 * groups)
        self._once = CTA_CYCLES + _MERGE_CYCLES_PER_WARP * kernel.warps + merge_bytes / SMEM_BYTES_PER_CLOCK
        self._meetings: dict[int, list[float]] = {}
        self.rows_of_a_price = kernel.block_m
        self.keys_of_a_price = kernel.block_n

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, sms = self.kernel, self.device.sms
        heads = problem.num_heads_q // problem.num_heads_kv  # in a tile
        rows = problem.seqlen_q * heads
        tiles = ceil_div(rows, kernel.block_m) * problem.batch * problem.num_heads_kv
        limited_rows = rows_of_tiles(problem, kernel.block_m, heads)
        blocks = ceil_div(problem.seqlen_k, kernel.block_n)
        if limited_rows is not None:
            blocks = limited_rows.rounds(0, kernel.block_n)
        num_splits, meeting = self._split(tiles, blocks, min(rows, kernel.block_m))
        keys_a_round = kernel.block_n * kernel.kv_groups * num_splits
        rounds: float = ceil_div(problem.seqlen_k, keys_a_round)
        if limited_rows is not None:
            rounds = limited_rows.all_rounds(keys_a_round) / limited_rows.count
        share = ceil_div(tiles * num_splits, sms)  # of the busiest SM
        resident = min(share, self._resident)
        full, rest = divmod(share, resident)
        cycles = full * (rounds * self._round[resident] + self._once)
        if rest:
            cycles += rounds * self._round[rest] + self._once
        return 2 * LAUNCH_CYCLES + pass_cycles(kernel, self.device, problem) + cycles + meeting, num_splits

    def may_split(self, rows: int, heads: int) -> bool:
        return 2 * ceil_div(rows, self.kernel.block_m) * heads <= self.device.sms * self._resident

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        kernel = self.kernel
        heads = problem.num_heads_q // problem.num_heads_kv
        m_blocks = ceil_div(problem.seqlen_q * heads, kernel.block_m)
        blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
        limited_rows = rows_of_tiles(problem, kernel.block_m, heads)
        if limited_rows is not None:
            blocks = limited_rows.all_rounds(kernel.block_n) / limited_rows.count
        computed = blocks * m_blocks * kernel.block_m * kernel.block_n / heads
        tiles = m_blocks * problem.batch * problem.num_heads_kv
        return tiles * max(num_splits, 1), problem.visible_scores / max(computed, 1)

    def _split(self, tiles: int, blocks: int, rows: int) -> tuple[int, float]:
        """The CTAs for each tile that should be fastest, and the cycles of their meeting."""
        groups, sms = self.kernel.kv_groups, self.device.sms
        most = min(sms * self._resident // tiles, blocks // groups, _MAX_SPLITS)
        if tiles > MAX_SPLIT_TILES or most < 2:
            return 1, 0.0
        meetings = self._meetings.get(rows)
        if meetings is None:
            meetings = [meeting_cycles(self.kernel, rows, count) for count in range(_MAX_SPLITS + 1)]
            self._meetings[rows] = meetings

        def cycles(num_splits: int) -> float:
            share = ceil_div(tiles * num_splits, sms)
            rounds = ceil_div(blocks, num_splits * groups)
            return rounds * self._round[min(share, self._resident)] + meetings[num_splits]

        best = min(range(1, most + 1), key=cycles)
        return best, meetings[best]
