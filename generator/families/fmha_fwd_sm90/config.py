"""What a fused forward kernel of Hopper is: `FmhaFwdSm90`, and the resources of its CTA.

The C++ headers compute shared memory by themselves; each generated unit asserts that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.kernel import ELEMENT_BYTES, DType, Function, Kernel, Op, Takes, Tile, ceil_div
from generator.families.fmha_fwd.config import MaskKind

WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64  # query rows that one wgmma covers
BARRIER_BYTES = 8
SMEM_ALIGNMENT = 1024  # of shared memory: eight rows of 128 swizzled bytes

# Rows of O for which there is no room of its own; it leaves through Q's.
OUT_IN_Q_ELEMENTS = 512

# Registers for S, P and O up to which a second CTA of two consumers fits on an SM.
SMALL_ACCUMULATORS = 72

# The consumers whose threads have registers for dropout, and for masks next to accumulators of so many.
MASKED_CONSUMERS = 2
MASKED_ACCUMULATORS = 160

# What a consumer's thread holds next to its accumulators: descriptors, row statistics, loop state.
OTHER_REGISTERS = 28


@dataclass(frozen=True, kw_only=True)
class ClusterTile(Tile):
    """A tile, and how many CTAs load K and V together."""

    cluster: Annotated[int, "_c"] = 1


@dataclass(frozen=True, kw_only=True)
class FmhaFwdSm90(Kernel):
    """One fused kernel for one head_dim: plain, causal or not, or general. Of its warps, four load.

    A general kernel with two consumers has a variant with dropout, and both take masks up to head_dim 128.
    Other threads have no registers left for these. A split one is for few tiles and many keys.
    """

    family: ClassVar[str] = "fmha_fwd_sm90"
    op: ClassVar[Op] = Op.FORWARD
    archs: ClassVar[tuple[Arch, ...]] = (Arch.SM90,)

    tile: Annotated[ClusterTile, "_"]
    dtype: Annotated[DType, "_"]
    causal: Annotated[bool, "_causal"] = False  # known when compiled
    general: Annotated[bool, "_general"] = False  # causal, window, sinks, lengths, masks at run time
    dropout: Annotated[bool, "_dropout"] = False
    split: Annotated[bool, "_split"] = False  # no masks; CTAs share the keys of a tile

    @classmethod
    def lead(cls) -> str:
        return "fmha_fwd"  # the arch follows

    @property
    def takes(self) -> Takes:
        """Columns below head_dim cost nothing: what lies outside of a tensor map reads as zeros."""
        takes = Takes.SMALLER_HEAD_DIM | (Takes.DROPOUT if self.dropout else Takes.UNDROPPED)
        if not self.general:
            return takes | (Takes.CAUSAL if self.causal else Takes.FULL)
        takes |= Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED
        takes |= Takes.WINDOW | Takes.SINKS
        if self.split:
            return takes | Takes.SPLITS
        has_room = self.consumers == MASKED_CONSUMERS and self.accumulator_registers <= MASKED_ACCUMULATORS
        return takes | Takes.BOOL | Takes.BIAS16 | Takes.BIAS32 if has_room else takes

    @property
    def functions(self) -> tuple[Function, ...]:
        """One for each kind of mask that it takes, no mask first; last the one that finds what a boolean mask
        hides, ahead of that for such masks, or the one that merges the parts of a split kernel.
        """
        masks = [
            Function(symbol=self.name + kind.suffix, cpp_mask=kind.cpp)
            for kind in MaskKind
            if kind.takes in self.takes
        ]
        if Takes.BOOL in self.takes:
            masks.append(Function(symbol=f"{self.name}_mask_blocks", cpp_mask=MaskKind.BOOL.cpp))
        if self.split:
            masks.append(Function(symbol=f"{self.name}_merge", cpp_mask=MaskKind.NONE.cpp))
        return tuple(masks)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, 64 query rows each."""
        return ceil_div(self.tile.block_m, WARPGROUP_ROWS)

    # ---- resources of one CTA ----

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: Q (of two tiles where they fit) and O of every consumer, K and V of every
        stage, barriers.
        """
        rows = WARPGROUP_ROWS * self.consumers
        q = rows * self.head_dim
        kv = 2 * self.tile.stages * self.tile.block_n * self.head_dim
        room = (self.arch.limits.smem_per_cta - SMEM_ALIGNMENT) // ELEMENT_BYTES
        out = OUT_IN_Q_ELEMENTS if 2 * q + kv > room else q
        stages_q = 2 if out == q and not self.general and 3 * q + kv <= room else 1
        barriers = BARRIER_BYTES * (2 * stages_q * self.consumers + 4 * self.tile.stages)
        used = ELEMENT_BYTES * (stages_q * q + kv + out) + barriers
        return ceil_div(used, SMEM_ALIGNMENT) * SMEM_ALIGNMENT

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer's thread that hold S, P and O at once."""
        return self.tile.block_n // 2 + self.tile.block_n // 4 + self.head_dim // 2

    @property
    def shares_its_sm(self) -> bool:
        """A second CTA runs beside it."""
        return self.consumers == 2 and not self.general and self.accumulator_registers <= SMALL_ACCUMULATORS

    @property
    def registers(self) -> int:
        """What the launch gives a thread; setmaxnreg then moves registers from the loads to the consumers."""
        return self.arch.limits.registers_for(self.tile.threads * (2 if self.shares_its_sm else 1))
