"""What a backward kernel is: `FmhaBwd`, the functions it is compiled into, and the resources of its CTA.

A launch has CTAs of two roles. Those that own `block_n` keys go through query rows in steps of `block_m`;
those that own `dq_block_m` query rows go through keys in steps of `dq_block_n`. Of a kernel with one stage,
those that own keys have two roles: some make dK, the others dV. The C++ headers compute shared memory by
themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, DType, Function, Kernel, Op, Takes, Tile, ceil_div
from generator.families.fmha_fwd.config import MMA_M

STATISTICS_BYTES = 8  # of a query row: LSE and delta

# What a thread holds next to its accumulators: addresses, row statistics, fragments.
OTHER_REGISTERS = 64

# The state of Philox, and the bits of a tile.
DROPOUT_REGISTERS = 16


@dataclass(frozen=True, kw_only=True)
class FmhaBwdTile(Tile):
    """How the CTAs of both roles divide their work; `block_m` and `block_n` are those of the keys role."""

    dq_block_m: Annotated[int, "_q"]  # query rows that a CTA of the rows role owns
    dq_block_n: Annotated[int, "k"]  # keys of one of its steps

    @property
    def splits_keys(self) -> bool:
        """dK and dV have CTAs of their own, so that a thread holds the sums of one of them."""
        return self.stages == 1

    def sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rows owned, rows of a step) of the keys role, and of the rows role."""
        return (self.block_n, self.block_m), (self.dq_block_m, self.dq_block_n)


@dataclass(frozen=True, kw_only=True)
class FmhaBwd(Kernel):
    """One backward kernel: every head_dim up to its own, causal or not, lengths and windows at run time."""

    family: ClassVar[str] = "fmha_bwd"
    op: ClassVar[Op] = Op.BACKWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)

    tile: Annotated[FmhaBwdTile, "_"]
    dtype: Annotated[DType, "_"]
    dropout: Annotated[bool, "_dropout"] = False

    @property
    def takes(self) -> Takes:
        takes = Takes.FULL | Takes.CAUSAL | Takes.BOOL | Takes.BIAS16 | Takes.BIAS32
        takes |= Takes.DROPOUT if self.dropout else Takes.UNDROPPED
        takes |= Takes.LENGTHS | Takes.PACKED | Takes.SMALLER_HEAD_DIM
        return takes | Takes.WINDOW | Takes.SINKS

    @property
    def functions(self) -> tuple[Function, ...]:
        """One without masks and one that takes them, or one for both; then the one that makes the gradient
        of a bias or its parts, the one that adds these up, and the last one makes the row statistics.

        What is `cpp_mask` elsewhere says here whether there may be a mask.
        """
        kinds = {"": "true"} if self.dropout else {"": "false", "_masked": "true"}
        kinds |= dict.fromkeys(("_dbias", "_dbias_sum", "_statistics"), "true")
        return tuple(Function(symbol=self.name + word, cpp_mask=has_mask) for word, has_mask in kinds.items())

    # ---- resources of one CTA ----

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the role that needs most: what is owned, and what streams by."""
        (keys, rows), (dq_rows, dq_keys) = self.tile.sides()
        stages, row_bytes = self.tile.stages, self.head_dim * ELEMENT_BYTES
        of_keys = 2 * (keys + stages * rows) * row_bytes + stages * rows * STATISTICS_BYTES
        of_rows = 2 * (dq_rows + stages * dq_keys) * row_bytes
        return max(of_keys, of_rows)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold the gradients, S and dP at once."""
        sums = (1 if self.tile.splits_keys else 2, 1)  # dK and dV, or one of them; dQ
        return max(
            ceil_div(owned, MMA_M * self.tile.warps) * (n * self.head_dim // 2 + streamed)
            for n, (owned, streamed) in zip(sums, self.tile.sides(), strict=True)
        )

    @property
    def registers(self) -> int:
        """An estimate for one thread. Not capped."""
        return self.accumulator_registers + OTHER_REGISTERS + (DROPOUT_REGISTERS if self.dropout else 0)
