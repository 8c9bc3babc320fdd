"""What a GPU cannot be faster than: the floor under every measured time.

    floor = max(FLOPs / peak, DRAM bytes / bandwidth)

FLOPs are those that the mask lets through, counted exactly, at the rate of the GPU's fastest matrix
instruction. DRAM bytes are what must cross to DRAM in every call: of all the input sets that the calls rotate
over, as much as the L2 cache cannot hold. Both sides are the most that is possible, whoever computes, so a
time below the floor was not measured well. Peak and bandwidth are the vendor's (DATASHEETS); the peak is
scaled up where the driver allows a higher clock than the one it is stated for. A GPU that is not listed has
no floor.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.problem import Causal, DType, Problem

if TYPE_CHECKING:
    import torch

QUANTISED_FACTOR = 2  # 8-bit over 16-bit multiplication
COPY_BYTES = 2**30
COPY_REPEATS = 20
WARM_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasheet:
    """Dense float16 TFLOP/s (with the fastest accumulation) at `boost_mhz`, and DRAM bandwidth in GB/s."""

    tflops: float
    boost_mhz: int
    dram_gbps: float
    source: str


# By a part of the name that the driver gives the GPU; the first that fits.
DATASHEETS = {
    "H200": Datasheet(
        tflops=989.4, boost_mhz=1830, dram_gbps=4800, source="NVIDIA H200 Tensor Core GPU datasheet"
    ),
    "H100 PCIe": Datasheet(
        tflops=756.0, boost_mhz=1620, dram_gbps=2039, source="NVIDIA H100 Tensor Core GPU architecture"
    ),
    "H100 80GB HBM3": Datasheet(
        tflops=989.4, boost_mhz=1830, dram_gbps=3352, source="NVIDIA H100 Tensor Core GPU architecture"
    ),
    "A100-SXM4-80GB": Datasheet(
        tflops=312.0, boost_mhz=1410, dram_gbps=2039, source="NVIDIA A100 80GB datasheet"
    ),
    "L40S": Datasheet(tflops=362.1, boost_mhz=2520, dram_gbps=864, source="NVIDIA L40S datasheet"),
    "L4": Datasheet(tflops=121.0, boost_mhz=2040, dram_gbps=300, source="NVIDIA L4 datasheet"),
    "RTX 4090": Datasheet(
        tflops=330.3, boost_mhz=2520, dram_gbps=1008, source="NVIDIA Ada GPU architecture, appendix A"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one GPU can do at most: float16 TFLOP/s and DRAM GB/s; and the size of its L2 cache."""

    tflops: float
    dram_gbps: float
    l2_bytes: int
    source: str

    def floor_us(
        self, case: Case, input_sets: int, *, visible: float = 1.0, is_quantised: bool = False
    ) -> float:
        """The least microseconds of a call; `visible` is the share of the scores that a mask lets through."""
        full = dataclasses.replace(case, causal=False).problem().flops
        flops = full * case.seen * visible
        peak = self.tflops * (QUANTISED_FACTOR if is_quantised else 1)
        held = max(0.0, input_sets * case.problem().bytes * visible - self.l2_bytes)
        return max(flops / peak / 1e6, held / input_sets / self.dram_gbps / 1e3)


def ceilings_of(env: Mapping[str, Any]) -> Ceilings | None:
    """The ceilings of the GPU that a result's `env` describes; None when its model is not listed."""
    name = env.get("gpu") or ""
    # "L4" is not a part of "L40S": whole words only.
    found = next((sheet for key, sheet in DATASHEETS.items() if f" {key} " in f" {name} "), None)
    if found is None:
        return None
    clock = (env.get("clocks") or {}).get("start", {}).get("sm_max_mhz")
    factor = max(1.0, float(clock) / found.boost_mhz) if clock and clock.isdigit() else 1.0
    return Ceilings(
        tflops=found.tflops * factor,
        dram_gbps=found.dram_gbps,
        l2_bytes=env.get("l2_bytes") or 0,
        source=found.source,
    )


def problem_of(row: Row) -> Problem:
    """The problem of a row, as far as its FLOPs and bytes go."""
    return Problem(
        dtype=DType(row.dtype),
        batch=row.batch,
        num_heads_q=row.num_heads_q,
        num_heads_kv=row.num_heads_kv,
        seqlen_q=row.seqlen_q,
        seqlen_k=row.seqlen_k,
        head_dim=row.head_dim,
        causal=Causal(row.alignment) if row.causal else None,
    )


def gbps(row: Row) -> float | None:
    """q, k, v and out, each counted once, over the time: GB/s."""
    return problem_of(row).bytes / row.gpu_us / 1e3 if row.ok and row.gpu_us else None


def copy_bandwidth_gbps(device: torch.device) -> float | None:
    """GB/s, read and written bytes together, at which the GPU copies from one buffer to another.

    The median over copies of COPY_BYTES, or of what fits into a quarter of the free memory. None when there
    is not room for four times the L2 cache, for then it would not be DRAM that is measured.
    """
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    size = min(COPY_BYTES, free // 4)
    if size < 4 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0):
        return None
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy_ms() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    begin = time.monotonic()
    while time.monotonic() - begin < WARM_S:  # an idle GPU's clocks rise within some tenths of a second
        copy_ms()
    median_ms = statistics.median(copy_ms() for _ in range(COPY_REPEATS))
    return float(f"{2 * size / median_ms / 1e6:.5g}")
