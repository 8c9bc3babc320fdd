"""What a cost model answers, and what those of all families share: `Model`, `Estimate`.

A key cache that grows asks for a price with every token. So a `Model` holds what follows from the kernel, the
card and `Problem.kind`, and `cost` adds what the sizes say. What counts is the ranking of all kernels that
compete, whatever their family: the cycles are those of one clock, CLOCK_GHZ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

CLOCK_GHZ = 1.75  # of the fits; other clocks scale all times alike
LAUNCH_CYCLES = 1500
CTA_CYCLES = 3500  # first loads, last stores
SMEM_BYTES_PER_CLOCK = 128
L2_BYTES_PER_CLOCK = 64
SMEM_PER_CTA = 1024  # that a CTA takes beyond what it asks for
KEYS_OF_A_PRICE = 16  # divides every block_n
OVERLAP_LOSS = (
    0.389  # share of the less busy units' time that is not hidden: a fit on an H200, see fmha_fwd.py
)

_MASK_SHARE_OF_L2 = 0.25
_NEARNESS = 8  # 130 decoding problems with many numbers of splits, and 1256 random ones (H200, 2026-11-29)


def microseconds(cycles: float, dram_us: float, clock_ghz: float) -> float:
    """What a kernel takes at a clock: `cycles` of the SMs, or a launch and the time of the DRAM."""
    return max(cycles, LAUNCH_CYCLES + clock_ghz * 1e3 * dram_us) / (clock_ghz * 1e3)


def overlapping(units: Sequence[float], loss: float = OVERLAP_LOSS) -> float:
    """Cycles of units that work side by side: the busiest one's, and of the others the share `loss`."""
    busiest = max(units)
    return busiest + loss * (sum(units) - busiest)


def beside_dram(cycles: float, dram: float) -> float:
    """Cycles of SMs that take `cycles` and of a DRAM that takes `dram`: a little more than either where these
    are near.
    """
    return cycles if not dram else (cycles**_NEARNESS + dram**_NEARNESS) ** (1 / _NEARNESS)


def mask_stays_in_l2(problem: Problem, device: DeviceInfo) -> bool:
    """Whether a mask takes so little of the L2 cache that what is read beside it does not drive it out."""
    itemsize = problem.mask.itemsize if problem.mask else 0
    return itemsize * problem.mask_elements <= _MASK_SHARE_OF_L2 * device.l2_bytes


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Estimate:
    """CTAs, waves of them over the card, the share of computed scores that are needed, and the time.

    `cycles` are those of the SMs, by which kernels are ranked. `microseconds` are theirs, and no fewer than a
    launch and `dram_us`, in which inputs and output cross DRAM: the same for every kernel.
    `num_splits`: CTAs that should share the keys of a tile; 0 for kernels that cannot.
    `leaves_rows_out`: as `Model.leaves_rows_out` says.
    """

    ctas: int
    waves: float
    useful: float
    cycles: float
    microseconds: float
    dram_us: float = 0.0
    num_splits: int = 0
    leaves_rows_out: bool = False


class Model(ABC):
    """One kernel on one card, for the problems of one kind: all but their sizes is settled."""

    def __init__(self, kernel: KernelInfo, device: DeviceInfo) -> None:
        self.kernel = kernel
        self.device = device
        self.cached_bytes = device.l2_bytes if device.dram_gbps else math.inf
        """Inputs and outputs that cross no DRAM, or none whose rate is known."""
        self.keys_of_a_price = 1
        """Problems that differ in seqlen_k alone cost the same where it rounds up to the same multiple of
        this: without a causal mask, with one offset, and where each row sees every key."""
        self.rows_of_a_price = 1
        """The same of seqlen_q, and of the rows of all query heads of a key head, where these are no fewer;
        under a causal mask where the last key that a row sees rounds up alike as well, without a window."""

    @abstractmethod
    def cost(self, problem: Problem) -> tuple[float, int]:
        """Cycles, and the CTAs that should share the keys of a tile: 0 for kernels that cannot."""

    def dram_cycles(self, problem: Problem, bytes_per_clock: float | None = None) -> float:
        """In which its inputs and output cross the DRAM, at most `bytes_per_clock` of them to an SM; 0 where
        the L2 cache holds them.
        """
        moved = problem.bytes
        cycles = self.device.dram_us(moved) * CLOCK_GHZ * 1e3
        if not cycles or bytes_per_clock is None:
            return cycles
        return max(cycles, moved / (bytes_per_clock * self.device.sms))

    def may_split(self, rows: int, heads: int) -> bool:
        """False where `cost` answers that no CTAs share a tile: asked first, for it takes less time.

        `heads` are the key heads of all batches, `rows` those of all query heads of one of them.
        """
        return False

    def leaves_rows_out(self, seqlen_q: int) -> bool:
        """Whether a general kernel does not compute some rows of its last tile that plain ones do."""
        return False

    def outclasses(self, other: Model) -> bool:
        """Whether `other` costs no less, whatever the sizes. May say no where it does."""
        return False

    @abstractmethod
    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        """CTAs, and the share of the scores that they compute which is needed."""

    def estimate(self, problem: Problem) -> Estimate:
        """All that there is to say about `problem`."""
        cycles, num_splits = self.cost(problem)
        ctas, useful = self.grid(problem, num_splits)
        waves = ctas / (self.device.sms * self.kernel.ctas_per_sm)
        dram_us = self.device.dram_us(problem.bytes)
        return Estimate(
            ctas=ctas,
            waves=waves,
            useful=useful,
            cycles=cycles,
            microseconds=microseconds(cycles, dram_us, CLOCK_GHZ),
            dram_us=dram_us,
            num_splits=num_splits,
            leaves_rows_out=self.leaves_rows_out(problem.seqlen_q),
        )
