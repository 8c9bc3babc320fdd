"""What a kernel of fmha_fwd costs: waves, tile quantisation and the work of one SM, in clock cycles.

A CTA of the fused family walks over the key blocks that its rows can see. In one *round* each of its
`kv_groups` warp groups takes one block, so a CTA needs ceil(blocks / kv_groups) rounds. A round loads four
units of an SM:
    mma      4·block_m·block_n·head_dim FLOPs a group            at the card's mma.sync rate
    softmax  ex2 (16 a clock) and about six other instructions a score (128 a clock)
    smem     every warp reads its group's whole K and V block, and its Q rows unless they stay in registers
             (128 B a clock): this is why taller warp tiles win on large problems
    l2       the K and V blocks themselves: 64 B a clock in pieces of 64 columns, which is what 128-byte
             requests bring; head_dims that are no multiple of 64 go in pieces of 32 or 16 columns, and the
             requests are as many (d80_m32n64_g2 at 24 heads, 2048 to 8192 keys: 20 B a clock)
The busiest unit is never hidden and the others overlap in part; where ex2 alone takes longer than the
products (head_dim 32 on an H200), the softmax's other instructions overlap with it as well. With one warp per
scheduler nothing hides latency, so a round cannot be shorter than one warp's own chain. General kernels take
longer than their plain twins; masks and dropout add instructions to every score, causal masks to those of the
blocks on the diagonal; a warp waits for the loads of a dense mask in every round, longer where they come from
the DRAM; kernels compute on their own head_dim, however much of it is used, and longer where columns are
missing. What a kernel costs once, the first CTA of an SM pays, and those that begin beside it wait for each
other's loads. In grids of several waves, the ends of a later CTA (Q in, O out) cost more the taller its tile
is and are hidden in part under its neighbours' rounds. A causal kernel ends with its longest CTA, beside
shorter ones on its SM. Split kernels pack the query heads of a key head into their tiles, and when several
CTAs share a tile, their parts have to be merged (splits.py). Where the DRAM takes nearly as long as the SMs,
a kernel takes longer than either (model.py), and the last CTAs of tiles with KV groups share SMs as the first
do. Lengths are unknown here: sequences count as full. The constants were fitted to measurements on an H200
(2026-11): D=64 kernels at B=1 H=8 S=512 (tiles 16x64 to 128x64 with 1 to 4 groups: 4.8 to 10.4 µs) and at up
to eight times the batch; tests/library/test_select.py lists some and holds the model within 20 %. Pieces and
later ends come from random problems and `tune` on the same card (tests/library/test_measured_choices.py),
what splitting costs from decoding there (1 to 16 queries, 2048 to 8192 keys, 2.8 to 4.4 TB/s of K and V). All
of these, 1361 random problems there with all kernels worth trying, the samples of eight runs and the journals
of `tune` were fitted together (2026-11-26), what comes before the first loads of split kernels to 400 more
since that takes less (2026-11-27), and all constants in the end to what choices lost at 4,501 problems
(docs/tuning-log/corrections.md, 2026-11-28). What a CTA costs once follows 462 more with kernels that find
O's addresses once (docs/tuning-log/version-11.md). What counts is the ranking: other cards enter only through
their rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...problem import MaskType
from ..mask_reads import RUNS
from ..visible_keys import CausalRows, WindowRows, rows_of_tiles
from .corrections import FEW_KEYS, FEWEST_KEYS, HARDLY_ANY_KEYS, factors
from .ctas import grid_of, merge_cycles, resident_ctas
from .model import (
    CLOCK_GHZ,
    KEYS_OF_A_PRICE,
    L2_BYTES_PER_CLOCK,
    LAUNCH_CYCLES,
    OVERLAP_LOSS,
    SMEM_BYTES_PER_CLOCK,
    Model,
    beside_dram,
    ceil_div,
    mask_stays_in_l2,
    overlapping,
)
from .splits import Splits

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

ENDS_CYCLES = 2390  # of a first CTA: first loads, last stores
_ROUND_LATENCY = 412
# On top of that for a mask that is loaded, of a block of 64 keys: it grows as their root. From 684 problems,
# the fastest kernels of 404 timed twice (H200s and H100s, 2026-11-29).
_MASK_LATENCY = {MaskType.BOOL: 300, MaskType.F16: 920, MaskType.BF16: 920, MaskType.F32: 920}
_DRAM_MASK_LATENCY = 720  # more, where the mask does not stay in the L2 cache
# The same of one that is read one by one, wherever it is.
_UNALIGNED_MASK_LATENCY = {MaskType.BOOL: 2850, MaskType.F16: 4000, MaskType.BF16: 4000, MaskType.F32: 4000}
_MASK_BYTES_PER_CLOCK = 44  # into an SM
_COLUMN_BYTES_PER_CLOCK = 1.4  # of K and V into an SM, for each column of the pieces that rows are copied in
_UNALIGNED_SHARE = 0.713  # of that rate, where a row is no whole number of pieces
_BESIDE_SHARE = 0.529  # of it, where CTAs that begin together load Q: each waits for those before it
_LATER_CYCLES = 3950  # of a later CTA's ends, next to its rows of Q and O
_LATER_BYTES_PER_CLOCK = 12.9
_LATER_WARP_CYCLES = 1.76  # for an element of O of a warp, where two hide nothing (H200, 2026-11-27)
_Q_FIRST_CYCLES = 795  # Q goes through shared memory before V may have its place
_HIDDEN_SHARE = 0.25  # of its neighbours' rounds, under which a later CTA's ends are hidden
_RING_HEAD_START = 414  # KV groups start with three tiles in flight and Q in registers
_CAUSAL_ALU_PER_SCORE = 5.26  # in blocks that the diagonal crosses
# Of a first CTA, on top of ENDS_CYCLES: a warp of a plain or general kernel writes its elements of O one
# after the other; split kernels meet more code, the wider the more (without KV groups as the square).
_WARP_CYCLES, _WARP_CYCLES_SAVED = 0.466, 1010
_GENERAL_CYCLES = 416
_SPLIT_FIRST_CYCLES, _SPLIT_WIDE_CYCLES = 232, 7490
_GROUPS_FIRST_CYCLES, _GROUPS_WIDE_CYCLES = -1560, 2490  # of those with KV groups
_SEEN_CYCLES = 535  # where rows do not see all keys, and a split kernel finds which
_PACKED_CYCLES = 0.241  # for an element of Q of a warp in a split kernel: rows of several heads
_OVERLAP_LOSS_OF_EX2 = 0.255  # where ex2 alone takes longer than the products
_EX2_PER_CLOCK = 16
_ALU_PER_CLOCK = 128
_ALU_PER_SCORE = 5.0
_GENERAL_SLOWDOWN = 1.161
_LOST_TIE = 1.034  # by split kernels without KV groups
_PADDED_SLOWDOWN = 1.03  # of a kernel for a larger head_dim: columns are predicated
_MASK_LOSS_OF_TWO_WARPS = 1.03  # of tiles without KV groups: 159 random problems with masks (2026-11-26)
_DROPOUT_ALU_PER_SCORE = 5.99  # 7 rounds of Philox for 16 scores, a comparison and a selection
_MASK_ALU_PER_SCORE = {MaskType.BOOL: 1.9, MaskType.F16: 5.8, MaskType.BF16: 5.8, MaskType.F32: 3.4}
_MASK_RUN_UNDER_DROPOUT = 2  # neighbouring keys of a thread; without: RUNS of mask_reads.py
# Of a mask that is read one by one, on top of that.
_UNALIGNED_ALU_PER_SCORE = {MaskType.BOOL: 6.3, MaskType.F16: 11.9, MaskType.BF16: 11.9, MaskType.F32: 11.9}
# From the DRAM into an SM, of kernels without KV groups: each of their CTAs has one tile of K or V under way.
_DRAM_BYTES_PER_CLOCK = 17.55
_NARROW_DRAM_BYTES_PER_CLOCK = 12.97  # of split ones below head_dim 64
_READ_AGAIN = 1.52  # times from the DRAM, where tiles with KV groups share K and V: one is behind the other


@dataclass(frozen=True, slots=True)
class _Work:
    """One round of one CTA: cycles each unit is busy, and the warps that share the work."""

    mma: float
    ex2: float
    alu: float
    smem: float
    l2: float
    warps: int

    def cycles(self, resident: int, latency: float) -> float:
        """Cycles of a round when `resident` CTAs share the SM and a warp waits for `latency` of them."""
        units, loss = (self.mma, self.ex2 + self.alu, self.smem), OVERLAP_LOSS
        if self.mma < self.ex2:
            units, loss = (self.mma + self.alu, self.ex2, self.smem), _OVERLAP_LOSS_OF_EX2
        busy = overlapping(units, loss)
        alone = busy * 4 / self.warps + latency  # four schedulers, one warp each
        # CTAs, at the scheduler with most warps
        loaded = 4 * ceil_div(resident * self.warps, 4) / self.warps
        return max(busy * loaded, self.l2 * resident, alone)


class FmhaFwd(Model):
    """Rounds of blocks of keys; CTAs that share an SM; the meeting of splits."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        merge = merge_cycles(kernel)
        masking = 0.0
        if problem.is_causal or problem.window is not None:
            masked_scores = ceil_div(kernel.block_m, kernel.block_n) * kernel.block_m * kernel.block_n
            # Of the schedulers: one group meets the diagonal.
            share = min(kernel.warps / kernel.kv_groups / 4, 1)
            masking = masked_scores * _CAUSAL_ALU_PER_SCORE / (_ALU_PER_CLOCK * share)
            if problem.window is not None:
                masking *= 2  # at both ends
        head_start = _RING_HEAD_START if kernel.kv_groups > 1 else 0
        q_bytes = 2 * kernel.block_m * kernel.head_dim
        is_padded = kernel.head_dim > max(problem.head_dim, problem.head_dim_v)
        self._work = work = _work(kernel, problem, device)
        self._key_load = 4 * kernel.head_dim / _load_bytes_per_clock(kernel, problem)
        self._is_limited = problem.is_causal or problem.window is not None
        # At hand for `cost`, which most new sizes ask of every kernel: properties of a row take longer.
        self._is_split, self._block_m, self._block_n = kernel.is_split, kernel.block_m, kernel.block_n
        self._kv_groups, self._sms = kernel.kv_groups, device.sms
        self.rows_of_a_price = kernel.block_m
        self.keys_of_a_price = KEYS_OF_A_PRICE
        self._resident = resident_ctas(kernel, device)
        # By the CTAs that share an SM: the cycles of a round, and those that each of them adds once.
        self._latency = float(_ROUND_LATENCY)
        if problem.mask is not None:
            self._latency += _mask_latency(problem.mask, kernel, problem, device)
        self._round = self._cycles_of(work)
        self._short_rounds: dict[int, list[float]] = {}
        elements = kernel.block_m * kernel.head_dim * kernel.kv_groups // kernel.warps  # of O
        if kernel.is_split:
            if kernel.kv_groups == 1:
                self._first = _SPLIT_FIRST_CYCLES + _SPLIT_WIDE_CYCLES * (kernel.head_dim / 256) ** 2
            else:
                self._first = _GROUPS_FIRST_CYCLES + _GROUPS_WIDE_CYCLES * kernel.head_dim / 256
            if self._is_limited or problem.has_lengths:
                self._first += _SEEN_CYCLES
        else:
            self._first = _WARP_CYCLES * elements - _WARP_CYCLES_SAVED + _GENERAL_CYCLES * kernel.is_general
        self._once = [(masking + merge) * count for count in range(self._resident + 1)]
        packing = _PACKED_CYCLES * kernel.kv_groups / kernel.warps
        self._row_cycles = packing * problem.head_dim if kernel.is_split else 0.0
        # Q and O go in the pieces of K and V.
        self._ends = ENDS_CYCLES - head_start + kernel.block_m * self._key_load
        self._beside = self._key_load / _BESIDE_SHARE  # of a row
        later = _LATER_CYCLES + 2 * q_bytes / _LATER_BYTES_PER_CLOCK
        if kernel.warps == 2 and kernel.kv_groups == 1 and not kernel.is_split:
            later += _LATER_WARP_CYCLES * elements
        self._later_ends = later + _Q_FIRST_CYCLES * kernel.q_in_regs
        self._slowdown = _GENERAL_SLOWDOWN if kernel.is_general else 1.0
        if problem.mask is not None and kernel.warps == 2 and kernel.kv_groups == 1 and not kernel.is_split:
            self._slowdown *= _MASK_LOSS_OF_TWO_WARPS
        self._dram_rate = _DRAM_BYTES_PER_CLOCK if kernel.kv_groups == 1 else None
        if kernel.is_split and kernel.kv_groups == 1:
            self._slowdown *= _LOST_TIE
            if kernel.head_dim < 64:
                self._dram_rate = _NARROW_DRAM_BYTES_PER_CLOCK
        self._row_bytes = 2 * (problem.head_dim + problem.head_dim_v)  # of K and V, or of Q and O
        self._padding = _PADDED_SLOWDOWN if is_padded else 1.0
        self._factors = factors(kernel, problem, device)
        self.splits = Splits(kernel, device.sms, self._resident, self._round, self._later_ends)

    def cost(self, problem: Problem) -> tuple[float, int]:
        round_cycles, once, block_m, block_n = self._round, self._once, self._block_m, self._block_n
        heads = problem.num_heads_q // problem.num_heads_kv if self._is_split else 1  # in a tile
        rows = problem.seqlen_q * heads
        tiles = ctas = -(-rows // block_m) * problem.batch * problem.num_heads_q // heads
        keys_a_round = block_n * self._kv_groups
        limited_rows = rows_of_tiles(problem, block_m, heads) if self._is_limited else None
        used = block_m if block_m < rows else rows
        num_splits, meeting, packing = 0, 0.0, 0.0
        row_bytes = self._row_bytes * problem.batch
        # At most, and without a call: most sizes are small. `Problem.bytes` counts the keys that are seen.
        moved = row_bytes * (problem.num_heads_q * problem.seqlen_q + problem.num_heads_kv * problem.seqlen_k)
        is_cached, dram = moved <= self.cached_bytes, 0.0
        if not is_cached:
            kv_bytes = row_bytes * problem.num_heads_kv * problem.seen_keys
            dram = self.device.dram_us(kv_bytes) * CLOCK_GHZ * 1e3
        shares_keys = rows > block_m or (not self._is_split and problem.num_heads_q > problem.num_heads_kv)
        if self._is_split:
            packing = self._row_cycles * used
            num_splits = 1
            read = 0.0 if shares_keys else dram
            if ctas <= (self.splits.most_tiles if read else self.splits.most_cached_tiles):
                blocks = limited_rows.rounds(0, block_n) if limited_rows else -(-problem.seqlen_k // block_n)
                num_splits, meeting = self.splits.choose(ctas, blocks, used, read)
                ctas *= num_splits
                keys_a_round *= num_splits
        if problem.seqlen_k < keys_a_round:
            round_cycles = self._short_round(-(-problem.seqlen_k // (num_splits or 1)))
        share = -(-ctas // self._sms)  # of the busiest SM
        resident = share if share < self._resident else self._resident
        if limited_rows is None:
            mean_rounds: float = -(-problem.seqlen_k // keys_a_round)
            longest = mean_rounds * round_cycles[share if share <= self._resident else 1]
        else:
            mean_rounds = limited_rows.all_rounds(keys_a_round) / limited_rows.count
            longest = self._longest(limited_rows, keys_a_round, ctas, share, round_cycles)

        full, rest = divmod(share, resident)
        ends = self._ends + self._first
        rounds = mean_rounds * round_cycles[resident]
        later_ends = max(self._ends, self._later_ends - _HIDDEN_SHARE * rounds) / resident
        beside = (resident - 1) * used * self._beside
        cycles = ends + beside + full * (rounds + once[resident]) + (full - 1) * later_ends
        if rest:
            together = rest
            if dram and self._kv_groups > 1 and not shares_keys:  # the last ones come where others end
                together = min(resident, ctas - full * resident * self._sms)
            cycles += mean_rounds * round_cycles[together] + once[rest] + later_ends
        cycles = max(cycles, ends + longest + once[resident])
        cycles *= self._slowdown * self._padding
        cycles += packing * share + meeting
        if self._is_split and shares_keys and self._kv_groups > 1:
            cycles = max(cycles, _READ_AGAIN * dram)
        sizes = (tiles <= self._sms) + 2 * (problem.seqlen_k <= FEW_KEYS) + 4 * (2 * rows <= block_m)
        sizes += 8 * (problem.seqlen_k <= FEWEST_KEYS) + 16 * (problem.seqlen_k <= HARDLY_ANY_KEYS)
        cycles = LAUNCH_CYCLES + cycles
        if not is_cached:
            cycles = beside_dram(cycles, self.dram_cycles(problem, self._dram_rate))
        return self._factors[sizes] * cycles, num_splits

    def may_split(self, rows: int, heads: int) -> bool:
        most = self.splits.most_tiles if rows <= self._block_m else self.splits.most_cached_tiles
        return self._is_split and -(-rows // self._block_m) * heads <= most

    def outclasses(self, other: Model) -> bool:
        """The same tile for a larger head_dim takes as many rounds, each as long or longer.

        Not where its loads are faster, of rows in longer pieces, or it is corrected by less.
        """
        return (
            isinstance(other, FmhaFwd)
            and self.kernel.head_dim < other.kernel.head_dim
            and self._tile() == other._tile()
            and self._resident >= other._resident
            and self._key_load <= other._key_load
            and all(own <= others for own, others in zip(self._factors, other._factors, strict=True))
        )

    def _tile(self) -> tuple[object, ...]:
        kernel = self.kernel
        return (
            kernel.family, kernel.is_general, kernel.is_split,
            kernel.block_m, kernel.block_n, kernel.kv_groups, kernel.warps,
        )  # fmt: skip

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        return grid_of(self.kernel, problem, num_splits)

    def _cycles_of(self, work: _Work) -> list[float]:
        """By the CTAs that share an SM."""
        return [work.cycles(count, self._latency) for count in range(self._resident + 1)]

    def _short_round(self, keys: int) -> list[float]:
        """The same as `_round`, of CTAs that have one round with so many keys: the others are not loaded."""
        steps = -(-keys // KEYS_OF_A_PRICE)
        found = self._short_rounds.get(steps)
        if found is None:
            missing = self.kernel.block_n * self.kernel.kv_groups - steps * KEYS_OF_A_PRICE
            work = replace(self._work, l2=self._work.l2 - missing * self._key_load)
            found = self._short_rounds[steps] = self._cycles_of(work)
        return found

    def _longest(
        self,
        limited_rows: CausalRows | WindowRows,
        keys_a_round: int,
        ctas: int,
        share: int,
        round_cycles: list[float],
    ) -> float:
        """Cycles of the longest CTA's rounds. It shares its SM with shorter ones as long as they last.

        When all CTAs start at once, an SM has every `sms`-th of them; in grids of several waves the longest
        one counts as if it were alone.
        """
        if share > self._resident:
            return limited_rows.rounds(0, keys_a_round) * round_cycles[1]
        sms, count = self._sms, limited_rows.count
        left, cycles = limited_rows.rounds(0, keys_a_round), 0.0
        for i in range(1, share):  # left: rounds of the one that ends i-th last
            ended = limited_rows.rounds(i * sms * count // ctas, keys_a_round)
            cycles += (left - ended) * round_cycles[i]
            left = ended
        return cycles + left * round_cycles[share]


def _load_bytes_per_clock(kernel: KernelInfo, problem: Problem) -> float:
    """What an SM gets of K and V: a piece of a row is a request of its own, however short, and one that does
    not begin at a multiple of its length asks for more than it needs. Rows count as lying next to each other.
    """
    pieces = next((columns for columns in (64, 32) if kernel.head_dim % columns == 0), 16)
    rate = min(_COLUMN_BYTES_PER_CLOCK * pieces, L2_BYTES_PER_CLOCK)
    is_unaligned = problem.head_dim % pieces or problem.head_dim_v % pieces
    return rate * _UNALIGNED_SHARE if is_unaligned else rate


def _reads_runs(problem: Problem) -> bool:
    """Whether threads read the keys of the mask that they hold at once."""
    return problem.reads_mask_by(_MASK_RUN_UNDER_DROPOUT if problem.has_dropout else RUNS["fmha_fwd"])


def _mask_latency(mask: MaskType, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> float:
    """For which a warp waits in a round."""
    if not _reads_runs(problem):
        latency = _UNALIGNED_MASK_LATENCY[mask]
    elif mask_stays_in_l2(problem, device):
        latency = _MASK_LATENCY[mask]
    else:
        latency = _MASK_LATENCY[mask] + _DRAM_MASK_LATENCY
    return latency * math.sqrt(kernel.block_n / 64)


def _work(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> _Work:
    scores = kernel.block_m * kernel.block_n * kernel.kv_groups
    kv_bytes = 4 * kernel.block_n * kernel.head_dim
    q_reads = 0 if kernel.q_in_regs else 2 * kernel.kv_groups * kernel.block_m * kernel.head_dim
    loads = kernel.kv_groups * kv_bytes / _load_bytes_per_clock(kernel, problem)
    alu_per_score, mask_bytes = _ALU_PER_SCORE, 0
    if problem.mask is not None:
        alu_per_score += _MASK_ALU_PER_SCORE[problem.mask]
        if not _reads_runs(problem):
            alu_per_score += _UNALIGNED_ALU_PER_SCORE[problem.mask]
        mask_bytes = scores * problem.mask.itemsize
    if problem.has_dropout:
        alu_per_score += _DROPOUT_ALU_PER_SCORE
    return _Work(
        mma=4 * scores * kernel.head_dim / device.mma_flops_per_clock,
        ex2=scores / _EX2_PER_CLOCK,
        alu=scores * alu_per_score / _ALU_PER_CLOCK,
        smem=(kernel.warps * kv_bytes + q_reads) / SMEM_BYTES_PER_CLOCK,
        l2=loads + mask_bytes / _MASK_BYTES_PER_CLOCK,
        warps=kernel.warps,
    )
