"""Defects of pairs of CTAs on Hopper, which load K and V together."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_LOAD = "fmha_fwd_sm90/tile_load.cuh"
_PIPELINE = "fmha_fwd_sm90/pipeline.cuh"
_TRAITS = "fmha_fwd_sm90/kernel_traits.cuh"
_KERNEL = "fmha_fwd_sm90/kernel.cuh"

HOPPER_PAIRS: tuple[Mutant, ...] = (
    Mutant(
        name="hopper_pair_releases_to_its_own_cta",
        header=_PIPELINE,
        old="if (rank < Traits::kCluster) Arch::mbarrier_arrive_at(empty, rank);",
        new="if (rank == 0) Arch::mbarrier_arrive(empty);",
        defect="the other CTA waits for the release of a buffer that it shares for ever",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_releases_for_the_other_cta",
        header=_PIPELINE,
        old="Arch::mbarrier_arrive_at(empty, rank);",
        new="Arch::mbarrier_arrive_at(empty, Traits::rank());",
        defect="a CTA fills buffers of the other one that only its own consumers have read",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_without_a_barrier_of_the_cluster",
        header=_KERNEL,
        old="Arch::cluster_sync();",
        new="Arch::syncthreads();",
        defect="copies and arrivals come to mbarriers that the other CTA has yet to initialise",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_without_a_fence_of_its_mbarriers",
        header=_PIPELINE,
        old="  Arch::fence_mbarrier_init();\n",
        new="",
        defect="the other CTA may not see that the mbarriers are initialised",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_expects_half_of_the_bytes",
        header=_LOAD,
        old="Arch::mbarrier_expect(&smem.k_full[slot.index], Traits::kTileBytesKV);",
        new="Arch::mbarrier_expect(&smem.k_full[slot.index], Traits::kTileBytesKV / Traits::kCluster);",
        defect="K counts as there when one of its halves is",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_leaves_early",
        header=_KERNEL,
        old="    if constexpr (Traits::kIsPair) producer.finish();\n",
        new="",
        defect="a CTA exits while the other one may still arrive at its mbarriers",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_loads_the_first_half_twice",
        header=_LOAD,
        old="const int first = Traits::rank() * Traits::kRowsOfLoad;",
        new="const int first = 0;",
        defect="both CTAs load the first half of a block, and nobody the second",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_pair_has_the_same_rows",
        header=_TRAITS,
        old="consumer * 2 + (consumer ^ rank())",
        new="consumer * 2 + consumer",
        defect="both CTAs compute the same rows, and nobody the others",
        kernels=Kernels.HOPPER_PAIR,
        by=Check.OUTSIDE,
    ),
)
