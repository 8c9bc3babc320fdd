"""How many CTAs of a kernel fit on one SM, as the CUDA runtime computes it.

Limits: CUDA C++ Programming Guide, technical specifications per compute capability. Registers are given to
warps in units of 256, and a warp's come from one quarter of the register file; shared memory is given in
units of 128 bytes, and the driver keeps 1 KiB of it for each CTA.
"""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS_PER_QUARTER = 16384
_QUARTERS = 4
_REGISTER_UNIT = 256  # of one warp
_SMEM_UNIT = 128  # bytes
_SMEM_RESERVED = 1024  # bytes of each CTA
_WARP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm:
    """One SM. `smem_per_cta` is what a CTA can opt in to, `smem_per_sm` what all of them share; bytes."""

    arch: int
    warps: int
    ctas: int
    smem_per_sm: int
    smem_per_cta: int


SMS = {
    sm.arch: sm
    for sm in (
        Sm(arch=80, warps=64, ctas=32, smem_per_sm=167936, smem_per_cta=166912),
        Sm(arch=86, warps=48, ctas=16, smem_per_sm=102400, smem_per_cta=101376),
        Sm(arch=89, warps=48, ctas=24, smem_per_sm=102400, smem_per_cta=101376),
        Sm(arch=90, warps=64, ctas=32, smem_per_sm=233472, smem_per_cta=232448),
    )
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """CTAs and warps that one SM holds at once, how many warps it could, and what keeps it from more."""

    ctas: int
    warps: int
    max_warps: int
    limited_by: str


def occupancy(sm: Sm, *, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The theoretical occupancy of a kernel with `smem_bytes` of static and dynamic shared memory a CTA.

    A kernel that does not fit at all has 0 CTAs.
    """
    warps = -(-threads // _WARP)
    registers_of_warp = _round_up(max(registers, 1) * _WARP, _REGISTER_UNIT)
    warps_by_registers = _REGISTERS_PER_QUARTER // registers_of_warp * _QUARTERS
    smem_of_cta = _round_up(smem_bytes + _SMEM_RESERVED, _SMEM_UNIT)
    limits = {
        "registers": warps_by_registers // warps,
        "shared memory": sm.smem_per_sm // smem_of_cta if smem_bytes <= sm.smem_per_cta else 0,
        "warps": sm.warps // warps,
        "CTA slots": sm.ctas,
    }
    limited_by = min(limits, key=limits.__getitem__)
    ctas = limits[limited_by]
    return Occupancy(ctas, ctas * warps, sm.warps, limited_by)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
