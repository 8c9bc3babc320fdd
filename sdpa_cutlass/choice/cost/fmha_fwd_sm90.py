"""What a kernel of fmha_fwd_sm90 costs: one CTA an SM, or two, whose consumers share the tensor cores.

For a block of keys the consumers of a CTA need
    mma      block_n·head_dim/16 clocks each              S = Q·Kᵀ and O += P·V, at wgmma's rate
    ex2      4·block_n clocks each                        16 a clock
Exponentials of one consumer run under the products of the others, but for a part that is the larger, the
fewer products there are to hide it, and the fewer consumers. A card that is full runs slower than one with a
few CTAs: its clock falls, and its SMs share the L2 cache; more so where rows of head_dim columns do not begin
at multiples of the 32 bytes that the cache reads at once. Of a pair of CTAs each loads half of K and V. Tiles
are dealt out to the SMs; each has a beginning, which waits for a block of K, and an end, and in these Q and O
cross the L2 cache, in pieces as K and V do: narrow ones are slow. Of two CTAs on an SM one computes while the
other waits; one that has an SM to itself waits more, and the longest causal one ends alone. Next to
lengths and masks, in long windows and under long diagonals a general kernel has a CTA for each tile, whose
beginning nothing hides (launch.cuh); its consumers without rows compute nothing.
The constants were fitted to 1361 random problems on an H200 with all kernels worth trying, to the samples of
eight runs of random problems there and on an H100, to pairs of CTAs on both, to masks and to general kernels.
Times that the DRAM bounds count as far as it lets them (2026-11; tests/library/test_measured_choices.py says
how little the choice loses at each of them). Ends of causal grids, tiles with one block, narrow aligned rows
and which pairs gain come from 1,000 more on H200s (2026-11-27); all constants moved
together to what loses least at 4,501 problems (docs/tuning-log/corrections.md, 2026-11-28).
A boolean mask is priced between one whose blocks are all true and a dense one, and where all rows are one, as
under padding, as one whose blocks are all true. Which blocks it hides is not known, so those that leave most
of them out take a fraction of their price. Where all SMs read a mask and K and V, these come at the rate at
which K and V alone do from the L2 cache; where few do, and where the mask is in the DRAM, a block waits.
Lengths are unknown here: sequences count as full, but for their last tile and block.
CTAs of a split kernel have a part of a tile's keys each. Their parts, float32, cross memory twice, and a
second launch reads them; where each CTA reads keys of its own, the DRAM bounds them.
"""

from __future__ import annotations

import math

from ...library.device import DeviceInfo
from ...library.registry import KernelInfo
from ...problem import MASK_ALIGNMENT, MaskType, Problem
from ..mask_reads import RUNS
from ..visible_keys import rows_of_tiles
from .corrections import FEW_KEYS, FEWEST_KEYS, HARDLY_ANY_KEYS, factors
from .model import KEYS_OF_A_PRICE, LAUNCH_CYCLES, Model, beside_dram, ceil_div, mask_stays_in_l2

_WARPGROUP_ROWS = 64
_ROWS_OF_A_PRICE = 16
_MMA_CLOCKS = 1.1 / 16  # of a warpgroup, for a key and a column of head_dim
_EX2_CLOCKS = 3.85  # of a warpgroup, for a key
# By consumers. Of a CTA: first loads, first product, last store; of each further tile: what nothing hides.
_FIRST_CYCLES = {2: 3400, 3: 4680}
_TILE_CYCLES = {2: 1640, 3: 894}
_WIDE_TILE_CYCLES = 6.46  # of such a tile, for each column of head_dim above 128
# Of these, where all keys are one block: two consumers up to head_dim 128, 194 random problems (2026-11-27).
_ONE_BLOCK_CYCLES_SAVED = 571
_BYTES_PER_FIRST_CYCLE = 11.8  # of a block of K, for which a CTA waits first
# Of Q and O, where every SM asks, by the columns of a piece; and where rows do not begin at a sector.
_Q_BYTES_PER_CLOCK = {16: 18.9, 32: 58.4, 64: 98.3}
_UNALIGNED_Q_BYTES_PER_CLOCK = {16: 8.5, 32: 22.2, 64: 62.5}
_FULL_CARD_LOSS = 0.123
_UNALIGNED_LOSS = 0.0398  # on top of that
_SECTOR_COLUMNS = 16
# Head_dims that go in pieces of 16 columns, by consumers: those for head_dim 80 and 96 at 26 random problems.
# Masks and dropout hide it.
_NARROW_LOSS = {2: 1.3, 3: 1.05}
# Bytes of K and V that an SM gets in a clock, where all ask and rows do not begin at a sector, by the columns
# of a piece.
_UNALIGNED_BYTES_PER_CLOCK = {16: 12.2, 32: 14.4, 64: 21.1}
_NARROW_BYTES_PER_CLOCK = 17.2  # of pieces of 16 columns that do: three problems with few rows and long keys
# The share of the exponentials that nothing hides, where there are as many clocks of products: by consumers.
_EXPOSED = {2: 0.59, 3: 0.258}
_HIDDEN_BY_MMA = {2: 0.599, 3: 1.21}  # of that share, for each time that there are as many products again
_CAUSAL_LOSS = 1.05  # consumers of a CTA have unlike numbers of blocks, and wait for each other
# Of a tile, a consumer whose rows lie beyond the last one: plain kernels compute them. By whether a CTA takes
# several tiles in turn.
_IDLE_SAVES = {False: 0.187, True: 0.219}
# Of a general kernel, by consumers: a CTA finds its sequence first; a tile that has one of its own begins
# when the one before has ended; one that has not costs more than a plain kernel's, as each of its blocks does
# (156 problems with windows, sinks, dropout or nothing on an H200, 2026-11-27).
_GENERAL_FIRST_CYCLES = {2: 3150, 3: 3320}
_GENERAL_TILE_CYCLES = {2: 5780, 3: 4000}
_GENERAL_TURN_CYCLES = {2: 1340, 3: 2370}
_GENERAL_LOSS = 1.08
_LONGEST_WINDOW_IN_TURN = 2048  # keys, with a tile's rows
_LONGEST_CAUSAL_IN_TURN = {2: 1024, 3: 2048}
_ALU_PER_CLOCK = 128
# Instructions of a score.
_MASK_ALU_PER_SCORE = {MaskType.BOOL: 3.73, MaskType.F16: 3.06, MaskType.BF16: 3.06, MaskType.F32: 3.0}
# On top of that: where they are read one by one, and where pairs of 16 bits and more lie in more sectors.
_UNALIGNED_ALU_PER_SCORE = {MaskType.BOOL: 6.0, MaskType.F16: 9.91, MaskType.BF16: 9.91, MaskType.F32: 14.0}
_ONE_ROW_ALU_PER_SCORE = 1.5  # of a boolean mask with one row for all, as under padding
_APART_ALU_PER_SCORE = 6.78
_DROPOUT_ALU_PER_SCORE = 2.89
_DROPOUT_BLOCK_CYCLES = 319  # of a block besides
# Of a block, for a mask and, on top of that, for one that comes from the DRAM in runs; the share that a full
# card hides. Of a boolean mask from the DRAM it is taken to hide all, for such a mask may hide whole blocks.
_MASK_WAIT, _DRAM_MASK_WAIT, _MASK_WAIT_HIDDEN = 560, 900, 0.57
_ONE_ROW_BLOCK_CYCLES = 120  # of such a mask
_L2_BYTES_PER_CLOCK = 37  # of an SM, where all ask
_WINDOW_KEY_CYCLES = {2: 4.0, 3: 14.0}  # of a tile, for each key of a block: those at both ends are masked
# Of two CTAs on an SM one works while the other begins and ends, and consumers seldom wait; alone they do.
_EXPOSED_OF_TWO, _EXPOSED_ALONE = 0.491, 0.94
_TILE_CYCLES_OF_TWO = 615
_SHORT_CAUSAL_TILE_CYCLES = 290  # of two blocks or one, on top of that: seven random problems (2026-11-27)
# Of a pair of CTAs against one CTA with this tile: where it takes whole heads, whose K and V then stay in L2
# (grid.hpp), by head_dim, and elsewhere; where rows are unaligned, on top of sharing the loads.
_PAIR_GAIN = {96: 0.929, 128: 0.927, 160: 0.93, 192: 0.928, 256: 0.88}
_PAIR_LOSS = 1.1
_UNALIGNED_PAIR_LOSS = 1.02
_ROOM_FOR_TWO_Q = 226 << 10  # bytes, with O apart
_WAITING_FOR_Q_CYCLES = 430  # of a tile in full attention where Q has one buffer
_PAIR_KEYS = range(257, 1025)
_WHOLE_HEADS_BYTES = 44 << 20
# Of split kernels: waves of CTAs that are tried; a block, by consumers, and one of a full card; leaving parts
# and the second launch; what an SM writes and reads of parts. From 52 problems with many numbers of splits on
# an H200 (benchmarks/splits.py, 2026-11-27).
MOST_WAVES = 5
_MOST_SPLITS = 64
_SPLIT_LOSS = {2: 1.01, 3: 1.0}
_FULL_CARD_LOSS_OF_SPLITS = 0.0511
_MEETING_CYCLES = 4080
_PART_BYTES_PER_CLOCK = 4.57
_DRAM_BYTES_PER_CLOCK = 17.93  # into an SM


class FmhaFwdSm90(Model):
    """Equal tiles are dealt out to the SMs at once. Causal ones are too where they are short, or start as SMs
    become free, the longest first: either way the SMs end nearly together.
    """

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, device)
        consumers = kernel.block_m // _WARPGROUP_ROWS
        mma = consumers * kernel.block_n * kernel.head_dim * _MMA_CLOCKS
        ex2 = consumers * kernel.block_n * _EX2_CLOCKS
        self._ctas = kernel.ctas_per_sm
        self._cluster = kernel.detail("cluster", 1)
        exposed = _EXPOSED[consumers] * max(1 - _HIDDEN_BY_MMA[consumers] * (mma / ex2 - 1), 0)
        if self._ctas == 2:
            exposed = _EXPOSED_OF_TWO
        self._block = mma + min(exposed, 1) * ex2
        self._alone = (mma + _EXPOSED_ALONE * ex2) / self._block if self._ctas == 2 else 1.0
        if kernel.head_dim % 32 and problem.mask is None and not problem.has_dropout:
            self._block *= _NARROW_LOSS[consumers]
        self._is_limited = problem.is_causal or problem.window is not None
        if self._is_limited:
            self._block *= _CAUSAL_LOSS
        scores = kernel.block_m * kernel.block_n  # of a block
        self._loads = 0.0  # of a block, in clocks
        self._mask_wait = self._hidden_wait = 0.0  # of a block; what a full card hides of that
        if problem.mask is not None:
            is_padding = problem.mask is MaskType.BOOL and problem.mask_has_one_row
            alu = _ONE_ROW_ALU_PER_SCORE if is_padding else _MASK_ALU_PER_SCORE[problem.mask]
            reads_runs = problem.reads_mask_by(RUNS[kernel.family.value])
            if not reads_runs:
                alu += _UNALIGNED_ALU_PER_SCORE[problem.mask]
            elif problem.mask.itemsize > 1 and problem.mask_alignment < MASK_ALIGNMENT:
                alu += _APART_ALU_PER_SCORE
            self._block += scores * alu / _ALU_PER_CLOCK
            if is_padding:
                self._block += _ONE_ROW_BLOCK_CYCLES
            else:
                self._mask_wait = _MASK_WAIT
                self._hidden_wait = _MASK_WAIT_HIDDEN * _MASK_WAIT
                if reads_runs and not mask_stays_in_l2(problem, device):
                    self._mask_wait += _DRAM_MASK_WAIT
                    share = _MASK_WAIT_HIDDEN if problem.mask.itemsize > 1 else 1.0
                    self._hidden_wait += share * _DRAM_MASK_WAIT
            read = kernel.block_n if is_padding else scores
            loaded = read * problem.mask.itemsize + 4 * kernel.block_n * kernel.head_dim
            self._loads = loaded / _L2_BYTES_PER_CLOCK
        if problem.has_dropout:
            self._block += scores * _DROPOUT_ALU_PER_SCORE / _ALU_PER_CLOCK + _DROPOUT_BLOCK_CYCLES
        self._tile = float(_TILE_CYCLES[consumers] if self._ctas == 1 else _TILE_CYCLES_OF_TWO)
        self._tile += _WIDE_TILE_CYCLES * max(kernel.head_dim - 128, 0)
        has_short_tiles = consumers == 2 and self._ctas == 1 and kernel.head_dim <= 128
        self._one_block_saved = _ONE_BLOCK_CYCLES_SAVED if has_short_tiles else 0
        q_bytes = 2 * kernel.block_m * kernel.head_dim
        kv_bytes = 4 * kernel.stages * kernel.block_n * kernel.head_dim
        is_full = not (problem.causal or kernel.is_general)
        if is_full and kernel.head_dim <= 128 and 3 * q_bytes + kv_bytes > _ROOM_FOR_TWO_Q:
            self._tile += _WAITING_FOR_Q_CYCLES
        self._tile_in_turn = float(_TILE_CYCLES[consumers])
        if kernel.is_general:
            self._tile += _GENERAL_TILE_CYCLES[consumers]
            self._tile_in_turn += _GENERAL_TURN_CYCLES[consumers]
        self._longest_causal_in_turn = _LONGEST_CAUSAL_IN_TURN[consumers]
        has_window = problem.window is not None
        self._window_cycles = _WINDOW_KEY_CYCLES[consumers] * kernel.block_n if has_window else 0.0
        self._may_take_turns = kernel.is_general and problem.mask is None and not problem.has_lengths
        if self._may_take_turns:
            self._block *= _GENERAL_LOSS
        self._first = _FIRST_CYCLES[consumers] + 2 * kernel.block_n * kernel.head_dim / _BYTES_PER_FIRST_CYCLE
        if kernel.is_general:
            self._first += _GENERAL_FIRST_CYCLES[consumers]
        self._is_unaligned = bool(problem.head_dim % _SECTOR_COLUMNS or problem.head_dim_v % _SECTOR_COLUMNS)
        columns = math.gcd(kernel.head_dim, 64)
        if self._is_unaligned:
            unaligned = 4 * kernel.block_n * kernel.head_dim / _UNALIGNED_BYTES_PER_CLOCK[columns]
            self._loads = max(self._loads, unaligned / self._cluster)
        elif columns == _SECTOR_COLUMNS:
            narrow = 4 * kernel.block_n * kernel.head_dim / _NARROW_BYTES_PER_CLOCK
            self._loads = max(self._loads, narrow / self._cluster)
        self._full_card_loss = _FULL_CARD_LOSS + (_UNALIGNED_LOSS if self._is_unaligned else 0)
        rates = _UNALIGNED_Q_BYTES_PER_CLOCK if self._is_unaligned else _Q_BYTES_PER_CLOCK
        self._row_cycles = 2 * (problem.head_dim + problem.head_dim_v) / rates[columns]  # of Q and O
        # There is a split kernel for each multiple of 64 columns, in the longest pieces; others have more.
        self._is_narrow = kernel.head_dim <= ceil_div(max(problem.head_dim, problem.head_dim_v), 64) * 64
        self._row_bytes = 2 * (problem.head_dim + problem.head_dim_v)  # of K and V, or of Q and O
        self._factors = factors(kernel, problem, device)
        self.rows_of_a_price = _ROWS_OF_A_PRICE
        self.keys_of_a_price = KEYS_OF_A_PRICE

    def cost(self, problem: Problem) -> tuple[float, int]:
        kernel, sms = self.kernel, self.device.sms
        heads = problem.batch * problem.num_heads_q
        priced_rows = ceil_div(problem.seqlen_q, _ROWS_OF_A_PRICE) * _ROWS_OF_A_PRICE
        tiles: float = self._m_blocks(problem) * heads
        few_rows = 2 * problem.seqlen_q <= kernel.block_m
        sizes = (tiles <= sms) + 2 * (problem.seqlen_k <= FEW_KEYS) + 4 * few_rows
        sizes += 8 * (problem.seqlen_k <= FEWEST_KEYS) + 16 * (problem.seqlen_k <= HARDLY_ANY_KEYS)
        blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
        used = min(priced_rows * heads / tiles, kernel.block_m)  # rows of a tile, on average
        if problem.has_lengths:  # sequences end anywhere in their last tile and block
            priced_keys = ceil_div(problem.seqlen_k, KEYS_OF_A_PRICE) * KEYS_OF_A_PRICE
            tiles = min(tiles, (priced_rows / kernel.block_m + 0.5) * heads)
            blocks = min(blocks, priced_keys / kernel.block_n + 0.5)
        load = min(tiles / sms, 1)
        working = 1.0
        takes_turns = self._takes_turns(problem)
        if kernel.is_general and not problem.has_lengths:
            idle = -priced_rows % kernel.block_m // _WARPGROUP_ROWS  # consumers of a head's last tile
            working -= _IDLE_SAVES[takes_turns] * idle * heads / tiles
        alone = self._alone if tiles <= sms else 1.0
        computing = self._block + self._mask_wait - self._hidden_wait * load
        block = max(working * alone * computing * (1 + self._full_card_loss * load), self._loads * load)
        crossing = self._row_cycles * used * load
        rows = rows_of_tiles(problem, kernel.block_m, 1)
        tile = longest = blocks * block
        if rows is not None:
            tile = rows.all_rounds(kernel.block_n) / rows.count * block
            longest = rows.rounds(0, kernel.block_n) * block
            if self._ctas == 2 and tiles > sms:  # the longest shares its SM, and is alone in the end
                beside = rows.rounds(int(sms * rows.count // tiles), kernel.block_n) * block
                longest = 2 * beside + (longest - beside) * self._alone
        if tile == longest or problem.window is not None:  # all are equal, or nearly
            together = self._ctas if tiles > sms * self._ctas else 1
            rounds: float = math.ceil(tiles / sms / together) * together
        else:
            rounds = max(tiles / sms, 1)
        tile += self._window_cycles
        longest += self._window_cycles
        between = (self._tile_in_turn if takes_turns else self._tile) + crossing
        if blocks == 1:
            between -= self._one_block_saved
        if self._ctas == 2 and blocks <= 2 and rows is not None:
            between += _SHORT_CAUSAL_TILE_CYCLES
        dealt = rounds * tile + (rounds - 1) * between
        if rows is not None and tile != longest and self._ctas == 1 and tiles > sms:
            # Some SM has as many tiles as this, each no shorter than the longest of the last ones.
            full = math.ceil(tiles / sms) - 1
            last = rows.rounds(int(full * sms * rows.count // tiles), kernel.block_n) * block
            dealt = max(dealt, (full + 1) * last + full * between)
        cost = LAUNCH_CYCLES + self._first + crossing + max(dealt, longest)
        cost *= self._pair_factor(problem)
        moved = problem.num_heads_q * problem.seqlen_q + problem.num_heads_kv * problem.seqlen_k  # rows
        if self._row_bytes * problem.batch * moved > self.cached_bytes:
            cost = beside_dram(cost, self.dram_cycles(problem, _DRAM_BYTES_PER_CLOCK))
        num_splits = int(kernel.is_split)
        if kernel.is_split and self._is_narrow:
            cost, num_splits = min((cost, 1), self._cost_of_splits(problem))
        return self._factors[sizes] * cost, num_splits

    def _cost_of_splits(self, problem: Problem) -> tuple[float, int]:
        """Of the numbers of CTAs for each tile with which some waves are full, the one that costs least.

        Infinite where tiles are too many, or keys too few; causal tiles that fill a card are dealt out evenly
        as they are.
        """
        kernel, sms = self.kernel, self.device.sms
        tiles = self._m_blocks(problem) * problem.batch * problem.num_heads_q
        rows = rows_of_tiles(problem, kernel.block_m, 1)
        longest = rows.rounds(0, kernel.block_n) if rows else ceil_div(problem.seqlen_k, kernel.block_n)
        mean = rows.all_rounds(kernel.block_n) / rows.count if rows else float(longest)
        if tiles > sms and 4 * mean < 3 * longest:
            return math.inf, 1
        priced_rows = ceil_div(problem.seqlen_q, _ROWS_OF_A_PRICE) * _ROWS_OF_A_PRICE
        used = min(priced_rows, kernel.block_m)
        idle = -priced_rows % kernel.block_m // _WARPGROUP_ROWS
        working = 1 - _IDLE_SAVES[False] * idle / ceil_div(priced_rows, kernel.block_m)
        dram = self.dram_cycles(problem, _DRAM_BYTES_PER_CLOCK)
        computing = self._block + self._mask_wait - self._hidden_wait
        split_block = working * computing * _SPLIT_LOSS[kernel.block_m // _WARPGROUP_ROWS]
        best, least = 1, math.inf
        for waves in range(1, MOST_WAVES + 1):
            most = min(waves * sms // tiles, longest, _MOST_SPLITS)
            if most < 2:
                continue
            share = ceil_div(longest, most)
            num_splits = ceil_div(longest, share)
            ctas = tiles * num_splits
            load = min(ctas / sms, 1)
            block = max(split_block * (1 + _FULL_CARD_LOSS_OF_SPLITS * load), self._loads * load)
            crossing = self._row_cycles * used * load
            dealt = share * block
            if ctas > sms:  # in waves, the more so the more equal the tiles are
                rounds = ctas / sms
                rounds += (math.ceil(rounds) - rounds) * max(2 * mean / longest - 1, 0)
                dealt = max(
                    dealt, rounds * mean / num_splits * block + (rounds - 1) * (self._tile + crossing)
                )
            parts = 4 * kernel.head_dim * used * ctas / (_PART_BYTES_PER_CLOCK * sms)
            cost = LAUNCH_CYCLES + max(self._first + crossing + dealt, dram) + _MEETING_CYCLES + parts
            if cost < least:
                best, least = num_splits, cost
        return least, best

    def may_split(self, rows: int, heads: int) -> bool:
        tiles = ceil_div(rows, self.kernel.block_m) * heads
        return self.kernel.is_split and self._is_narrow and 2 * tiles <= MOST_WAVES * self.device.sms

    def _takes_turns(self, problem: Problem) -> bool:
        """Whether a general kernel's CTAs take several tiles, as launch.cuh decides."""
        if not self._may_take_turns:
            return False
        if problem.window is None:
            return not problem.is_causal or problem.seqlen_k <= self._longest_causal_in_turn
        left, right = problem.window
        return min(left, right) >= 0 and left + right + self.kernel.block_m <= _LONGEST_WINDOW_IN_TURN

    def leaves_rows_out(self, seqlen_q: int) -> bool:
        is_general = self.kernel.is_general and not self.kernel.is_split  # there is one of either kind
        return is_general and -seqlen_q % self.kernel.block_m >= _WARPGROUP_ROWS

    def _m_blocks(self, problem: Problem) -> int:
        """CTAs of a head; those of a cluster come together."""
        return ceil_div(problem.seqlen_q, self.kernel.block_m * self._cluster) * self._cluster

    def _pair_factor(self, problem: Problem) -> float:
        """Of a pair, on top of the loads that its CTAs share. Grouped heads, and heads that are few for the
        pairs that run at once, have keys that stay in L2 without.
        """
        if self._cluster == 1:
            return 1
        if self._is_unaligned:
            return _UNALIGNED_PAIR_LOSS
        heads, at_once = problem.batch * problem.num_heads_q, self.device.sms // self._cluster
        last = heads % at_once
        takes_whole_heads = (
            problem.is_causal
            and problem.seqlen_k in _PAIR_KEYS
            and (last == 0 or 3 * last >= 2 * at_once)
            and at_once * 4 * problem.seqlen_k * self.kernel.head_dim <= _WHOLE_HEADS_BYTES
        )
        was_measured = (
            heads >= at_once
            and problem.num_heads_q == problem.num_heads_kv
            and 4 * problem.head_dim > 3 * self.kernel.head_dim
        )
        gain = _PAIR_GAIN.get(self.kernel.head_dim)
        return gain if gain is not None and takes_whole_heads and was_measured else _PAIR_LOSS

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        kernel = self.kernel
        heads = problem.batch * problem.num_heads_q
        m_blocks = self._m_blocks(problem)
        blocks: float = ceil_div(problem.seqlen_k, kernel.block_n)
        rows = rows_of_tiles(problem, kernel.block_m, 1)
        if rows is not None:
            blocks = rows.all_rounds(kernel.block_n) / rows.count
        computed = blocks * m_blocks * kernel.block_m * kernel.block_n
        return m_blocks * heads * max(num_splits, 1), problem.visible_scores / max(computed, 1)
