"""What a quantised kernel of Hopper costs: the pass over K and V of fmha_fwd_q8, then tiles of wgmma.

Cycles of an SM for 64 query rows and a block of keys, and for the beginning and the end of a tile, fitted to
1024 to 16384 keys (benchmarks/results/quantised/2026-11-28-h100.json): what lies between the products bounds
them, so they hardly follow head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fmha_fwd_q8 import FmhaFwdQ8

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

_WARPGROUP_ROWS = 64
_BLOCK_CYCLES = {64: 513, 128: 820}  # by head_dim, for a warpgroup's rows
_TILE_CYCLES = {64: 8000, 128: 11000}


class FmhaFwdQ8Sm90(FmhaFwdQ8):
    """Tiles dealt out to the SMs, one on each, behind the pass that makes their bytes."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, problem, device)
        self._resident = 1
        self._tile_cycles = _TILE_CYCLES[kernel.head_dim]

    def _block_cycles(self, problem: Problem) -> float:
        return _BLOCK_CYCLES[self.kernel.head_dim] * self.kernel.block_m / _WARPGROUP_ROWS
