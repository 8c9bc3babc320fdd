"""What a fused forward kernel is: `FmhaFwd`, the functions it is compiled into, and the resources of its CTA.

The C++ headers compute shared memory by themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, DType, Function, Kernel, Op, Takes, Tile, ceil_div

ACCUMULATOR_BYTES = 4  # fp32
MMA_M = 16  # query rows that one warp's mma.sync covers
MMA_N = 8  # columns of its result
COPY_ELEMENTS = 8  # elements of one 16-byte cp.async

# For the merge of KV groups, each of the four lanes that share a row keeps row_max and row_sum with O.
MERGE_STATISTICS = 4 * 2

# K and V tiles in flight in the ring of one KV group.
RING_TILES = 3

# What a thread holds next to its accumulators: addresses, row statistics, fragments.
OTHER_REGISTERS = 64

# The masks and the dropout of a general kernel go by blocks of this many keys.
GENERAL_BLOCK_N = 32

# What a thread of a general kernel holds on top of that. Without dropout it loads the mask a step ahead: so
# many registers for each of its rows and blocks of keys. With dropout it does not, but Philox has a state.
MASK_REGISTERS = 4
DROPOUT_REGISTERS = 16


class MaskKind(Enum):
    """MaskKind of params.hpp: a general kernel has a function for each that it takes."""

    NONE = "kNone", Takes(0), ""
    BOOL = "kBool", Takes.BOOL, "_bool"
    BIAS16 = "kBias16", Takes.BIAS16, "_bias16"
    BIAS32 = "kBias32", Takes.BIAS32, "_bias32"

    def __init__(self, enumerator: str, takes: Takes, suffix: str) -> None:
        self.cpp = f"MaskKind::{enumerator}"
        self.takes = takes  # what a kernel has to take to have this function
        self.suffix = suffix  # of the function's symbol


@dataclass(frozen=True, kw_only=True)
class FmhaTile(Tile):
    """How one CTA divides its work; the stages are K and V tiles in flight."""

    kv_groups: Annotated[int, "_g"] = 1  # warp groups that share the query rows and split the keys
    q_in_regs: Annotated[bool, "_qreg"] = False  # Q stays in registers, V gets its shared memory

    @property
    def warps_m(self) -> int:
        """Warps of one KV group; they divide the query rows."""
        return max(1, self.warps // self.kv_groups)

    @property
    def mma_m(self) -> int:
        """MMA row blocks of one warp."""
        return ceil_div(self.block_m, MMA_M * self.warps_m)


@dataclass(frozen=True, kw_only=True)
class FmhaFwd(Kernel):
    """One fused kernel: plain, for one head_dim, causal or not, or general."""

    family: ClassVar[str] = "fmha_fwd"
    op: ClassVar[Op] = Op.FORWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM89,)

    tile: Annotated[FmhaTile, "_"]
    dtype: Annotated[DType, "_"]
    causal: Annotated[bool, "_causal"] = False  # known when compiled
    general: Annotated[bool, "_general"] = False  # causal, window, masks, lengths, head_dims at run time
    dropout: Annotated[bool, "_dropout"] = False
    split: Annotated[bool, "_split"] = False  # no masks; CTAs share keys, tiles the heads of a key head
    unbiased: Annotated[bool, "_unbiased"] = False  # no biases, for tiles that leave no registers for them

    @property
    def takes(self) -> Takes:
        """What the words after the dtype mean."""
        takes = Takes.DROPOUT if self.dropout else Takes.UNDROPPED
        if not self.general:
            return takes | (Takes.CAUSAL if self.causal else Takes.FULL)
        takes |= Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.SMALLER_HEAD_DIM
        takes |= Takes.SINKS
        if not (self.dropout and self.tile.block_m == 128 and self.head_dim >= 64):  # no registers left
            takes |= Takes.WINDOW
        if self.split:
            return takes | Takes.SPLITS
        takes |= Takes.BOOL
        return takes if self.unbiased else takes | Takes.BIAS16 | Takes.BIAS32

    @property
    def functions(self) -> tuple[Function, ...]:
        """One for each kind of mask that it takes, no mask first; of a split kernel also the one that merges
        large parts.
        """
        found = [
            Function(symbol=self.name + kind.suffix, cpp_mask=kind.cpp)
            for kind in MaskKind
            if kind.takes in self.takes
        ]
        if self.split:
            found.append(Function(symbol=f"{self.name}_merge", cpp_mask=MaskKind.NONE.cpp))
        return tuple(found)

    # ---- resources of one CTA ----

    @property
    def kv_tile_bytes(self) -> int:
        """One K or V tile."""
        return self.tile.block_n * self.head_dim * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: Q, and K and V of every stage, or the rings of the KV groups."""
        tile = self.tile
        if tile.kv_groups > 1:
            return tile.kv_groups * max(RING_TILES * self.kv_tile_bytes, self.merge_bytes)
        q = tile.block_m * self.head_dim * ELEMENT_BYTES
        k = v = tile.stages * self.kv_tile_bytes
        return max(q, v) + k if tile.q_in_regs else q + k + v

    @property
    def merge_bytes(self) -> int:
        """What one KV group hands over for the merge; it overlays the group's ring of K and V tiles."""
        return self.tile.block_m * (self.head_dim + MERGE_STATISTICS) * ACCUMULATOR_BYTES

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold O, S and, if it lives there, Q at once."""
        mma_m = self.tile.mma_m
        acc_o = mma_m * self.head_dim // 2
        acc_s = mma_m * self.tile.block_n // 2
        q = mma_m * self.head_dim // 4 if self.tile.q_in_regs or self.tile.kv_groups > 1 else 0
        return acc_o + acc_s + q

    @property
    def registers(self) -> int:
        """An estimate for one thread: accumulators, P in the input dtype and the rest. Not capped."""
        p = self.tile.mma_m * self.tile.block_n // 4
        return self.accumulator_registers + p + self.variant_registers + OTHER_REGISTERS

    @property
    def variant_registers(self) -> int:
        """What of the estimate a general kernel needs for masks and dropout; 0 in the others."""
        if self.dropout:
            return DROPOUT_REGISTERS
        if not self.general or self.split:
            return 0
        return 2 * self.tile.mma_m * ceil_div(self.tile.block_n, GENERAL_BLOCK_N) * MASK_REGISTERS
