"""The architectures that kernels are tuned for: what one SM offers, and what compiles for it.

A member of `Arch` brings no kernel: a family names its archs, and each of its tables the one it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one SM of an architecture offers, and what its kernels are written and compiled for."""

    compute_capability: int  # ten times NVIDIA's number
    instructions: str  # the instruction set: a header of that name under templates/include/sdpa/arch
    cmake_architectures: str  # what its units are compiled for, as in CMAKE_CUDA_ARCHITECTURES
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
    """An architecture that kernels are tuned for. The value is its word in names."""

    SM89 = "sm89"
    SM90 = "sm90"

    @property
    def limits(self) -> Limits:
        """The architecture's resources (CUDA C++ Programming Guide, table of compute capabilities)."""
        return _LIMITS[self]


_LIMITS = {
    Arch.SM89: Limits(
        compute_capability=89,
        instructions="sm80",
        cmake_architectures="89",
        smem_per_cta=101376,
        smem_per_sm=102400,
        smem_reserved_per_cta=1024,
        threads_per_sm=1536,
        ctas_per_sm=24,
        registers_per_sm=65536,
        registers_per_thread=255,
        register_granularity=8,
    ),
    Arch.SM90: Limits(
        compute_capability=90,
        instructions="sm90",
        cmake_architectures="90a-real",
        smem_per_cta=232448,
        smem_per_sm=233472,
        smem_reserved_per_cta=1024,
        threads_per_sm=2048,
        ctas_per_sm=32,
        registers_per_sm=65536,
        registers_per_thread=255,
        register_granularity=8,
    ),
}
