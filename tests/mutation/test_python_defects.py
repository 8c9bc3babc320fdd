"""Defects in the Python between torch and the kernels, each of which the tests that it names must find.

The mutants of the headers need a compiler; these need a copy of the package with one line changed. The tests
run on the host library as it is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sdpa_cutlass.library import abi
from sdpa_cutlass.library.locate import Target
from tests.mutation.model import ROOT

PACKAGE = "sdpa_cutlass"


@dataclass(frozen=True, kw_only=True)
class PythonMutant:
    """One edit of a file of the package, and the tests that have to find it."""

    name: str
    defect: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    PythonMutant(
        name="flash_operator_is_top_left",
        defect="is_causal of the flash operator is taken for that of F.scaled_dot_product_attention",
        file="integrations/flash_impl.py",
        old="causal=Causal.BOTTOM_RIGHT if is_causal",
        new="causal=Causal.TOP_LEFT if is_causal",
        tests="tests/library/test_mappings.py::test_row[cpu-flash_is_causal]",
    ),
    PythonMutant(
        name="flash_operator_loses_its_scale",
        defect="gradients of the flash operator are those of another scale",
        file="integrations/flash_impl.py",
        old="causal=Causal.BOTTOM_RIGHT.value if is_causal else None,\n                        scale=scale,",
        new="causal=Causal.BOTTOM_RIGHT.value if is_causal else None,",
        tests="tests/library/test_flash_impl.py::test_the_kernel_of_the_backward",
    ),
    PythonMutant(
        name="backward_ignores_dlse",
        defect="the gradient of softmax_lse is dropped",
        file="call/backward.py",
        old="dlse = None if results.dlse is None else",
        new="dlse = None if True else",
        tests="tests/library/test_backward.py::test_a_gradient_of_one_number_and_of_lse",
    ),
    PythonMutant(
        name="backward_draws_other_bits",
        defect="dropout's mask in the backward is another one than in the forward",
        file="call/backward.py",
        old="given = given._replace(philox=philox)",
        new="given = given._replace(philox=type(philox)(philox[0], philox[1] + 1))",
        tests="tests/library/test_backward.py::test_dropout_uses_the_forwards_mask",
    ),
    PythonMutant(
        name="sinks_ignore_dlse",
        defect="the gradient of softmax_lse does not reach the sinks",
        file="integrations/torch_autograd.py",
        old="delta = delta - dlse",
        new="pass",
        tests="tests/library/test_backward.py::test_gradients_of_sinks",
    ),
    PythonMutant(
        name="sinks_count_rows_beyond_a_length",
        defect="rows beyond a length have a share in the gradient of sinks",
        file="integrations/torch_autograd.py",
        old="counts = lse != -math.inf",
        new="counts = lse == lse",
        tests="tests/library/test_backward.py::test_gradients_of_sinks_with_lengths_and_dropout",
    ),
    PythonMutant(
        name="sinks_count_rows_of_no_sequence",
        defect="rows behind the last packed sequence have a share in the gradient of sinks",
        file="integrations/torch_autograd.py",
        old="& (row < inputs.cu_seqlens_q[-1])",
        new="",
        tests="tests/library/test_backward.py::test_gradients_of_sinks_with_lengths_and_dropout",
    ),
    PythonMutant(
        name="sinks_alone_are_not_recorded",
        defect="a call of which only the sinks require grad is no node of the graph",
        file="call/torch_hooks.py",
        old="or (sinks is not None and sinks.requires_grad)",
        new="",
        tests="tests/library/test_backward.py::test_gradients_of_sinks_alone",
    ),
    PythonMutant(
        name="second_derivatives_are_lost",
        defect="a gradient of a gradient is refused by torch, and not by name",
        file="integrations/torch_autograd.py",
        old="if is_differentiated:",
        new="if False:",
        tests="tests/library/test_backward.py::test_second_derivatives_are_refused_by_name",
    ),
    PythonMutant(
        name="enable_takes_gradients_of_any_head_dim",
        defect="calls without a backward kernel are not left to torch by name",
        file="integrations/torch_refusals.py",
        old="> head_dims.backward",
        new="> 10**6",
        tests="tests/library/test_enable.py::test_gradients_beyond_the_largest_kernels_fall_through",
    ),
    PythonMutant(
        name="nested_tensors_are_asked_for_their_shape",
        defect="strided nested tensors reach the checks of sizes",
        file="integrations/torch_refusals.py",
        old='return "nested tensor"',
        new="pass",
        tests="tests/library/test_enable_edges.py::test_strided_nested_tensors_are_torchs",
    ),
    PythonMutant(
        name="named_backends_are_ignored",
        defect="sdpa_kernel(...) does not keep a call from this library",
        file="integrations/torch_sdpa.py",
        old="if names_backends():",
        new="if False:",
        tests="tests/library/test_enable_edges.py::test_backends_that_are_named_are_torchs",
    ),
    PythonMutant(
        name="strides_of_a_leading_dimension_are_a_parts",
        defect="parts along a leading dimension have the strides of one dimension before",
        file="call/merging.py",
        old="moved = 1 if parts.is_stacked else 0",
        new="moved = 0",
        tests="tests/library/test_merge_states.py::test_arrays_of_other_libraries_are_read_in_place",
    ),
    PythonMutant(
        name="tensors_in_lists_may_require_grad",
        defect="an operator looks for derivatives in single tensors alone",
        file="integrations/operators.py",
        old="elif isinstance(value, (list, tuple)):",
        new="elif False:",
        tests="tests/library/test_merge_states.py::test_autograd_refuses_the_operator_too",
    ),
    PythonMutant(
        name="kernels_that_merge_compete_for_attention",
        defect="a choice of attention does not ask for the op of a row",
        file="library/registry.py",
        old="if self.op is not Op.FORWARD:",
        new="if False:",
        tests="tests/library/test_merge_states.py::test_no_choice_of_attentions_sees_the_kernels",
    ),
    PythonMutant(
        name="plans_outlive_the_copy_of_a_mask",
        defect="the next call reads the caller's mask with the strides of the copy that the first one made",
        file="call/calls.py",
        old="if attn_mask is not None and prepared.copied_mask is not None:",
        new="if False:",
        tests="tests/library/test_strided_masks.py::test_a_known_call_copies_its_own_mask",
    ),
    PythonMutant(
        name="plans_copy_masks_whose_address_was_odd",
        defect="masks that kernels read as they lie are copied, for one of their strides began unaligned",
        file="call/planning.py",
        old="operands.rank > 4 or mask.data_ptr() % extras.ROW_BYTES",
        new="operands.rank > 4",
        tests="tests/library/test_strided_masks.py::test_no_plan_is_kept_for_a_copy_that_an_address_asks_for",
    ),
    PythonMutant(
        name="every_family_reads_long_runs",
        defect="masks are copied for Hopper's kernels that read them as they lie",
        file="call/planning.py",
        old="extras.needs_dense_copy(mask, plan.kernel.family)",
        new="True",
        tests="tests/library/test_strided_masks.py::test_hoppers_kernels_take_rows_of_even_numbers_as_they_lie",
    ),
    PythonMutant(
        name="copies_of_masks_are_written_out",
        defect="a strided mask is copied for each batch entry that it is the same for",
        file="call/extras.py",
        old="slice(0, 1) if stride == 0 else slice(None)",
        new="slice(None)",
        tests="tests/library/test_strided_masks.py::test_a_strided_mask_is_copied_and_means_the_same",
    ),
    PythonMutant(
        name="shards_stand_on_the_other_side",
        defect="row_offset and key_offset are exchanged",
        file="call/shard.py",
        old="{rows - keys:+d}",
        new="{keys - rows:+d}",
        tests="tests/library/test_shards.py::test_offsets_of_every_size",
    ),
    PythonMutant(
        name="shards_lose_their_last_key",
        defect="a shard of which the first row sees all keys but the last counts as not masked",
        file="problem.py",
        old="diagonal + right >= keys - 1",
        new="diagonal + right >= keys - 2",
        tests="tests/library/test_shards.py::test_a_problem_keeps_what_its_shard_hides",
    ),
    PythonMutant(
        name="running_results_keep_their_lse",
        defect="accumulate merges outputs and leaves softmax_lse as it was",
        file="public/accumulate.py",
        old="lse.copy_(merged_lse)",
        new="pass",
        tests="tests/library/test_accumulate.py::test_steps_give_the_whole",
    ),
    PythonMutant(
        name="appended_keys_keep_their_mean",
        defect="keys that are appended are not moved by the mean of the others",
        file="call/quantized_memory.py",
        old="part -= mean[:, None]",
        new="pass",
        tests="tests/library/test_quantized_kv.py::test_bytes_of_appended_keys_are_the_kernels",
    ),
    PythonMutant(
        name="broadcast_queries_are_whole",
        defect="after a call that broadcast its queries, those of one batch alone give the result of several",
        file="call/growing.py",
        old="if (batch, heads) == (1 if layout is None else problem.batch, problem.num_heads_q):",
        new="if True:",
        tests="tests/library/test_growing_cache.py::test_queries_that_were_broadcast_before",
    ),
    PythonMutant(
        name="a_growing_shard_keeps_its_mask",
        defect="more keys than a shard's mask hides none of are all seen",
        file="call/growing.py",
        old=" or signature[_CAUSAL] not in _WHOLE",
        new="",
        tests="tests/library/test_growing_cache.py::test_a_shard_whose_mask_hides_nothing_yet",
    ),
    PythonMutant(
        name="the_diagonal_of_a_growing_cache_stays",
        defect="with another number of keys the causal mask begins where it began before",
        file="call/growing.py",
        old="params.causal_offset = problem.causal_offset",
        new="pass",
        tests="tests/library/test_growing_cache.py::test_only_the_first_number_of_keys_is_checked_in_full",
    ),
    PythonMutant(
        name="softmax_lse_of_other_sizes_overlaps",
        defect="batches of a call of other sizes write their softmax_lse over each other",
        file="call/growing.py",
        old="            heads_q * rows,\n",
        new="            rows,\n",
        tests="tests/library/test_growing_cache.py::test_other_sizes_are_not_checked_in_full",
    ),
    PythonMutant(
        name="sizes_of_calls_are_not_compared",
        defect="once a call is known, others need not have as many values as keys, or heads that fit",
        file="call/growing.py",
        old="not sizes_agree(of_query, of_key, of_value, signature[_ENABLE_GQA])",
        new="signature[_ENABLE_GQA] is None",
        tests="tests/library/test_growing_cache.py::test_sizes_that_do_not_agree_are_broadcast_or_refused",
    ),
    PythonMutant(
        name="other_sizes_of_negative_views_are_read",
        defect="a view with the negative bit is read as its memory lies, once calls of other sizes are known",
        file="call/growing.py",
        old="query.is_neg() or key.is_neg() or value.is_neg()",
        new="key.is_neg()",
        tests="tests/library/test_growing_cache.py::test_tensors_that_are_not_like_the_known_ones",
    ),
    PythonMutant(
        name="sinks_of_other_heads_are_read",
        defect="once a call with sinks is known, others may have more or fewer query heads than sinks",
        file="call/growing.py",
        old=" or (problem.has_sinks and heads_q != plan.problem.num_heads_q)",
        new="",
        tests="tests/library/test_growing_general.py::test_sinks_and_lengths_have_to_fit_other_sizes",
    ),
    PythonMutant(
        name="lengths_of_other_batches_are_read",
        defect="once a call with lengths is known, others may have more or fewer batches than lengths",
        file="call/growing.py",
        old="layout is not None and problem.has_lengths and batch != plan.problem.batch",
        new="False",
        tests="tests/library/test_growing_general.py::test_sinks_and_lengths_have_to_fit_other_sizes",
    ),
    PythonMutant(
        name="windows_of_other_sizes_are_those_of_the_known_call",
        defect="a window that hides nothing of few keys hides nothing of more",
        file="call/calls.py",
        old="if options.window is None and inputs.attn_mask is None and inputs.out is None:",
        new="if inputs.attn_mask is None and inputs.out is None:",
        tests="tests/library/test_growing_general.py::test_masks_and_windows_of_other_sizes",
    ),
    PythonMutant(
        name="bounds_of_other_packs_are_not_checked",
        defect="once a pack is known, another one may say that its sequences have less than no row",
        file="call/growing.py",
        old="not (0 <= longest_q <= INT32_MAX and 0 <= longest_k <= INT32_MAX)",
        new="False",
        tests="tests/library/test_growing_general.py::test_packs_that_are_not_like_the_known_one",
    ),
    PythonMutant(
        name="starts_of_other_packs_are_not_compared",
        defect="once a pack is known, cu_seqlens_k of another one may be shorter than cu_seqlens_q",
        file="call/growing.py",
        old="starts_q != starts_k or not (stride_of_starts_q == stride_of_starts_k == (1,))",
        new="False",
        tests="tests/library/test_growing_general.py::test_packs_that_are_not_like_the_known_one",
    ),
    PythonMutant(
        name="totals_of_other_packs_stay",
        defect="a larger pack has as many rows as the known one, to the library",
        file="call/growing.py",
        old="_write_totals(image, Params.total_q.offset, rows, keys)",
        new="pass",
        tests="tests/library/test_growing_general.py::test_other_packs",
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
        name="the_last_block_is_not_quantised_again",
        defect="what is appended begins a block, whatever the last one holds",
        file="call/quantized.py",
        old="rest = self._seqlen % BLOCK",
        new="rest = 0",
        tests="tests/library/test_quantized_kv.py::test_pieces_give_the_bits_of_one_piece",
    ),
    PythonMutant(
        name="growth_forgets_scales",
        defect="larger memory has the bytes of the keys and not their scales",
        file="call/quantized_memory.py",
        old="self.k_scale[:, :count] = other.k_scale[:, :count]",
        new="pass",
        tests="tests/library/test_quantized_kv.py::test_pieces_give_the_bits_of_one_piece",
    ),
    PythonMutant(
        name="lengths_stay_the_callers",
        defect="a QuantizedKV reads the caller's tensor of lengths in later calls",
        file="public/quantized_kv.py",
        old="key.shape[0], key).clone()",
        new="key.shape[0], key)",
        tests="tests/library/test_quantized_kv.py::test_padded_lengths",
    ),
    PythonMutant(
        name="kept_keys_are_not_shared_out",
        defect="one CTA takes all keys of a tile, however many there are",
        file="call/quantized.py",
        old="params.num_splits = choice.num_splits",
        new="params.num_splits = min(choice.num_splits, 1)",
        tests="tests/library/test_quantized_kv_launches.py::test_decoding_splits_the_keys",
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
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without a defect, in which all of the tests pass."""
    place = tmp_path_factory.mktemp("sound")
    _copy(ROOT, place)
    tests = dict.fromkeys(mutant.tests for mutant in MUTANTS)
    assert _run(place, *tests) == 0
    return place


def _copy(source: Path, place: Path) -> None:
    for folder in (PACKAGE, "tests/library"):
        ignored = shutil.ignore_patterns("__pycache__", "cli", "machine_code", "simt")
        shutil.copytree(source / folder, place / folder, ignore=ignored)
    for file in ("pyproject.toml", "tests/conftest.py", "tests/kernel_rows.py"):
        shutil.copy(source / file, place / file)


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_found(mutant: PythonMutant, sound: Path, tmp_path: Path) -> None:
    text = (sound / PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    _copy(sound, tmp_path)
    (tmp_path / PACKAGE / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    assert _run(tmp_path, mutant.tests) == 1


def _run(place: Path, *tests: str) -> int:
    """pytest's exit status of `tests` in the copy at `place`."""
    library = str(abi.library(Target.HOST).path)
    environment = {**os.environ, Target.HOST.environment_variable: library, "SDPA_CUTLASS_LAUNCHER": "off"}
    command = [sys.executable, "-m", "pytest", "-q", "--device", "cpu", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=place, env=environment, stdout=subprocess.DEVNULL).returncode
