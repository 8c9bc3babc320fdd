"""What a kernel is: `KernelConfig`, its name, and the resources that follow from it.

Every fact about a kernel that is not a choice is a derived property: name, group (the unit that holds it),
threads, shared memory, registers, CTAs per SM, C++ text. No I/O, and no opinion on what is legal: that is
`rules.py`, so every property is also defined for configs that the rules refuse.

Name grammar, `_g` only when kv_groups > 1 and `_qreg` only when q_in_regs:

    <family>_<arch>_d<head_dim>_<tile>_<dtype>[_causal][_general][_dropout][_split][_unbiased]
    <tile> = m<block_m>n<block_n>_s<stages>_w<warps>[_g<kv_groups>][_qreg]

The C++ headers compute shared memory on their own; each generated unit asserts that both agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum

ELEMENT_BYTES = 2  # fp16 and bf16
ACCUMULATOR_BYTES = 4  # fp32
MMA_M = 16  # query rows that one warp's mma.sync covers
MMA_N = 8  # columns of its result
COPY_ELEMENTS = 8  # elements of one 16-byte cp.async

# For the merge of KV groups, each of the four lanes that share a row keeps row_max and row_sum beside O.
MERGE_FLOATS_BESIDE_HEAD_DIM = 4 * 2

# K and V tiles in flight in the ring of one KV group.
RING_TILES = 3

# What a thread of a fused kernel holds beside its accumulators: addresses, row statistics, fragments.
REGISTERS_BESIDE_ACCUMULATORS = 64

# The masks and the dropout of a general kernel go by blocks of this many keys.
GENERAL_BLOCK_N = 32

# What a thread of a general kernel holds beside that. Without dropout it loads the mask a step ahead: so many
# registers for each of its rows and each block of keys. With dropout it does not, but Philox needs its state.
MASK_REGISTERS = 4
DROPOUT_REGISTERS = 16

# The inner dimension of one step of the unfused family's first GEMM.
UNFUSED_BLOCK_K = 32


# MaskKind in params.hpp, and the last word of the symbol of the function that is compiled for it.
MASK_KINDS = (("kNone", ()), ("kBool", ("bool",)), ("kBias16", ("bias16",)), ("kBias32", ("bias32",)))


class InvalidNameError(ValueError):
    """A text that does not follow the name grammar."""


class Family(Enum):
    """How attention is computed: a folder under templates/include/sdpa and a template."""

    FMHA_FWD = "fmha_fwd"
    UNFUSED = "unfused"


class DType(Enum):
    """The element type of Q, K, V and O."""

    F16 = "f16"
    BF16 = "bf16"

    @property
    def cpp_element(self) -> str:
        """The C++ type."""
        return {DType.F16: "cutlass::half_t", DType.BF16: "cutlass::bfloat16_t"}[self]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one SM of an architecture offers."""

    compute_capability: int
    smem_per_cta: int  # bytes a CTA can opt in to
    smem_per_sm: int  # bytes
    smem_reserved_per_cta: int  # bytes that the driver takes from smem_per_sm for each CTA
    threads_per_sm: int
    ctas_per_sm: int
    registers_per_sm: int
    registers_per_thread: int
    register_granularity: int  # a thread's registers are allotted in multiples of this

    def registers_for(self, threads: int) -> int:
        """The most registers that a thread can have when its CTA has that many threads."""
        share = self.registers_per_sm // threads
        return min(self.registers_per_thread, share - share % self.register_granularity)


class Arch(Enum):
    """An architecture that kernels are tuned for."""

    SM89 = "sm89"

    @property
    def limits(self) -> Limits:
        """The architecture's resources (CUDA C++ Programming Guide, table of compute capabilities)."""
        return _LIMITS[self]


_LIMITS = {
    Arch.SM89: Limits(
        compute_capability=89,
        smem_per_cta=101376,
        smem_per_sm=102400,
        smem_reserved_per_cta=1024,
        threads_per_sm=1536,
        ctas_per_sm=24,
        registers_per_sm=65536,
        registers_per_thread=255,
        register_granularity=8,
    )
}

_NUMBER = "[1-9][0-9]{0,5}"
_TILE_GRAMMAR = (
    rf"m(?P<block_m>{_NUMBER})n(?P<block_n>{_NUMBER})_s(?P<stages>{_NUMBER})_w(?P<warps>{_NUMBER})"
    rf"(?:_g(?P<kv_groups>{_NUMBER}))?(?P<q_in_regs>_qreg)?"
)
_TILE_PATTERN = re.compile(_TILE_GRAMMAR)
_NAME_PATTERN = re.compile(
    rf"(?P<family>{'|'.join(f.value for f in Family)})_(?P<arch>{'|'.join(a.value for a in Arch)})"
    rf"_d(?P<head_dim>{_NUMBER})_(?P<tile>{_TILE_GRAMMAR})"
    rf"_(?P<dtype>{'|'.join(d.value for d in DType)})(?P<causal>_causal)?(?P<general>_general)?"
    r"(?P<dropout>_dropout)?(?P<split>_split)?(?P<unbiased>_unbiased)?"
)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _check_types(config: Tile | KernelConfig) -> None:
    """Numbers are positive ints, flags are bools: what a template prints must be what its type says."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int" and (type(value) is not int or not 1 <= value < 10**6):
            raise ValueError(f"{field.name} must be an int from 1 to 999999, not {value!r}")
        if field.type == "bool" and type(value) is not bool:
            raise ValueError(f"{field.name} must be a bool, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one CTA divides its work."""

    block_m: int  # query rows of a CTA
    block_n: int  # key rows of one step
    stages: int  # K and V tiles in flight
    warps: int  # of the CTA
    kv_groups: int = 1  # warp groups that share the query rows and split the keys
    q_in_regs: bool = False  # Q stays in registers and its shared memory is reused for V

    def __post_init__(self) -> None:
        _check_types(self)

    @property
    def name(self) -> str:
        """For example `m128n64_s2_w4` or `m32n64_s1_w8_g4`."""
        groups = f"_g{self.kv_groups}" if self.kv_groups > 1 else ""
        q_in_regs = "_qreg" if self.q_in_regs else ""
        return f"m{self.block_m}n{self.block_n}_s{self.stages}_w{self.warps}{groups}{q_in_regs}"

    @staticmethod
    def parse(name: str) -> Tile:
        """The tile of that name. Raises InvalidNameError."""
        match = _TILE_PATTERN.fullmatch(name)
        tile = _tile_of(match) if match else None
        if tile is None or tile.name != name:
            raise InvalidNameError(f"{name!r} is not a tile; an example is m128n64_s2_w4")
        return tile

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return 32 * self.warps

    @property
    def warps_m(self) -> int:
        """Warps of one KV group; each has query rows of its own."""
        return max(1, self.warps // self.kv_groups)

    @property
    def mma_m(self) -> int:
        """MMA row blocks of one warp."""
        return _ceil_div(self.block_m, MMA_M * self.warps_m)


def _tile_of(match: re.Match[str]) -> Tile:
    return Tile(
        block_m=int(match["block_m"]),
        block_n=int(match["block_n"]),
        stages=int(match["stages"]),
        warps=int(match["warps"]),
        kv_groups=int(match["kv_groups"] or 1),
        q_in_regs=match["q_in_regs"] is not None,
    )


@dataclass(frozen=True, kw_only=True)
class Function:
    """One compiled function of a fused kernel."""

    symbol: str
    cpp_mask: str  # the kind of mask that it is compiled for


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One kernel of the library. Everything that multiplies kernels is a field here, and nothing else is."""

    family: Family
    arch: Arch
    dtype: DType
    head_dim: int
    tile: Tile
    causal: bool  # known when compiled; a general kernel takes it at run time
    general: bool = False  # takes masks, lengths per sequence and smaller head_dims at run time
    dropout: bool = False
    split: bool = False  # general without masks; CTAs share the keys of a tile, tiles the heads of a key head
    unbiased: bool = False  # general without biases: for tiles that leave no registers for them

    def __post_init__(self) -> None:
        _check_types(self)

    # ---- names ----

    @property
    def name(self) -> str:
        """The kernel's first symbol, registry row, manifest key, test id and tuned-table value."""
        prefix = f"{self.family.value}_{self.arch.value}_d{self.head_dim}_{self.tile.name}"
        return "_".join([prefix, self.dtype.value, *self.flags])

    @property
    def flags(self) -> tuple[str, ...]:
        """The optional last words of the name."""
        given = {
            "causal": self.causal,
            "general": self.general,
            "dropout": self.dropout,
            "split": self.split,
            "unbiased": self.unbiased,
        }
        return tuple(flag for flag, is_given in given.items() if is_given)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The compiled functions of a fused kernel: one for each kind of mask it takes, no mask first."""
        return tuple(
            Function(symbol="_".join([self.name, *suffix]), cpp_mask=f"fmha_fwd::MaskKind::{name}")
            for name, suffix in self.mask_kinds
        )

    @property
    def mask_kinds(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Those of MASK_KINDS that it takes."""
        if not self.general or self.split:
            return MASK_KINDS[:1]
        return MASK_KINDS[:2] if self.unbiased else MASK_KINDS

    @property
    def group(self) -> str:
        """The unit that holds this kernel, with all that share its layouts: these cost the compile time.

        The layouts of a fused kernel follow from head_dim and tile; those of the unfused GEMMs from the tile.
        """
        head_dim = f"_d{self.head_dim}" if self.family is Family.FMHA_FWD else ""
        return f"{self.family.value}_{self.arch.value}{head_dim}_{self.tile.name}"

    @property
    def unit(self) -> str:
        """The unit's file, relative to the output folder."""
        return f"units/{self.group}.cu"

    # ---- resources of one CTA ----

    @property
    def kv_tile_bytes(self) -> int:
        """One K or V tile."""
        return self.tile.block_n * self.head_dim * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA, in the unfused family of the first GEMM."""
        tile = self.tile
        if self.family is Family.UNFUSED:
            return tile.stages * (tile.block_m + tile.block_n) * UNFUSED_BLOCK_K * ELEMENT_BYTES
        q = tile.block_m * self.head_dim * ELEMENT_BYTES
        if tile.kv_groups > 1:
            return tile.kv_groups * max(RING_TILES * self.kv_tile_bytes, self.merge_bytes)
        k = v = tile.stages * self.kv_tile_bytes
        return max(q, v) + k if tile.q_in_regs else q + k + v

    @property
    def merge_bytes(self) -> int:
        """What one KV group hands over for the merge; it overlays the group's ring of K and V tiles."""
        return self.tile.block_m * (self.head_dim + MERGE_FLOATS_BESIDE_HEAD_DIM) * ACCUMULATOR_BYTES

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread that hold O, S and, if it lives there, Q at once; the output of a GEMM."""
        if self.family is Family.UNFUSED:
            return _ceil_div(self.tile.block_m * self.tile.block_n, self.tile.threads)
        mma_m = self.tile.mma_m
        acc_o = mma_m * self.head_dim // 2
        acc_s = mma_m * self.tile.block_n // 2
        q = mma_m * self.head_dim // 4 if self.tile.q_in_regs or self.tile.kv_groups > 1 else 0
        return acc_o + acc_s + q

    @property
    def registers(self) -> int:
        """An estimate for one thread: accumulators, P in the input dtype and the rest. Not capped."""
        p = self.tile.mma_m * self.tile.block_n // 4 if self.family is Family.FMHA_FWD else 0
        return self.accumulator_registers + p + self.variant_registers + REGISTERS_BESIDE_ACCUMULATORS

    @property
    def variant_registers(self) -> int:
        """What of the estimate a general kernel needs for masks and dropout; 0 in the others."""
        if self.dropout:
            return DROPOUT_REGISTERS
        if not self.general or self.split:
            return 0
        return 2 * self.tile.mma_m * _ceil_div(self.tile.block_n, GENERAL_BLOCK_N) * MASK_REGISTERS

    @property
    def ctas_per_sm_by(self) -> dict[str, int]:
        """How many CTAs each resource of an SM has room for."""
        limits, threads = self.arch.limits, self.tile.threads
        granularity = limits.register_granularity
        registers = _ceil_div(min(self.registers, limits.registers_for(threads)), granularity) * granularity
        return {
            "shared memory": limits.smem_per_sm // (self.smem_bytes + limits.smem_reserved_per_cta),
            "threads": limits.threads_per_sm // threads,
            "registers": limits.registers_per_sm // (threads * max(1, registers)),
            "slots": limits.ctas_per_sm,
        }

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per SM that the launch bounds promise; at least 1."""
        return max(1, min(self.ctas_per_sm_by.values()))


def parse(name: str) -> KernelConfig:
    """The config of that name, so that `parse(config.name) == config`. Raises InvalidNameError.

    The name need not be in any space, nor legal.
    """
    match = _NAME_PATTERN.fullmatch(name)
    if match is not None:
        config = KernelConfig(
            family=Family(match["family"]),
            arch=Arch(match["arch"]),
            dtype=DType(match["dtype"]),
            head_dim=int(match["head_dim"]),
            tile=_tile_of(match),
            causal=match["causal"] is not None,
            general=match["general"] is not None,
            dropout=match["dropout"] is not None,
            split=match["split"] is not None,
            unbiased=match["unbiased"] is not None,
        )
        if config.name == name:
            return config
    raise InvalidNameError(
        f"{name!r} is not a kernel name; the grammar is <family>_<arch>_d<head_dim>_m<block_m>n<block_n>"
        "_s<stages>_w<warps>[_g<kv_groups>][_qreg]_<dtype>[_causal][_general][_dropout][_split], "
        "for example fmha_fwd_sm89_d64_m128n64_s2_w4_f16_causal"
    )
