"""Defects of the fused backward kernels: how CTAs of keys hand on the sums of dQ, and what dQ is of them."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_RELAY = "fmha_bwd_fused/dq_relay.cuh"
_CONVERT = "fmha_bwd_fused/dq_convert.cuh"


def _fused(name: str, header: str, old: str, new: str, defect: str, by: Check = Check.NUMERICS) -> Mutant:
    return Mutant(
        name=f"backward_fused_{name}",
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.BACKWARD_FUSED,
        by=by,
    )


FUSED_BACKWARDS: tuple[Mutant, ...] = (
    _fused(
        "nobody_waits",
        _RELAY,
        "if (!is_first && tid == kWaiter) Arch::await(params_.turns + index, n_block_);",
        "",
        "sums are read while the CTA of the keys before may still write them",
        Check.RULES,
    ),
    _fused(
        "no_barrier_before_ds",
        _RELAY,
        "    Arch::syncthreads();  // dS is visible, and what",
        "    // dS is visible, and what",
        "dS is read before other warps have written it, and sums before anybody has waited",
        Check.RULES,
    ),
    _fused(
        "handed_on_too_early",
        _RELAY,
        "    Arch::syncthreads();\n    pass_on();",
        "    pass_on();",
        "the next CTA may go on before all of the last tile is written",
        Check.RULES,
    ),
    _fused(
        "tiles_without_keys_have_sums",
        _CONVERT,
        "const bool has_sums = params.turns[index] != 0;",
        "const bool has_sums = true;",
        "rows that see no key get what the workspace held before",
    ),
)
