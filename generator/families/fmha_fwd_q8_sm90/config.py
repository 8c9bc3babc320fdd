"""What a quantised forward kernel of Hopper is: `FmhaFwdQ8Sm90`, and the resources of its CTA.

A launch runs two functions, as in fmha_fwd_q8: `<name>_quantize` makes the bytes of K and V first. The C++
headers compute shared memory by themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, Accuracy, DType, Function, Kernel, Op, Takes, Tile, ceil_div
from generator.families.fmha_fwd.config import MaskKind
from generator.families.fmha_fwd_q8.config import Math
from generator.families.fmha_fwd_sm90.config import BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP_ROWS

# What the scales of a block of keys take, from one multiple of 128 bytes to another.
SCALE_BYTES = 640

# What a consumer's thread holds next to its accumulators: scales, row statistics, loop state.
OTHER_REGISTERS = 28


@dataclass(frozen=True, kw_only=True)
class FmhaFwdQ8Sm90(Kernel):
    """One quantised kernel for every head_dim up to its own; what else varies, it learns at run time.

    Of its warps, four load.
    """

    family: ClassVar[str] = "fmha_fwd_q8_sm90"
    op: ClassVar[Op] = Op.FORWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM90,)

    tile: Annotated[Tile, "_"]
    dtype: Annotated[DType, "_"]
    math: Annotated[Math, "_"]

    @classmethod
    def lead(cls) -> str:
        return "fmha_fwd_q8"  # the arch follows

    @property
    def accuracy(self) -> Accuracy:
        return self.math.accuracy

    @property
    def group(self) -> str:
        return f"{super().group}_{self.math.value}"

    @property
    def takes(self) -> Takes:
        takes = Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.UNDROPPED
        return takes | Takes.SMALLER_HEAD_DIM | Takes.WINDOW | Takes.SINKS

    @property
    def functions(self) -> tuple[Function, ...]:
        """The attention, and what makes the bytes."""
        return tuple(
            Function(symbol=symbol, cpp_mask=MaskKind.NONE.cpp)
            for symbol in (self.name, f"{self.name}_quantize")
        )

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, 64 query rows each."""
        return ceil_div(self.tile.block_m, WARPGROUP_ROWS)

    # ---- resources of one CTA of the attention ----

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: K, V and their scales of every stage, O, barriers."""
        kv = 2 * self.tile.stages * self.tile.block_n * self.head_dim
        scales = SCALE_BYTES * self.tile.stages
        out = ELEMENT_BYTES * self.tile.block_m * self.head_dim
        barriers = BARRIER_BYTES * 2 * self.tile.stages
        return ceil_div(kv + scales + out + barriers, SMEM_ALIGNMENT) * SMEM_ALIGNMENT

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer's thread that hold Q, S, P, the sums of P V and O at once."""
        return self.head_dim // 8 + self.tile.block_n // 2 + self.tile.block_n // 8 + self.head_dim

    @property
    def registers(self) -> int:
        """What the launch gives a thread; setmaxnreg then moves registers from the loads to the consumers."""
        return self.arch.limits.registers_for(self.tile.threads)
