"""Defects of the choice of a kernel, its number of splits and their prices."""

from __future__ import annotations

from tests.mutation.defects_python import PythonMutant

CHOICE = (
    PythonMutant(
        name="copies_of_masks_cost_nothing",
        defect="the price of a call that copies its mask is that of the kernel alone",
        file="choice/cost/copied_mask.py",
        old="return cycles + copy_us * CLOCK_GHZ * 1e3, num_splits",
        new="return cycles, num_splits",
        tests="tests/library/test_choice.py::"
        "test_prices_know_where_masks_are_read_one_by_one_and_where_they_are_copied",
    ),
    PythonMutant(
        name="long_masks_are_read_one_by_one",
        defect="a few long rows of a mask that begin anywhere are never copied",
        file="choice/mask_reads.py",
        old=" or keys >= LONG_COPY_KEYS",
        new="",
        tests="tests/library/test_strided_masks.py::test_long_rows_are_copied_however_few_they_are",
    ),
    PythonMutant(
        name="a_few_sms_have_a_tile_more",
        defect="tiles of keys from the DRAM are shared out as if those lay in the L2 cache",
        file="choice/cost/splits.py",
        old="return self._choose_even(tiles, blocks, rows, dram)",
        new="return 1, 0.0",
        tests="tests/library/test_choice.py::test_tiles_come_even_where_the_dram_waits_for_a_few_sms",
    ),
    PythonMutant(
        name="two_kv_groups_do_not_come_even",
        defect="tiles of two KV groups have one CTA each, however many SMs that leaves idle",
        file="choice/cost/splits.py",
        old="self._may_come_even = kernel.kv_groups > 1",
        new="self._may_come_even = kernel.kv_groups > 2",
        tests="tests/library/test_choice.py::test_tiles_of_two_kv_groups_come_even",
    ),
    PythonMutant(
        name="light_kernels_have_room_for_few",
        defect="an SM is thought to have room for four CTAs of a kernel where it has room for six",
        file="choice/cost/ctas.py",
        old="REGISTERS.get(name_of(kernel), _MAX_REGISTERS)",
        new="_MAX_REGISTERS",
        tests="tests/library/test_resident_ctas.py",
    ),
    PythonMutant(
        name="faster_loads_are_outclassed",
        defect="a kernel for a larger head_dim is never priced, though its loads are faster",
        file="choice/cost/fmha_fwd.py",
        old="            and self._key_load <= other._key_load\n",
        new="",
        tests="tests/library/test_choice.py::test_larger_kernels_of_the_same_tile_are_priced_when_they_may_win",
    ),
    PythonMutant(
        name="factors_of_the_first_length_are_kept",
        defect="whether keys are few is what it was in the first problem of a kind",
        file="choice/cost/fmha_fwd.py",
        old="2 * (problem.seqlen_k <= FEW_KEYS)",
        new="2 * self.__dict__.setdefault('are_few', problem.seqlen_k <= FEW_KEYS)",
        tests="tests/library/test_choice.py::test_a_ranking_while_a_key_cache_grows",
    ),
    PythonMutant(
        name="hopper_never_splits",
        defect="chunks of prompts leave most SMs of a Hopper GPU idle",
        file="choice/cost/fmha_fwd_sm90.py",
        old="if kernel.is_split and self._is_narrow:",
        new="if False:",
        tests="tests/library/test_choice.py::test_chunks_of_prompts_in_few_heads_are_split_on_hopper",
    ),
    PythonMutant(
        name="causal_tiles_that_fill_the_card_are_split",
        defect="long causal problems pay for parts that nothing is gained by",
        file="choice/cost/fmha_fwd_sm90.py",
        old="if tiles > sms and 4 * mean < 3 * longest:",
        new="if False:",
        tests="tests/library/test_choice.py::test_causal_tiles_that_fill_a_hopper_gpu_are_not_split",
    ),
    PythonMutant(
        name="quantised_splits_wait_for_others",
        defect="more CTAs share the keys of a tile than run at once",
        file="choice/cost/fmha_fwd_q8.py",
        old="most = min(sms * self._resident // tiles, blocks // groups, _MAX_SPLITS)",
        new="most = min(blocks // groups, _MAX_SPLITS)",
        tests="tests/library/test_select_split_quantised.py::test_decoding_takes_them",
    ),
    PythonMutant(
        name="plain_kernels_of_head_dim_80_come_first",
        defect="few queries of head_dim 80 over many keys take the plain kernel, whatever the prices say",
        file="choice/select.py",
        old="(kernel.block_m - (kernel.head_dim % 32 == 0)) // 2",
        new="(kernel.block_m - 1) // 2",
        tests="tests/library/test_choice.py::test_a_ranking_is_the_readable_rule",
    ),
    PythonMutant(
        name="a_slower_length_does_not_count",
        defect="quantising is said to pay from a length on, though it does not at a longer one",
        file="choice/break_even.py",
        old="            break\n",
        new="            continue\n",
        tests="tests/library/test_break_even.py::test_the_least_length_from_which_on_it_stays_faster",
    ),
    PythonMutant(
        name="a_pass_is_as_fast_as_a_cache",
        defect="the pass over keys and values is priced as if DRAM had no limit",
        file="choice/cost/quantised.py",
        old=", device.dram_us(moved) * CLOCK_GHZ * 1e3)",
        new=", 0.0)",
        tests="tests/library/test_break_even.py::test_a_pass_is_no_faster_than_dram",
    ),
)
