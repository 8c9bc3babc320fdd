"""Defects of the quantised split kernels: whose keys a warp has, its room for K, what leaves the CTA."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant


def _split(name: str, header: str, old: str, new: str, defect: str, by: Check) -> Mutant:
    return Mutant(
        name=f"quantized_split_{name}",
        header=f"fmha_fwd_q8/{header}",
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.QUANTIZED_SPLIT,
        by=by,
    )


QUANTIZED_SPLIT: tuple[Mutant, ...] = (
    _split(
        "keys_of_the_first_warp",
        "kernel.cuh",
        "KeySplit::make(group, Traits::kKvGroups, keys)",
        "KeySplit::make(0, Traits::kKvGroups, keys)",
        "all warps of a CTA take the same keys",
        Check.NUMERICS,
    ),
    _split(
        "k_before_it_was_read",
        "split_mainloop.cuh",
        "Arch::syncwarp();  // every lane has read K(n)",
        "",
        "the next K overwrites what other lanes still read",
        Check.RACES,
    ),
    _split(
        "left_end_without_a_mask",
        "split_mainloop.cuh",
        " || n_block < keys.n_block_full_min",
        "",
        "keys before a window count",
        Check.NUMERICS,
    ),
    _split(
        "lse_of_parts_without_the_mean",
        "split_epilogue.cuh",
        "needs_mean(params) ? reinterpret_cast<const float *>(Traits::Arch::dynamic_smem())[row] : 0.f",
        "0.f",
        "q·c is missing where several CTAs share the keys",
        Check.LSE,
    ),
)
