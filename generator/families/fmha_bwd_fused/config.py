"""What a fused backward kernel is: `FmhaBwdFused`, the functions it is compiled into, and the resources of
its CTA.

A CTA owns `block_n` keys and goes through query rows in steps of `block_m`. The C++ headers compute shared
memory by themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, DType, Function, Kernel, Op, Takes, Tile, ceil_div
from generator.families.fmha_bwd.config import DROPOUT_REGISTERS, OTHER_REGISTERS, STATISTICS_BYTES
from generator.families.fmha_fwd.config import MMA_M


@dataclass(frozen=True, kw_only=True)
class FmhaBwdFused(Kernel):
    """One backward kernel: every head_dim up to its own, causal or not, lengths and windows at run time.

    It takes no masks and no biases: `fmha_bwd` does.
    """

    family: ClassVar[str] = "fmha_bwd_fused"
    op: ClassVar[Op] = Op.BACKWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)

    tile: Annotated[Tile, "_"]
    dtype: Annotated[DType, "_"]
    dropout: Annotated[bool, "_dropout"] = False

    @property
    def takes(self) -> Takes:
        takes = Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.SMALLER_HEAD_DIM
        takes |= Takes.DROPOUT if self.dropout else Takes.UNDROPPED
        return takes | Takes.WINDOW | Takes.SINKS

    @property
    def functions(self) -> tuple[Function, ...]:
        """One for all gradients, one that rounds the sums of dQ, and one that makes the row statistics."""
        words = ("", "_convert", "_statistics")
        return tuple(Function(symbol=self.name + word, cpp_mask="false") for word in words)

    # ---- resources of one CTA ----

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: K and V, the stages of Q, dO and row statistics, and dS."""
        tile = self.tile
        row_bytes = self.head_dim * ELEMENT_BYTES
        streamed = tile.stages * tile.block_m
        operands = 2 * (tile.block_n + streamed) * row_bytes
        return operands + streamed * STATISTICS_BYTES + tile.block_m * tile.block_n * ELEMENT_BYTES

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold dK and dV, and S and dP or a tile of dQ next to what it was."""
        tile = self.tile
        owned = ceil_div(tile.block_n, MMA_M * tile.warps)
        dq = 2 * ceil_div(tile.block_m * self.head_dim, tile.threads)
        return owned * self.head_dim + max(owned * tile.block_m, dq)

    @property
    def registers(self) -> int:
        """An estimate for one thread. Not capped."""
        return self.accumulator_registers + OTHER_REGISTERS + (DROPOUT_REGISTERS if self.dropout else 0)
