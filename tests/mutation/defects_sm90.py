"""Defects of Hopper's kernels: waits, releases, fences and turns, and what a warpgroup computes."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_MAINLOOP = "fmha_fwd_sm90/mainloop.cuh"
_LOAD = "fmha_fwd_sm90/tile_load.cuh"
_EPILOGUE = "fmha_fwd_sm90/epilogue.cuh"
_PIPELINE = "fmha_fwd_sm90/pipeline.cuh"
_KERNEL = "fmha_fwd_sm90/kernel.cuh"
_LAUNCH = "fmha_fwd_sm90/launch.cuh"

HOPPER: tuple[Mutant, ...] = (
    # ---- waits, releases, fences ----
    Mutant(
        name="hopper_no_wait_for_v",
        header=_MAINLOOP,
        old="Arch::mbarrier_wait(&smem.v_full[before.index], before.phase);  // V(n + 1) is visible\n",
        new="\n",
        defect="V is multiplied with before its bytes have come",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_no_wgmma_fence",
        header=_MAINLOOP,
        old="      Arch::fence_operand(tSrS);\n      Arch::wgmma_fence();\n",
        new="      Arch::fence_operand(tSrS);\n",
        defect="no wgmma.fence between the registers of S and the wgmma that writes them",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_p_written_in_flight",
        header=_MAINLOOP,
        old="      wait_pv(before.index);\n      convert_p(tSrS);\n",
        new="      convert_p(tSrS);\n      wait_pv(before.index);\n",
        defect="P of the next block is written while P V of the one before reads it",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_q_never_released",
        header=_MAINLOOP,
        old="release<Arch>(&smem.q_empty[consumer]);  // Q was read by this warp\n",
        new="{}\n",
        defect="a CTA's second tile waits for room for its Q for ever",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_no_proxy_fence",
        header=_EPILOGUE,
        old="    Arch::fence_async_proxy();\n",
        new="",
        defect="TMA may store what O's room held before",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_store_not_waited_for",
        header=_EPILOGUE,
        old="    if (Arch::thread_idx() % 32 == 0) Arch::template tma_store_wait_read<0>();\n  }\n\n private",
        new="  }\n\n private",
        defect="a CTA ends while TMA still reads its shared memory",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_expects_too_few_bytes",
        header=_LOAD,
        old="Arch::mbarrier_expect(&smem.v_full[slot.index], Traits::kTileBytesKV);",
        new="Arch::mbarrier_expect(&smem.v_full[slot.index], Traits::kTileBytesKV - 16);",
        defect="V's barrier is told of fewer bytes than its copies bring",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_producer_waits_for_the_other_phase",
        header=_LOAD,
        old="Arch::mbarrier_wait(&smem.k_empty[slot.index], slot.phase ^ 1);",
        new="Arch::mbarrier_wait(&smem.k_empty[slot.index], slot.phase);",
        defect="the loads wait for a release before anybody has had anything",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_too_few_arrivals_expected",
        header=_PIPELINE,
        old="Arch::mbarrier_init(&smem.k_empty[i], kWarps * Traits::kConsumers);",
        new="Arch::mbarrier_init(&smem.k_empty[i], kWarps);",
        defect="one consumer's releases let K be overwritten under the others",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_phase_never_changes",
        header=_PIPELINE,
        old="      phase ^= 1;\n",
        new="",
        defect="the second time round, everybody takes the first round's barriers for the second's",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    Mutant(
        name="hopper_turns_left_out",
        header=_MAINLOOP,
        old="      Turn<Traits>::wait(consumer);\n      Turn<Traits>::pass(consumer);\n",
        new="",
        defect="consumers that pass blocks on take fewer turns than the others",
        kernels=Kernels.HOPPER,
        by=Check.RULES,
    ),
    # ---- what is computed ----
    Mutant(
        name="hopper_no_rescale",
        header=_MAINLOOP,
        old="      rescale(factors);\n",
        new="",
        defect="O keeps its scale when the reference moves",
        kernels=Kernels.HOPPER,
        by=Check.NUMERICS,
    ),
    Mutant(
        name="hopper_rows_of_the_first_consumer",
        header=_KERNEL,
        old="tile.m_block * Traits::kConsumers + consumer);",
        new="tile.m_block * Traits::kConsumers);",
        defect="every consumer looks as far as the first one's rows",
        kernels=Kernels.HOPPER,
        by=Check.NUMERICS,
    ),
    Mutant(
        name="hopper_first_masked_block_unmasked",
        header=_MAINLOOP,
        old="if (n_block >= first_special) {",
        new="if (n_block > first_special) {",
        defect="the block that the diagonal enters first is not masked",
        kernels=Kernels.HOPPER,
        by=Check.NUMERICS,
    ),
    Mutant(
        name="hopper_keys_that_no_row_sees",
        header=_LAUNCH,
        old="const int extent_kv[3] = {p.batch, p.num_heads_kv, params.seqlen_k};",
        new="const int extent_kv[3] = {p.batch, p.num_heads_kv, p.seqlen_k};",
        defect="values of keys that no row sees are loaded, and 0 times NaN is NaN",
        kernels=Kernels.HOPPER,
        by=Check.IDENTITIES,
    ),
    Mutant(
        name="hopper_broadcast_is_counted",
        header=_LOAD,
        old="tile.bidb * params.step_k.batch);",
        new="tile.bidb);",
        defect="the second batch of a broadcast K is outside of its map",
        kernels=Kernels.HOPPER,
        by=Check.NUMERICS,
    ),
    Mutant(
        name="hopper_lse_behind_the_last_row",
        header=_EPILOGUE,
        old="row < params.seqlen_q)",
        new="row <= params.seqlen_q)",
        defect="softmax_lse of one row more than there are",
        kernels=Kernels.HOPPER,
        by=Check.OUTSIDE,
    ),
)
