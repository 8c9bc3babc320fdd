"""What the cost models predict for cards that need not be here. Predictions, never measurements.

The models (choice/cost/) count clocks, of which they take 1.75 a nanosecond on every card: that is how
they were fitted on an H200. They know a card by its SMs, its rate of mma.sync, its shared memory, its L2
cache and the bandwidth of its DRAM. `floor_us` is physical: the larger of FLOPs over the peak of 16-bit
products with float32 sums at the boost clock, and the bytes that the L2 cache cannot hold over the DRAM's
bandwidth. A prediction is never below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sdpa_cutlass.choice.cost import Estimate, estimate
from sdpa_cutlass.choice.cost.model import microseconds
from sdpa_cutlass.choice.legal import mismatches
from sdpa_cutlass.choice.select import families_with_plain, order
from sdpa_cutlass.cli.results import PROBLEM_KEYS, Row
from sdpa_cutlass.cli.roofline import DATASHEETS, problem_of
from sdpa_cutlass.cli.suites import Case, with_conditions
from sdpa_cutlass.library import device
from sdpa_cutlass.library.device import DeviceInfo, archs_serve
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A model of GPU: a name of roofline.DATASHEETS, and what the cost models ask of it."""

    name: str
    device: DeviceInfo

    @property
    def boost_ghz(self) -> float:
        """The boost clock of the datasheet."""
        return DATASHEETS[self.name].boost_mhz / 1e3

    @property
    def peak_tflops(self) -> float:
        """16-bit products with float32 sums at the boost clock: what exact kernels can reach."""
        sheet, own = DATASHEETS[self.name], self.device
        exact = own.sms * own.mma_flops_per_clock * self.boost_ghz / 1e3
        return min(exact, sheet.tflops) if own.compute_capability < (9, 0) else sheet.tflops

    def floor_us(self, row: Row) -> float:
        """The least microseconds with float32 sums; inputs lie in the L2 cache as far as they fit."""
        problem, sheet = problem_of(row), DATASHEETS[self.name]
        flops = 4 * row.batch * row.num_heads_q * problem.visible_scores * row.head_dim * row.visible
        from_dram = max(0.0, problem.bytes * row.visible - self.device.l2_bytes)
        return max(flops / self.peak_tflops / 1e6, from_dram / sheet.dram_gbps / 1e3)


L4 = Card(name="L4", device=device.L4)
RTX_4090 = Card(name="RTX 4090", device=device.RTX_4090)
H200 = Card(
    name="H200",
    device=DeviceInfo(
        target=Target.CUDA,
        index=0,
        name="NVIDIA H200",
        compute_capability=(9, 0),
        sms=132,
        mma_flops_per_clock=device.mma_flops_per_clock((9, 0), "NVIDIA H200"),
        l2_bytes=60 * 2**20,
        dram_gbps=DATASHEETS["H200"].dram_gbps,
    ),
)
CARDS = (L4, RTX_4090, H200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the choice would run on a card, and how long that should take."""

    kernel: KernelInfo
    estimate: Estimate
    floor_us: float
    boost_ghz: float

    @property
    def microseconds(self) -> float:
        """At the models' clock."""
        return max(self.estimate.microseconds, self.floor_us)

    @property
    def microseconds_at_boost(self) -> float:
        """The same clocks at the card's boost clock, which it cannot always hold."""
        found = self.estimate
        return max(microseconds(found.cycles, found.dram_us, self.boost_ghz), self.floor_us)


def predict(rows: Iterable[KernelInfo], row: Row, card: Card) -> Prediction | None:
    """The kernel among `rows` that the cost models choose on `card` for the problem of a result's `row`.

    None when no kernel is legal. Looks at what registry rows say, not at strides and alignment, and at no
    tuned table. The floor counts what causal masks and lengths leave.
    """
    problem, device = problem_with_masks(row), card.device
    found = [
        (kernel, estimate(kernel, problem, device))
        for kernel in rows
        if kernel.serves(Family.FMHA_FWD) and runs_on(kernel, device) and not mismatches(kernel, problem)
    ]
    if not found:
        return None
    plain = families_with_plain(kernel for kernel, _ in found)
    kernel, cost = min(found, key=lambda pair: order(pair[0], pair[1], problem, plain))
    floor = card.floor_us(row)
    return Prediction(kernel=kernel, estimate=cost, floor_us=floor, boost_ghz=card.boost_ghz)


def row_of(case: Case, dtype: str = "f16") -> Row:
    """A case as the row of a result that nobody measured."""
    known = {key: getattr(case, key) for key in PROBLEM_KEYS if hasattr(case, key)}
    known |= {"dtype": dtype, "alignment": case.alignment.value, "visible": 1.0}
    return Row(**known, provider="fused")


def problem_with_masks(row: Row) -> Problem:
    """The problem of a row as the choice of kernels sees it."""
    return with_conditions(problem_of(row), row.mask, row.p_dropout)


def runs_on(kernel: KernelInfo, device: DeviceInfo) -> bool:
    """Whether a library with machine code or PTX for `kernel.arch` runs it on `device`."""
    if kernel.is_for_one_arch:
        return archs_serve(kernel.code, device.compute_capability)
    major, minor = device.compute_capability
    return kernel.arch <= 10 * major + minor
