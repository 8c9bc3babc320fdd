"""What a row of the baseline is: `Unfused`, and the resources of its first GEMM.

Its GEMMs take head_dim at run time, so a unit holds all head_dims of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, Accuracy, DType, Kernel, Op, Takes, Tile, ceil_div

BLOCK_K = 32  # the inner dimension of one step of the first GEMM
OTHER_REGISTERS = 64  # of a thread, next to its accumulators: addresses, fragments


@dataclass(frozen=True, kw_only=True)
class Unfused(Kernel):
    """A launch of two GEMMs with a softmax between them, for one head_dim, causal or not."""

    family: ClassVar[str] = "unfused"
    op: ClassVar[Op] = Op.FORWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)
    measured: ClassVar[str] = "one CTA of the first GEMM"

    tile: Annotated[Tile, "_"]
    dtype: Annotated[DType, "_"]
    causal: Annotated[bool, "_causal"] = False

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy.ROUNDED_LOGITS

    @property
    def takes(self) -> Takes:
        return Takes.UNDROPPED | (Takes.CAUSAL if self.causal else Takes.FULL)

    @property
    def group(self) -> str:
        return f"{self.family}_{self.arch.value}_{self.tile.name}"

    @property
    def smem_bytes(self) -> int:
        return self.tile.stages * (self.tile.block_m + self.tile.block_n) * BLOCK_K * ELEMENT_BYTES

    @property
    def accumulator_registers(self) -> int:
        return ceil_div(self.tile.block_m * self.tile.block_n, self.tile.threads)

    @property
    def registers(self) -> int:
        return self.accumulator_registers + OTHER_REGISTERS
