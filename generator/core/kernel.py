"""What every family's kernels answer: name, unit, what they take, resources.

A family derives a class from `Kernel` and adds its words. Everything that multiplies kernels is a field, and
nothing else is; every fact that is not a choice is a derived property. No I/O, and no opinion on what is
legal: that is the family's rules, so every property is also defined for kernels that they refuse.

A name is `<family>_<arch>_d<head_dim>_<tile>_<dtype>` and the family's words: the kernel's first symbol,
registry row, manifest key, test id and tuned-table value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, Flag, auto
from typing import Annotated, ClassVar

from generator.core.arch import Arch
from generator.core.tags import Tagged


class Op(Enum):
    """What a kernel computes."""

    FORWARD = "forward"
    MERGE = "merge"  # of partial results
    BACKWARD = "backward"  # gradients of attention

    @property
    def c_name(self) -> str:
        """The C ABI's enumerator."""
        return f"SDPA_OP_{self.name}"


class Accuracy(Enum):
    """How near to the mathematics its results are: a choice crosses no line of these unasked."""

    EXACT = "exact"  # logits in float32, roundings to the element type in P and in the result alone
    ROUNDED_LOGITS = "rounded_logits"  # to 16 bits
    INT8_QK = "int8_qk"  # Q and K as bytes
    INT8 = "int8"  # V and P too

    @property
    def c_name(self) -> str:
        """The C ABI's enumerator."""
        return f"SDPA_ACCURACY_{self.name}"


class Takes(Flag):
    """What a problem may ask of a kernel: the C ABI's sdpa_takes, to which later versions append.

    Every problem needs one bit of FULL and CAUSAL, and one of UNDROPPED and DROPOUT.
    """

    FULL = auto()  # every query sees every key
    CAUSAL = auto()
    BOOL = auto()  # a boolean mask
    BIAS16 = auto()  # a mask to add, 16 bits an element
    BIAS32 = auto()
    LENGTHS = auto()  # a length for each sequence, causal aligned to it
    PACKED = auto()  # sequences one after another, without padding
    UNDROPPED = auto()
    DROPOUT = auto()
    SMALLER_HEAD_DIM = auto()  # than the kernel's, and another one for the values
    SPLITS = auto()  # several CTAs share the keys of a tile
    WINDOW = auto()  # a first and a last key for each row
    SINKS = auto()  # a logit for each head in the denominator


class ElementType(Enum):
    """The element types that a family's kernels are built for."""

    @property
    def cpp_element(self) -> str:
        """The C++ type."""
        return {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "f32": "float"}[self.value]

    @property
    def c_name(self) -> str:
        """The C ABI's enumerator."""
        return f"SDPA_DTYPE_{self.name}"


class DType(ElementType):
    """The element type of Q, K, V and O."""

    F16 = "f16"
    BF16 = "bf16"


ELEMENT_BYTES = 2  # of each DType


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class Function:
    """One compiled function of a kernel."""

    symbol: str
    cpp_mask: str  # the kind of mask that it is compiled for


@dataclass(frozen=True, kw_only=True)
class Cta(Tagged):
    """How one CTA divides its work, in a family's own words."""

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Tile(Cta):
    """How one CTA of an attention kernel divides its work; a family may add to it."""

    block_m: Annotated[int, "m"]  # query rows of a CTA; rows of a GEMM's output
    block_n: Annotated[int, "n"]  # key rows of one step; columns of a GEMM's output
    stages: Annotated[int, "_s"]  # steps in flight
    warps: Annotated[int, "_w"]  # of the CTA

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True, kw_only=True)
class Kernel(Tagged, ABC):
    """One kernel of the library."""

    family: ClassVar[str]  # a folder under templates/include/sdpa, and a template
    op: ClassVar[Op]
    archs: ClassVar[tuple[Arch, ...]]  # that there are kernels for
    measured: ClassVar[str] = "one CTA"  # whose resources these are

    arch: Annotated[Arch, "_"]
    head_dim: Annotated[int, "_d"]
    tile: Annotated[Cta, "_"]  # a family names its own class, and its own element types
    dtype: Annotated[ElementType, "_"]

    @property
    def accuracy(self) -> Accuracy:
        """How near to the mathematics its results are."""
        return Accuracy.EXACT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch not in self.archs:
            raise ValueError(f"arch must be one of {self.family}'s, not {self.arch}")

    @classmethod
    def lead(cls) -> str:
        return cls.family

    @property
    def group(self) -> str:
        """The unit that holds this kernel, with all that share its layouts: these cost the compile time."""
        return f"{self.lead()}_{self.arch.value}_d{self.head_dim}_{self.tile.name}"

    @property
    def unit(self) -> str:
        """The unit's file, relative to the output folder."""
        return f"units/{self.group}.cu"

    @property
    def code(self) -> str:
        """What its unit is compiled for, in CMake's words."""
        return self.arch.limits.cmake_architectures

    @property
    @abstractmethod
    def takes(self) -> Takes:
        """What it takes at run time, and what it was compiled for."""

    @property
    def takes_names(self) -> tuple[str, ...]:
        """The names of `takes`, in their order."""
        return tuple(bit.name or "" for bit in Takes if bit in self.takes)

    @property
    def details(self) -> Mapping[str, int]:
        """Its own choices as names and numbers, for choosing among kernels and for printing."""
        return asdict(self.tile)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions of which a launch takes one, and what prepares for it.

        None when a launch runs several that C++ derives.
        """
        return ()

    # ---- resources of one CTA ----

    @property
    @abstractmethod
    def smem_bytes(self) -> int:
        """Dynamic shared memory."""

    @property
    @abstractmethod
    def accumulator_registers(self) -> int:
        """Registers of a thread that must be there at once."""

    @property
    @abstractmethod
    def registers(self) -> int:
        """An estimate for one thread: the accumulators and the rest. Not capped."""

    @property
    def ctas_per_sm_by(self) -> dict[str, int]:
        """How many CTAs each resource of an SM has room for."""
        limits, threads = self.arch.limits, self.tile.threads
        granularity = limits.register_granularity
        registers = ceil_div(min(self.registers, limits.registers_for(threads)), granularity) * granularity
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
