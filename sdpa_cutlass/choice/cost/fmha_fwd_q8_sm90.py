"""What a quantised kernel of Hopper costs: the pass over K and V of fmha_fwd_q8, then tiles of wgmma.

Cycles of an SM for 64 query rows and a block of keys, and for the beginning and the end of a tile, fitted to
1024 to 16384 keys (benchmarks/results/quantised/2026-11-28-h100.json). What lies between the products bounds
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .quantised import INT8_PASS_BYTES, TilesBehindAPass

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

_WARPGROUP_ROWS = 64
_BLOCK_CYCLES = {64: 513, 128: 820}  # by head_dim, for a warpgroup's rows
_TILE_CYCLES = {64: 8000, 128: 11000}


class FmhaFwdQ8Sm90(TilesBehindAPass):
    """Tiles of wgmma, one on each SM."""

    def __init__(self, kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(kernel, problem, device, pass_bytes=INT8_PASS_BYTES)
        self._block = _BLOCK_CYCLES[kernel.head_dim] * kernel.block_m / _WARPGROUP_ROWS
        self._tile = _TILE_CYCLES[kernel.head_dim]
