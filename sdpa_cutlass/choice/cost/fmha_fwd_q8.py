"""What a quantised kernel costs: a pass over K and V, then tiles whose products are of bytes.

On sm_90 the cycles of an SM for one score of the attention add up: what softmax does hardly hides behind
mma.sync there. The fit and the counts are those of a probe of these kernels (H200, 2026-11-23: 25 of its
kernels within 11 %, mean 4 %); neither was measured on the kernels that ship:

    clocks a score and sub-partition = 7.5·MMA + 1.6·(other instructions) + 3.9·(shared memory)

in instructions of a warp. On other cards the busiest of three units is not hidden, and of the others the
share that the model of fmha_fwd has. That is a prediction; its counts are those of the machine code for sm_89
(benchmarks/quantised_on_ada.py). The pass is bound by memory: 4 bytes read and 2 written for each key and
column of K and V, or 3 in all where V keeps its 16 bits. A mask adds instructions to every score, whose
numbers are estimates, and its bytes. Exact and quantised kernels never compete.

In a round of a split kernel each warp of a CTA takes a block of keys of its own, for 16 rows, whatever of
them exist; a warp that waits for nobody still takes its own chain of latencies. Next to that every warp loads
its blocks for itself, from the L2 cache, or all of them from DRAM where the cache does not hold them. The
number of splits is that of fmha_fwd: the fastest of those whose CTAs all run at once. The rate of loads was
fitted to one query over 4096 to 131072 keys, which are held in bytes
(benchmarks/results/tuning/2026-11-26-h200-decode-8-bits.json); on other cards this is a prediction.
"""

from __future__ import annotations

from ...library.device import DeviceInfo, imma_ops_per_clock
from ...library.registry import Accuracy, KernelInfo
from ...problem import MaskType, Problem
from ..visible_keys import rows_of_tiles
from .ctas import grid_of, merge_cycles, resident_ctas
from .model import (
    CLOCK_GHZ,
    CTA_CYCLES,
    L2_BYTES_PER_CLOCK,
    LAUNCH_CYCLES,
    SMEM_BYTES_PER_CLOCK,
    SMEM_PER_CTA,
    Model,
    ceil_div,
    overlapping,
)
from .quantised import INT8_PASS_BYTES, INT8_QK_PASS_BYTES, TilesBehindAPass, pass_cycles
from .splits import MAX_SPLIT_TILES, meeting_cycles

_REFERENCE_FLOPS_PER_CLOCK = 2592  # of mma.sync in 16 bits, of the SM that was measured
_MMA_CLOCKS = 7.5  # of an mma.sync on that SM
_BYTE_MACS, _HALF_MACS = 16 * 8 * 32, 16 * 8 * 16  # of an mma.sync
_OTHER_CLOCKS = 1.6
_SMEM_CLOCKS = 3.9
_LANES = 32
_SUB_PARTITIONS = 4
_OTHER_PER_SCORE = {Accuracy.INT8: 8.0, Accuracy.INT8_QK: 5.0}  # for a thread
_OTHER_PER_COLUMN = 2 / 64  # int8: an integer sum to float, and its share of O; for a score and a column
# Of a thread in the machine code for sm_89, without products, ldmatrix and ex2: for a score, and for each of
# the columns that it is made of.
_ADA_OTHER = {Accuracy.INT8: (6.56, 0.0239), Accuracy.INT8_QK: (3.88, 0.02)}
_EX2_PER_CLOCK = 16
_ISSUED_PER_CLOCK = 128  # threads
# A selection; or what makes a number of a bias, keeps it finite and adds it to a sum that became a float.
_MASK_PER_SCORE = {MaskType.BOOL: 3, MaskType.F16: 9, MaskType.BF16: 9, MaskType.F32: 8}
_PASS_BYTES = {Accuracy.INT8: INT8_PASS_BYTES, Accuracy.INT8_QK: INT8_QK_PASS_BYTES}
# Of split kernels.
_CHAIN_CYCLES = 600  # of a block, in which its warp waits
_LOADED_BYTES_PER_CLOCK = 25  # of an SM, where all ask
_MAX_SPLITS = 128  # more than in 16 bits: a CTA has half of the bytes


def _issue_cycles(kernel: KernelInfo, device: DeviceInfo, tiles: int, mask: MaskType | None = None) -> float:
    """Cycles of an SM for what its warps issue for so many products of 16 rows and a block of keys."""
    if device.compute_capability[0] in (9, 10):
        return _added_cycles(kernel, device, tiles, mask)
    return _overlapping_cycles(kernel, device, tiles, mask)


def _added_cycles(kernel: KernelInfo, device: DeviceInfo, tiles: int, mask: MaskType | None) -> float:
    scores = 16 * tiles * kernel.block_n
    rate = _REFERENCE_FLOPS_PER_CLOCK / device.mma_flops_per_clock
    is_int8 = kernel.accuracy is Accuracy.INT8
    macs = _BYTE_MACS if is_int8 else _HALF_MACS
    mma = scores * kernel.head_dim * (1 / _BYTE_MACS + 1 / macs) * _MMA_CLOCKS * rate
    other = _OTHER_PER_SCORE[kernel.accuracy] + (_OTHER_PER_COLUMN * kernel.head_dim if is_int8 else 0)
    if mask is not None:
        other += _MASK_PER_SCORE[mask]
    # ldmatrix.x4 moves 512 bytes: K and V for every warp, Q once.
    reads = (_kv_bytes(kernel) * kernel.warps + 16 * tiles * kernel.head_dim) / 512
    return (mma + scores / _LANES * other * _OTHER_CLOCKS + reads * _SMEM_CLOCKS) / _SUB_PARTITIONS


def _overlapping_cycles(kernel: KernelInfo, device: DeviceInfo, tiles: int, mask: MaskType | None) -> float:
    scores = 16 * tiles * kernel.block_n
    flops_of_a_product = 2 * scores * kernel.head_dim
    of_bytes = imma_ops_per_clock(device.mma_flops_per_clock)
    of_values = of_bytes if kernel.accuracy is Accuracy.INT8 else device.mma_flops_per_clock
    fixed, per_column = _ADA_OTHER[kernel.accuracy]
    other = fixed + per_column * kernel.head_dim + (0 if mask is None else _MASK_PER_SCORE[mask])
    units = (
        flops_of_a_product / of_bytes + flops_of_a_product / of_values,
        scores * (1 / _EX2_PER_CLOCK + other / _ISSUED_PER_CLOCK),
        # Each warp reads all of K and V, which the CTA has written once.
        _kv_bytes(kernel) * (kernel.warps + kernel.kv_groups) / SMEM_BYTES_PER_CLOCK,
    )
    return overlapping(units)


def _kv_bytes(kernel: KernelInfo) -> int:
    """Of a block of keys, as kernels hold it."""
    return kernel.block_n * kernel.head_dim * (2 if kernel.accuracy is Accuracy.INT8 else 3)


class FmhaFwdQ8(TilesBehindAPass):
    """Tiles of mma.sync."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, problem, device, pass_bytes=_PASS_BYTES[kernel.accuracy])
        self._block = _issue_cycles(kernel, device, kernel.block_m // 16, problem.mask)
        if problem.mask is not None:
            self._block += kernel.block_m * kernel.block_n * problem.mask.itemsize / L2_BYTES_PER_CLOCK
        self._resident = max(device.smem_per_sm // (kernel.smem_bytes + SMEM_PER_CTA), 1)


class FmhaFwdQ8Split(Model):
    """CTAs that share the keys of a tile, behind the pass that makes their bytes."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        groups, head_dim = kernel.kv_groups, kernel.head_dim
        key_bytes = (2 if kernel.accuracy is Accuracy.INT8 else 3) * head_dim  # and its value's
        loads = groups * kernel.block_n * key_bytes / _LOADED_BYTES_PER_CLOCK
        self._key_bytes = key_bytes
        issue = _issue_cycles(kernel, device, kernel.block_m // 16 * groups)
        self._resident = resident_ctas(kernel, device)
        # Of a round, by the CTAs that share an SM.
        self._round = [
            max(count * loads, loads + issue + _CHAIN_CYCLES, count * issue)
            for count in range(self._resident + 1)
        ]
        self._round[0] = 0.0
        self._once = CTA_CYCLES + merge_cycles(kernel)
        self._meetings: dict[int, list[float]] = {}
        self.rows_of_a_price = kernel.block_m
        self.keys_of_a_price = kernel.block_n

    def cost(self, problem: Problem) -> tuple[float, int]:
        cycles, num_splits = self.cost_of_held(problem)
        return LAUNCH_CYCLES + pass_cycles(
            self.kernel, self.device, problem, _PASS_BYTES[self.kernel.accuracy]
        ) + cycles, num_splits

    def cost_of_held(self, problem: Problem) -> tuple[float, int]:
        """The same of keys and values whose bytes there are: of the second launch alone."""
        kernel, sms = self.kernel, self.device.sms
        heads = problem.num_heads_q // problem.num_heads_kv  # in a tile
        rows = problem.seqlen_q * heads
        key_heads = problem.batch * problem.num_heads_kv
        tiles = ceil_div(rows, kernel.block_m) * key_heads
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
        cycles = rounds * (full * self._round[resident] + self._round[rest])
        held = self.device.dram_us(key_heads * blocks * kernel.block_n * self._key_bytes)
        if held:  # the last round begins when all has come
            cycles = max(cycles, 1e3 * CLOCK_GHZ * held + self._round[1])
        cycles += (full + (rest > 0)) * self._once
        return LAUNCH_CYCLES + cycles + meeting, num_splits

    def may_split(self, rows: int, heads: int) -> bool:
        return 2 * ceil_div(rows, self.kernel.block_m) * heads <= self.device.sms * self._resident

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        return grid_of(self.kernel, problem, num_splits)

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


def model(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> Model:
    """What prices `kernel`."""
    return (FmhaFwdQ8Split if kernel.is_split else FmhaFwdQ8)(kernel, problem, device)
