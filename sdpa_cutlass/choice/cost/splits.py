"""How many CTAs of a split kernel should share the keys of a tile, and what it takes to merge their parts.

The CTA of a tile that arrives last merges them, or where they are large a second launch
(templates/include/sdpa/fmha_fwd/split.cuh). Tiles with KV groups are for few rows and bound by memory, so one
CTA keeps an SM busy. Others may come in several waves, which come out even where one would leave SMs idle. So
may tiles with KV groups whose keys come from the DRAM, where there are more than a third as many as SMs.
Fitted to decoding and random problems on an H200 and to those of
benchmarks/results/tuning/2026-11-26-h100-second-launch.json and benchmarks/results/splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .model import L2_BYTES_PER_CLOCK, ceil_div

if TYPE_CHECKING:
    from ...library.registry import KernelInfo

MAX_SPLIT_TILES = 1024  # SDPA_MAX_SPLIT_TILES
MERGED_BY_LAST_CTA = 32 << 10  # bytes of a tile's parts: kMergedByLastCta of launch.cuh
MOST_WAVES = 4
MOST_EVEN_WAVES = 3  # of tiles with KV groups that leave SMs idle, or a few of them with more
_MAX_SPLITS = 64
_SPLIT_CYCLES = 2710  # partial results to memory, and a counter
_PART_VECTOR_BYTES = 16  # of a partial result, read by a thread at a time
_PARTS_PER_TRIP = 16  # partial results whose reads are under way together
_TRIP_CYCLES = 470
_PART_CYCLES = 0.659  # for an element of O that is left in memory and read again
_MERGE_LAUNCH_CYCLES = 5170
_PART_BYTES_PER_CLOCK = 8.74  # of an SM, left by one launch and read by the next
_UNEVEN_LOSS = 1.3  # of rounds on the SMs that have most (36 decoding problems on an H200, 2026-11-28)


def meeting_cycles(kernel: KernelInfo, rows: int, num_splits: int) -> float:
    """What it takes the splits of a tile to leave their parts and the last one to read them."""
    if num_splits < 2:
        return 0.0
    vectors = 4 * rows * kernel.head_dim // _PART_VECTOR_BYTES
    part = _PART_VECTOR_BYTES * kernel.threads / L2_BYTES_PER_CLOCK
    trips = ceil_div(num_splits, _PARTS_PER_TRIP)
    merging = ceil_div(vectors, kernel.threads) * (num_splits * part + trips * _TRIP_CYCLES)
    return _SPLIT_CYCLES + merging + _PART_CYCLES * rows * kernel.head_dim


def merges_in_second_launch(kernel: KernelInfo, rows: int, num_splits: int) -> bool:
    """Whether the parts of a tile of `rows` rows are too many bytes for its last CTA: as launch.cuh says."""
    return num_splits > 1 and 4 * rows * kernel.head_dim * num_splits > MERGED_BY_LAST_CTA


class Splits:
    """Numbers of splits of one kernel on one card.

    `resident`: CTAs that an SM has room for. `round_cycles`: of a round, by the CTAs that share an SM.
    `later_ends`: cycles of the ends of a CTA of a later wave.
    """

    def __init__(
        self,
        kernel: KernelInfo,
        sms: int,
        resident: int,
        round_cycles: Sequence[float],
        later_ends: float,
    ) -> None:
        self._kernel, self._groups, self._sms = kernel, kernel.kv_groups, sms
        self._round, self._later_ends = round_cycles, later_ends
        self._room = resident
        self._resident, waves = (resident, MOST_WAVES) if kernel.kv_groups == 1 else (1, 1)
        self._at_once = sms * self._resident
        self._most = self._at_once * waves
        self._may_come_even = kernel.kv_groups > 1
        most = MOST_EVEN_WAVES * sms * resident if self._may_come_even else self._most
        self.most_tiles = min(most // 2, MAX_SPLIT_TILES)
        """Tiles that may be split."""
        self.most_cached_tiles = min(self._most // 2, MAX_SPLIT_TILES)
        """The same where their keys lie in the L2 cache."""
        self._part_cycles = 4 * kernel.head_dim / (_PART_BYTES_PER_CLOCK * sms)  # of a row
        self._meetings: dict[int, list[float]] = {}

    def choose(self, tiles: int, blocks: int, rows: int, dram: float) -> tuple[int, float]:
        """The CTAs for each tile of `rows` rows that should be fastest, and the cycles of their meeting.

        Of those numbers whose CTAs all run at once, or fill several waves, as far as every KV group keeps a
        block. `dram`: cycles that the DRAM takes for the keys; 0 where they lie in the L2 cache. Tiles are no
        more than `most_tiles`, and than `most_cached_tiles` there.
        """
        groups, sms = self._groups, self._sms
        if self._may_come_even and (3 if dram else 2) * tiles > sms:
            return self._choose_even(tiles, blocks, rows, dram)
        most = min(self._most // tiles, blocks // groups, _MAX_SPLITS)
        best, least, meeting = 1, self.rounds(tiles, 1, blocks), 0.0
        if most < 2:
            return best, meeting
        meetings = self._meetings_of(rows)
        met_by_last = min(self._at_once // tiles, most, len(meetings) - 1)
        shortest = -(-blocks // (most * groups)) * self._round[1]
        for num_splits in range(2, met_by_last + 1):
            between = meetings[num_splits]
            if shortest + between >= least:
                break  # meetings grow with their number
            rounds = -(-blocks // (num_splits * groups))
            cycles = rounds * self._round[-(-tiles * num_splits // sms)] + between
            if cycles < least:
                best, least, meeting = num_splits, cycles, between
        part_cycles = self._part_cycles * rows
        soonest = min([_MERGE_LAUNCH_CYCLES, *meetings[met_by_last + 1 : met_by_last + 2]])
        tried = max(met_by_last, 1)
        for ctas in range(sms, self._most + 1, sms):
            most_of_share = min(ctas // tiles, most)
            if most_of_share <= tried:
                continue
            if shortest + soonest >= least:
                break
            tried = most_of_share
            rounds = -(-blocks // (most_of_share * groups))
            num_splits = max(
                -(-blocks // (rounds * groups)), met_by_last + 1
            )  # the fewest with so many rounds
            if num_splits < len(meetings):
                between = meetings[num_splits]
            else:
                between = _MERGE_LAUNCH_CYCLES + tiles * num_splits * part_cycles
            if shortest + between >= least:
                continue
            cycles = self.rounds(tiles, num_splits, blocks) + between
            if cycles < least:
                best, least, meeting = num_splits, cycles, between
        return best, meeting

    def _choose_even(self, tiles: int, blocks: int, rows: int, dram: float) -> tuple[int, float]:
        """Of those numbers that make three waves at most, where tiles leave SMs idle or some have more."""
        groups = self._groups
        best, least, meeting = 1, self._read(tiles, -(-blocks // groups), dram), 0.0
        most = min(MOST_EVEN_WAVES * self._room * self._sms // tiles, blocks // groups, _MAX_SPLITS)
        for num_splits in range(2, most + 1):
            between = self.merging(tiles, rows, num_splits)
            cycles = self._read(tiles * num_splits, -(-blocks // (num_splits * groups)), dram) + between
            if cycles < least:
                best, least, meeting = num_splits, cycles, between
        return best, meeting

    def _read(self, ctas: int, rounds: int, dram: float) -> float:
        """Cycles of `ctas` CTAs that read equal parts of keys, for all of which the DRAM takes `dram`.

        Those of a last wave come where others end, so that they share SMs while some are idle.
        """
        at_once = self._room * self._sms
        waves, rest = divmod(ctas, at_once)
        share = min(self._room, rest) if waves else -(-rest // self._sms)
        cycles = max(_UNEVEN_LOSS * rounds * self._round[share], dram * rest / ctas) if rest else 0.0
        if waves:
            wave = max(_UNEVEN_LOSS * rounds * self._round[self._room], dram * at_once / ctas)
            cycles += waves * wave + (waves - (not rest)) * self._later_ends / self._room
        return cycles

    def rounds(self, tiles: int, num_splits: int, blocks: int) -> float:
        """Cycles of an SM's CTAs, where those of a tile share its blocks."""
        rounds = -(-blocks // (num_splits * self._groups))
        share = -(-tiles * num_splits // self._sms)
        if share <= self._resident:
            return rounds * self._round[share]
        full, rest = divmod(share, self._resident)
        later = (full - (not rest)) * self._later_ends / self._resident
        return rounds * (full * self._round[self._resident] + (self._round[rest] if rest else 0.0)) + later

    def merging(self, tiles: int, rows: int, num_splits: int) -> float:
        """Cycles until the parts of every tile are one."""
        meetings = self._meetings_of(rows)
        if num_splits < len(meetings):
            return meetings[num_splits]
        return _MERGE_LAUNCH_CYCLES + tiles * num_splits * (self._part_cycles * rows)

    def _meetings_of(self, rows: int) -> list[float]:
        """By the number of parts, as many as the last CTA of a tile merges."""
        meetings = self._meetings.get(rows)
        if meetings is None:
            most = min(MERGED_BY_LAST_CTA // (4 * rows * self._kernel.head_dim), _MAX_SPLITS)
            meetings = [meeting_cycles(self._kernel, rows, count) for count in range(max(most, 1) + 1)]
            self._meetings[rows] = meetings
        return meetings
