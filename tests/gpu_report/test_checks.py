"""The checks themselves, on the host library: a sound kernel passes, and each kind of damage is found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo, Op
from sdpa_cutlass.problem import Causal
from sdpa_cutlass.public.api import kernels
from tests.gpu_report import (
    check_behaviour,
    check_memory,
    check_repeats,
    check_soak,
    check_soak_rules,
    check_twins,
    child,
)
from tests.gpu_report.context import CHECKS, Context, named
from tests.gpu_report.launching import Launch
from tests.gpu_report.memory import HostMemory
from tests.gpu_report.on_device import DeviceLaunch
from tests.gpu_report.placement import GUARD_BYTES, Layout, Placement
from tests.gpu_report.problems import even_cases, few_cases, num_splits, odd_cases, sized_case
from tests.kernels import backward
from tests.kernels.general import Case
from tests.kernels.harness import Inputs, TestedKernel

ROWS = named(kernels(Target.HOST), "*")
SMALL = min(
    (row for row in ROWS if row.family is Family.FMHA_FWD and not row.is_general),
    key=lambda row: row.block_m * row.block_n * row.head_dim,
)
GENERAL = min(
    (row for row in ROWS if row.has_dropout), key=lambda row: row.block_m * row.block_n * row.head_dim
)
PIPED = next(row for row in ROWS if row.family is Family.UNFUSED)


def context_of(row: KernelInfo, **more: object) -> Context:
    return Context(device="cpu", kernels=row.name, **more)


@pytest.mark.parametrize("row", [SMALL, GENERAL, PIPED], ids=lambda row: row.name)
def test_sound_kernels_pass(row: KernelInfo) -> None:
    for check in (check_memory.canaries, check_memory.guard_pages, check_twins.twins, check_memory.launches):
        context = context_of(row)
        check(context)
        assert context.failures == [], check
        assert context.numbers["kernels"] + context.numbers["kernels without a twin"] == 1
    context = context_of(row, examples=3)
    check_repeats.repeats(context)
    assert context.failures == []
    assert context.numbers["launches"] == 3


def test_every_kernel_takes_the_problem_that_is_repeated() -> None:
    """Masks only where it takes them: a refusal would end the part before the others had their turn."""
    library = context_of(SMALL).library
    for row in ROWS:
        DeviceLaunch(library, row, sized_case(row, heads=2, seqlen_q=9, seqlen_k=17))


def after_run(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Launch], None]) -> None:
    """Has every launch do some damage."""
    run = Launch.run

    def run_and_damage(self: Launch, stream: int | None = None) -> None:
        run(self, stream)
        damage(self)

    monkeypatch.setattr(Launch, "run", run_and_damage)


def _write(offset: int, field: str, size: int = 1) -> Callable[[Launch], None]:
    def damage(launch: Launch) -> None:
        address = getattr(launch.params, field)
        memory = launch._placement.memory
        old = memory.read(address + offset, size)
        memory.write(address + offset, old ^ numpy.uint8(1))

    return damage


def _leave_a_row_out(launch: Launch) -> None:
    poison = launch._out[0, 0, 0].view(torch.uint8).numpy()
    launch._placement.memory.write(launch.params.out, poison)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_write(-1, "out"), "bytes in front of out were written"),
        (_write(-GUARD_BYTES, "softmax_lse"), "bytes in front of softmax_lse were written"),
        (_write(-1, "q"), "bytes in front of q were written"),
        (_write(5, "k"), "bytes of the input k were written"),
        (_write(1, "out"), r"\(a\) max error|\(b\)"),
        (_write(3, "softmax_lse"), r"\(c\)"),
        (_leave_a_row_out, "elements of out were never written"),
    ],
)
def test_damage_is_found(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[Launch], None], message: str
) -> None:
    after_run(monkeypatch, damage)
    context = context_of(SMALL)
    check_memory.canaries(context)
    assert context.failures
    assert any(re.search(message, failure) for failure in context.failures)


def test_bytes_behind_a_tensor_are_watched() -> None:
    for layout in (Layout.CANARIES, Layout.FENCE_IN_FRONT):
        placement = Placement(HostMemory(), layout)
        address = placement.put("x", numpy.zeros(48, numpy.uint8), read_only=False)
        assert placement.damage() == []
        placement.memory.write(address + 48, numpy.array([255], numpy.uint8))
        assert placement.damage() == ["1 bytes behind x were written, first 0"], layout


@pytest.mark.parametrize(("layout", "offset"), [(Layout.FENCE_BEHIND, 48), (Layout.FENCE_IN_FRONT, -1)])
def test_an_access_beyond_a_fence_ends_the_process(layout: Layout, offset: int) -> None:
    code = (
        "import numpy\n"
        "from tests.gpu_report.memory import HostMemory\n"
        "from tests.gpu_report.placement import Layout, Placement\n"
        f"placement = Placement(HostMemory(), Layout.{layout.name})\n"
        "address = placement.put('x', numpy.zeros(48, numpy.uint8), read_only=True)\n"
        "placement.read('x'); print('alive', flush=True)\n"
        f"placement.memory.read(address + {offset}, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"
    assert done.returncode == -11


def test_a_run_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = DeviceLaunch.run, [0]

    def run_and_change_the_third(self: DeviceLaunch) -> None:
        run(self)
        count[0] += 1
        if count[0] == 3:
            self.results[0].view(torch.int16)[0, 0, 0, 0] ^= 1

    monkeypatch.setattr(DeviceLaunch, "run", run_and_change_the_third)
    context = context_of(SMALL, examples=4)
    check_repeats.repeats(context)
    assert len(context.failures) == 1
    assert "1 elements changed" in context.failures[0]


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_twins_that_are_too_far_apart_are_found(factor: float) -> None:
    case = sized_case(SMALL, heads=2, seqlen_q=33, seqlen_k=70)
    launch = DeviceLaunch(context_of(SMALL).library, SMALL, case)
    launch.run()
    same = context_of(SMALL)
    assert check_twins.differences(same, case, launch.results, launch.results) == []
    assert same.numbers["elements of the same bits"] == same.numbers["elements"] > 0
    other = [result.clone() for result in launch.results]
    row = other[0].abs().sum(-1).argmax() % other[0].shape[2]
    other[0][0, 0, row] *= factor
    assert check_twins.differences(context_of(SMALL), case, launch.results, other)
    other = [launch.results[0], launch.results[1] * (1 + 2.0**-14)]
    assert check_twins.differences(context_of(SMALL), case, launch.results, other)


def test_the_soak_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(SMALL, examples=20)
    check_soak.soak(context)
    assert context.numbers["problems"] >= 20
    run = check_soak.run_kernel

    def wrong(
        kernel: TestedKernel, inputs: Inputs, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = run(kernel, inputs, **options)
        if inputs.k.shape[2] > 40:
            out[0, 0, -1] += 0.05
        return out, lse

    monkeypatch.setattr(check_soak, "run_kernel", wrong)
    with pytest.raises(AssertionError, match="max error"):
        check_soak.soak(context_of(SMALL, examples=100))


QUANTISED = [
    next(row for row in kernels(Target.HOST) if row.family is family)
    for family in (Family.FMHA_FWD_Q8, Family.FMHA_FWD_Q8_SM90)
]
GRADIENTS = next(row for row in kernels(Target.HOST) if row.family is Family.FMHA_BWD)


def test_quantised_kernels_are_soaked_by_their_own_rule_alone() -> None:
    assert {row.op for row in ROWS} == {Op.FORWARD}
    rest = {row.name for row in kernels(Target.HOST) if row.op is Op.FORWARD} - {row.name for row in ROWS}
    assert rest == {row.name for row in kernels(Target.HOST) if row.family.value.startswith("fmha_fwd_q8")}
    assert rest >= {row.name for row in QUANTISED}


@pytest.mark.parametrize("row", QUANTISED, ids=lambda row: row.name)
def test_the_soak_finds_a_broken_contract(row: KernelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(row, examples=5)
    check_soak_rules.soak_quantised(context)
    assert context.numbers["problems"] >= 5
    run = check_soak_rules.run_case

    def wrong(kernel: TestedKernel, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = run(kernel, case, **options)
        out[0, 0] *= 1.05
        return out, lse

    monkeypatch.setattr(check_soak_rules, "run_case", wrong)
    with pytest.raises(AssertionError, match="max error"):
        check_soak_rules.soak_quantised(context_of(row, examples=20))


def test_what_the_scheme_loses_is_no_defect_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.4 times the contract's number, met by a soak: the model has it too."""
    row = next(row for row in kernels(Target.HOST) if row.name.endswith("d64_m64n64_s2_w4_bf16_int8"))
    recipe = check_soak_rules.QuantisedRecipe(
        kernel=row, num_splits=0, sizes=(3, 4, 2, 69, 764), kind="sink", causal=None,
        lengths_k=(256, 256, 256), mask_has=None, mask_dtype=torch.bool, bshd=False, seed=579,
    )  # fmt: skip
    compared = []
    compare = check_soak_rules.compare_with_model

    def seen(*given: Any) -> int:
        compared.append(compare(*given))
        return compared[-1]

    monkeypatch.setattr(check_soak_rules, "compare_with_model", seen)
    check_soak_rules.run_quantised(context_of(row, examples=1), recipe)
    assert len(compared) == 1


def test_the_soak_finds_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(GRADIENTS, examples=5)
    check_soak_rules.soak_gradients(context)
    assert context.numbers["problems"] >= 5
    run = backward.run

    def wrong(*given: Any) -> backward.Gradients:
        dq, dk, dv = run(*given)
        return dq, dk, dv * 1.05

    monkeypatch.setattr(backward, "run", wrong)
    with pytest.raises(AssertionError, match="dv: "):
        check_soak_rules.soak_gradients(context_of(GRADIENTS, examples=50))


def test_the_soak_finds_a_wrong_gradient_of_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    run = backward.run_bias
    monkeypatch.setattr(backward, "run_bias", lambda *given: run(*given) * 1.05)
    with pytest.raises(AssertionError, match="dbias: "):
        check_soak_rules.soak_gradients(context_of(GRADIENTS, examples=50))


def test_a_soak_without_kernels_is_skipped() -> None:
    context = context_of(SMALL, examples=5)
    check_soak_rules.soak_gradients(context)
    assert (context.skipped != "", context.numbers["problems"]) == (True, 0)


def test_threads_are_skipped_where_kernels_are_named() -> None:
    context = Context(device="cpu", kernels="*sm90*")
    check_behaviour.threads(context)
    assert context.skipped
    assert not context.failures


def test_failures_name_files_from_the_root_of_the_repository_on(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(device="cpu")
    monkeypatch.setitem(CHECKS, "broken", lambda _: 1 // 0)
    assert not child.run("broken", context)
    (failure,) = context.failures
    assert '"tests/gpu_report/child.py"' in failure
    assert "ZeroDivisionError" in failure


def test_the_rule_for_half_logits_is_no_blank_cheque() -> None:
    case = sized_case(PIPED, heads=2, seqlen_q=33, seqlen_k=70)
    launch = DeviceLaunch(context_of(PIPED).library, PIPED, case, with_lse=False)
    launch.run()
    out = launch.results[0]
    assert check_soak.half_logits_violations(case, out) == ""
    out[0, 0, 5] = out[0, 0, 6]
    assert "elements beyond" in check_soak.half_logits_violations(case, out)


def test_time_that_is_up_is_no_success() -> None:
    context = context_of(SMALL, seconds=-1.0)
    check_memory.canaries(context)
    assert "time was up" in context.failures[0]
    context = context_of(SMALL, seconds=-1.0, examples=5)
    check_soak.soak(context)
    assert context.failures == ["only 0 of 5 problems were tried before the time was up"]


def test_shards_are_all_the_kernels() -> None:
    parts = [Context(device="cpu", shard=shard, shards=5).rows() for shard in range(5)]
    assert [row for part in parts for row in part] == ROWS


def test_even_cases_keep_kv_groups_in_step() -> None:
    """Every group of every CTA takes as many key blocks as the others, where groups have barriers."""
    grouped = [row for row in ROWS if row.kv_groups > 1 and row.warps > row.kv_groups]
    assert any(row.is_split for row in grouped)
    assert any(row.is_causal for row in grouped)
    for row in grouped:
        blocks = [count for case in even_cases(row) for count in blocks_of_ctas(row, case)]
        assert blocks
        assert all(count > 0 and count % row.kv_groups == 0 for count in blocks), row.name
        assert any(count % row.kv_groups for case in few_cases(row) for count in blocks_of_ctas(row, case))


def blocks_of_ctas(row: KernelInfo, case: Case) -> Iterator[int]:
    """The key blocks of every CTA that works: those of sequence.cuh, key_range.cuh and key_split.cuh."""
    heads = case.q.shape[1] // case.k.shape[1] if row.packs_heads else 1
    batch = len(case.lengths_q.cu_seqlens) - 1 if case.lengths_q.cu_seqlens else case.batch
    queries = case.lengths_q.sequences(batch, case.seqlen_q)
    keys = case.lengths_k.sequences(batch, case.seqlen_k)
    for seqlen_q, seqlen_k in ((q.length, k.length) for q, k in zip(queries, keys, strict=True)):
        for first_row in range(0, seqlen_q * heads, row.block_m):
            last_row = min(first_row + row.block_m, seqlen_q * heads) - 1
            offset = seqlen_k - seqlen_q if case.causal is Causal.BOTTOM_RIGHT else 0
            seen = seqlen_k if case.causal is None else min(seqlen_k, last_row // heads + offset + 1)
            blocks = -(-max(seen, 0) // row.block_n)
            share = -(-blocks // max(num_splits(row, case), 1))
            yield from (min(share, blocks - first) for first in range(0, blocks, max(share, 1)))


def test_cases_reach_every_kind_of_kernel() -> None:
    for row in (SMALL, GENERAL, PIPED):
        for case in (*few_cases(row), *odd_cases(row)):
            assert case.q.is_contiguous()
            assert case.v.is_contiguous()
    assert any(case.mask is not None for case in few_cases(GENERAL))
    assert any(case.lengths_q.cu_seqlens for case in few_cases(GENERAL))
    assert all(case.p_dropout > 0 for case in few_cases(GENERAL))
