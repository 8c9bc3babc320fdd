"""What a kernel that merges partial results is: `Combine`, its element types, and the resources of its CTA.

It multiplies no matrices and shares no memory: each thread has eight columns of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import Cta, ElementType, Function, Kernel, Op, Takes

VECTOR = 8  # columns of a thread
OTHER_REGISTERS = 40  # of a thread, next to its row and the parts in flight: addresses, weights


class PartType(ElementType):
    """The element type of the parts; the result's is known at run time."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is PartType.F32 else 2


@dataclass(frozen=True, kw_only=True)
class CombineTile(Cta):
    """A CTA has as many whole rows as its threads can hold."""

    stages: Annotated[int, "s"]  # parts whose loads are in flight
    warps: Annotated[int, "_w"]  # of the CTA

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True, kw_only=True)
class Combine(Kernel):
    """One kernel for parts of one element type and every head_dim up to its own."""

    family: ClassVar[str] = "combine"
    op: ClassVar[Op] = Op.MERGE
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)

    tile: Annotated[CombineTile, "_"]
    dtype: Annotated[PartType, "_"]

    @property
    def takes(self) -> Takes:
        return Takes.SMALLER_HEAD_DIM

    @property
    def functions(self) -> tuple[Function, ...]:
        return (Function(symbol=self.name, cpp_mask=""),)

    # ---- resources of one CTA ----

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def accumulator_registers(self) -> int:
        """The thread's columns of the result, and of the parts in flight."""
        return VECTOR + self.tile.stages * VECTOR * self.dtype.itemsize // 4

    @property
    def registers(self) -> int:
        return self.accumulator_registers + OTHER_REGISTERS
