"""What a quantised forward kernel is: `FmhaFwdQ8`, its functions, and the resources of its CTA.

A launch runs two functions: `<name>_quantize` first, which turns K and V into bytes, then the one for its
kind of mask. A split kernel takes no masks, and has one beside the first. The C++ headers compute shared
memory by themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, Accuracy, DType, Function, Kernel, Op, Takes, Tile, ceil_div
from generator.families.fmha_fwd.config import MaskKind

MMA_M = 16  # query rows that one warp's mma.sync covers
SCALE_BYTES = 4  # float32
SCALES = 2  # of a token: log2 of its scale, and the inverse

# What a thread holds next to its accumulators: addresses, row statistics and scales.
OTHER_REGISTERS = 40

# What sums of P̂ V̂ start with, and what O is too large by, for each row of an MMA.
MAGIC_REGISTERS = 4
SHIFT_REGISTERS = 2


class Math(Enum):
    """What is multiplied as bytes."""

    INT8_QK = "int8qk"  # Q Kᵀ; P V in the element type
    INT8 = "int8"  # Q Kᵀ and P V

    @property
    def cpp(self) -> str:
        """The C++ enumerator."""
        return "fmha_fwd_q8::Math::" + {"int8qk": "kInt8Qk", "int8": "kInt8"}[self.value]

    @property
    def accuracy(self) -> Accuracy:
        """What its results are worth."""
        return Accuracy[self.name]


@dataclass(frozen=True, kw_only=True)
class Q8Tile(Tile):
    """How one CTA divides its work; the stages are blocks of K and V in flight, in each KV group."""

    kv_groups: Annotated[int, "_g"] = 1  # warps that share the query rows and split the keys

    @property
    def warps_m(self) -> int:
        """Warps of one KV group; they divide the query rows."""
        return max(1, self.warps // self.kv_groups)


@dataclass(frozen=True, kw_only=True)
class FmhaFwdQ8(Kernel):
    """One quantised kernel for every head_dim up to its own; what else varies, it learns at run time."""

    family: ClassVar[str] = "fmha_fwd_q8"
    op: ClassVar[Op] = Op.FORWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)

    tile: Annotated[Q8Tile, "_"]
    dtype: Annotated[DType, "_"]
    math: Annotated[Math, "_"]
    split: Annotated[bool, "_split"] = False  # no masks; CTAs share keys, tiles the heads of a key head

    @property
    def accuracy(self) -> Accuracy:
        return self.math.accuracy

    @property
    def group(self) -> str:
        return f"{super().group}_{self.math.value}"

    @property
    def takes(self) -> Takes:
        takes = Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.UNDROPPED
        takes |= Takes.SMALLER_HEAD_DIM | Takes.WINDOW | Takes.SINKS
        return takes | (Takes.SPLITS if self.split else Takes.BOOL | Takes.BIAS16 | Takes.BIAS32)

    @property
    def functions(self) -> tuple[Function, ...]:
        """One for each kind of mask that it takes, no mask first; the last one makes the bytes, whatever the
        mask is.
        """
        masked = (
            Function(symbol=self.name + kind.suffix, cpp_mask=kind.cpp)
            for kind in MaskKind
            if kind.takes in self.takes
        )
        return (*masked, Function(symbol=f"{self.name}_quantize", cpp_mask=MaskKind.NONE.cpp))

    # ---- resources of one CTA of the attention ----

    @property
    def mma_m(self) -> int:
        """MMA row blocks of one warp."""
        return ceil_div(self.tile.block_m, MMA_M * self.tile.warps_m)

    @property
    def smem_bytes(self) -> int:
        """Q, and K, V and the tokens' scales of every stage of every KV group; O, or what the groups hand
        over, takes their room in the end.
        """
        tile = self.tile
        q = tile.block_m * self.head_dim
        kv = tile.block_n * self.head_dim
        if self.math is Math.INT8:
            stage = 2 * kv + SCALES * tile.block_n * SCALE_BYTES
        else:
            stage = kv + ELEMENT_BYTES * kv
        if self.split:
            return q + tile.kv_groups * tile.stages * stage
        return q + max(tile.stages * stage, ELEMENT_BYTES * q)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold O and S at once."""
        return self.mma_m * (self.head_dim // 2 + self.tile.block_n // 2)

    @property
    def ctas_by_registers(self) -> int:
        """CTAs per SM that registers are dealt out for: GPUs with more shared memory have room for them."""
        return self.ctas_per_sm_by["registers"]

    @property
    def registers(self) -> int:
        """An estimate for one thread: accumulators, P, what P V needs, and the rest. Not capped."""
        if self.math is Math.INT8:  # sums of some columns next to O
            p, of_pv = self.mma_m * self.tile.block_n // 8, self.mma_m * self.head_dim // 4
            of_pv += 0 if self.split else MAGIC_REGISTERS + self.mma_m * SHIFT_REGISTERS
        else:  # fragments of V, and addresses of its rows
            p, of_pv = self.mma_m * self.tile.block_n // 4, self.head_dim // 4
        return self.accumulator_registers + p + of_pv + OTHER_REGISTERS
