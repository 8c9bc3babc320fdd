"""Defects of the fused backward kernels: how CTAs of keys hand on the sums of dQ, and what dQ is of them."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_RELAY = "fmha_bwd_fused/dq_relay.cuh"
_CONVERT = "fmha_bwd_fused/dq_convert.cuh"
_KERNEL = "fmha_bwd_fused/kernel.cuh"
_ROWS = "fmha_bwd/row_range.cuh"


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
    _fused(
        "tiles_beyond_the_last_key_are_whole",
        _KERNEL,
        "    if ((n_block + 1) * Role::kBlockN > sequence.seqlen_k) range.full_min = range.max;\n",
        "",
        "keys behind the last one weigh exp(-lse), and dQ is NaN where that overflows",
    ),
    _fused(
        "keys_beyond_the_last_are_seen",
        _ROWS,
        "key < sequence.seqlen_k ? sequence.seqlen_q : 0;",
        "sequence.seqlen_q;",
        "the same in blocks that are masked",
    ),
)
