"""Masks that kernels would read element by element, as a T5 bias or one of an odd number of keys: copied once
where that pays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass import Family, attention, explain
from sdpa_cutlass.call import binding, calls, extras, planning
from sdpa_cutlass.call.arguments import Inputs, Options
from sdpa_cutlass.call.plan_cache import Plans
from sdpa_cutlass.choice import mask_reads
from sdpa_cutlass.choice.mask_reads import LONGEST_RUN, RUNS
from sdpa_cutlass.problem import MASK_ALIGNMENT, Problem
from tests.library.reference import expect_close, rand, torchs_attention

HEADERS = Path(__file__).parents[2] / "templates" / "include" / "sdpa"
BATCH, HEADS, ROWS, KEYS, HEAD_DIM = 2, 3, 37, 45, 32


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(  # type: ignore[return-value]
        rand(BATCH, HEADS, length, HEAD_DIM) for length in (ROWS, KEYS, KEYS)
    )


def t5_bias(batch: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[B, H, Sq, Sk] of memory [B, Sq, Sk, H], as transformers makes it."""
    values = torch.randn(batch, ROWS, KEYS, HEADS)
    values = values > -0.5 if dtype is torch.bool else values.to(dtype)
    return values.permute(0, 3, 1, 2)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The masks that kernels are given; from one score on, copies pay."""
    masks: list[torch.Tensor] = []
    make_plan = planning.make_plan

    def noted(bound: binding.Bound, *arguments: Any) -> Any:
        assert bound.given.mask is not None
        masks.append(bound.given.mask)
        return make_plan(bound, *arguments)

    monkeypatch.setattr(planning, "make_plan", noted)
    monkeypatch.setattr(extras, "DENSE_COPY_SCORES", 1)
    monkeypatch.setattr(calls, "_general", Plans())
    return masks


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_strided_mask_is_copied_and_means_the_same(
    batch: int, dtype: torch.dtype, planned: list[torch.Tensor]
) -> None:
    q, k, v = operands()
    mask = t5_bias(batch, dtype)
    out = attention(q, k, v, attn_mask=mask)
    expect_close(out, torchs_attention(q, k, v, attn_mask=mask.float() if dtype is torch.float32 else mask))
    assert torch.equal(out, attention(q, k, v, attn_mask=mask.contiguous()))
    copied, dense = planned
    assert copied.shape == dense.shape == (BATCH, HEADS, ROWS, KEYS)
    assert copied.stride(3) == 1
    assert copied.stride(2) * copied.element_size() % 16 == 0
    assert (copied.stride(0) == 0) == (batch == 1)  # what it broadcasts over is not written out
    assert dense.stride(2) == KEYS


def test_each_call_reads_what_the_mask_holds_then(planned: list[torch.Tensor]) -> None:
    q, k, v = operands()
    mask = t5_bias(1)
    first = attention(q, k, v, attn_mask=mask)
    mask.mul_(-3)
    second = attention(q, k, v, attn_mask=mask)
    assert not torch.equal(first, second)
    assert torch.equal(second, attention(q, k, v, attn_mask=mask.contiguous()))
    assert planned[0].stride(3) == 1
    assert planned[0].data_ptr() != mask.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool], ids=str)
def test_a_mask_of_unaligned_rows_is_copied_and_means_the_same(
    dtype: torch.dtype, planned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = operands()
    mask = t5_bias(1, dtype)[0, 0].contiguous()
    as_it_lies = mask_reads.UNALIGNED_COPY_SCORES
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    out = attention(q, k, v, attn_mask=mask)
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", as_it_lies)
    monkeypatch.setattr(calls, "_general", Plans())  # without what the other number has led to
    assert torch.equal(out, attention(q, k, v, attn_mask=mask))
    asked, copied, lying = planned  # the first time, which kernel takes it
    assert asked.data_ptr() == mask.data_ptr()
    assert lying.data_ptr() == mask.data_ptr()
    assert copied.shape == lying.shape
    assert copied.stride()[:2] == (0, 0)  # what it broadcasts over is not written out
    assert copied.stride(2) * copied.element_size() % 16 == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool], ids=str)
def test_long_rows_are_copied_however_few_they_are(dtype: torch.dtype) -> None:
    keys = mask_reads.LONG_COPY_KEYS + 1
    mask = torch.zeros(1, 2, 1, keys, dtype=dtype)
    assert extras.needs_dense_copy(mask)
    assert not extras.needs_dense_copy(mask[..., : keys - 2])
    assert not extras.needs_dense_copy(extras.dense_copy(mask))
    q, k = (torch.zeros(1, 2, length, 64, dtype=torch.float16) for length in (1, keys))
    assert explain(q, k, k, attn_mask=mask).copies


@pytest.mark.parametrize(
    ("mask", "is_aligned"),
    [
        (torch.zeros(ROWS, 48, dtype=torch.bool), True),
        (torch.zeros(ROWS, 44, dtype=torch.bool), False),
        (torch.zeros(ROWS, 56, dtype=torch.bool), True),
        (torch.zeros(ROWS, 56, dtype=torch.float16), True),
        (torch.zeros(ROWS, 52, dtype=torch.float16), False),
        (torch.zeros(ROWS, 52, dtype=torch.float32), True),
        (torch.zeros(ROWS, 51, dtype=torch.float32), False),
        (torch.zeros(ROWS, 56, dtype=torch.float16)[:, 4:52], False),
        (torch.zeros(ROWS, 56, dtype=torch.float16)[:, 8:51], True),
        (torch.zeros(1, 43), True),
        (torch.zeros(BATCH, 1, 1, 43), False),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else "",
)
def test_which_rows_are_aligned(
    mask: torch.Tensor, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    mask = mask.expand(BATCH, HEADS, ROWS, mask.shape[-1])
    assert extras.needs_dense_copy(mask) != is_aligned
    assert not extras.needs_dense_copy(extras.dense_copy(mask))


@pytest.mark.parametrize(
    ("family", "dtype", "keys"),
    [  # rows of so many keys begin where the family's vectors may, and those of half as many do not
        (Family.FMHA_FWD, torch.bool, 8),
        (Family.FMHA_FWD, torch.float32, 4),
        (Family.FMHA_FWD_Q8, torch.bool, 4),
        (Family.FMHA_FWD_Q8, torch.float16, 4),
        (Family.FMHA_FWD_SM90, torch.bool, 2),
        (Family.FMHA_FWD_SM90, torch.float16, 2),
        (Family.FMHA_FWD_SM90, torch.float32, 2),
    ],
    ids=str,
)
def test_families_read_runs_of_their_own(
    family: Family, dtype: torch.dtype, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    for count, needs_copy in ((48 + keys, False), (48 + keys // 2, True)):
        mask = torch.zeros(BATCH, HEADS, ROWS, count, dtype=dtype)
        assert extras.needs_dense_copy(mask, family) == needs_copy


@pytest.mark.parametrize("family", ["fmha_fwd", "fmha_fwd_q8", "fmha_fwd_sm90"])
def test_runs_are_those_of_the_headers(family: str) -> None:
    text = (HEADERS / family / "kernel_traits.cuh").read_text(encoding="utf-8")
    found = re.search(r"int kMaskRun = (?:kPermuteKeys \? )?(\d)", text)
    assert found is not None
    assert RUNS[family] == int(found[1]) <= LONGEST_RUN


def problem_of(q: torch.Tensor, keys: int, mask: torch.Tensor) -> Problem:
    k = v = rand(q.shape[0], q.shape[1], keys, q.shape[3])
    return binding.bind(Options(), Inputs(q, k, v, None, mask)).problem


@pytest.mark.parametrize(
    ("shape", "dtype", "alignment"),
    [
        ((1, 1, ROWS, 48), torch.bool, 16),
        ((1, 1, ROWS, 46), torch.bool, 2),
        ((1, 1, ROWS, 45), torch.bool, 1),
        ((1, 1, ROWS, 44), torch.float16, 8),
        ((1, HEADS, ROWS, 42), torch.float32, 8),
        ((1, 1, 1, 45), torch.bool, 16),  # one row, which no other follows
        ((BATCH, 1, 1, 45), torch.bool, 1),
        ((1, HEADS, 1, 46), torch.float16, 4),
    ],
    ids=str,
)
def test_problems_know_where_rows_of_their_mask_begin(
    shape: tuple[int, ...], dtype: torch.dtype, alignment: int
) -> None:
    q = rand(BATCH, HEADS, ROWS, HEAD_DIM)
    problem = problem_of(q, shape[3], torch.zeros(shape, dtype=dtype))
    assert (problem.mask_alignment, problem.mask_elements) == (alignment, torch.Size(shape).numel())
    assert problem.mask_has_one_row == (shape[2] == 1)
    runs = [problem.reads_mask_by(run) for run in (1, 2, 4, 8, 16)]
    vectors = [min(run * dtype.itemsize, MASK_ALIGNMENT) <= alignment for run in (1, 2, 4, 8, 16)]
    assert runs == vectors


def test_problems_know_of_masks_that_every_kernel_reads_a_copy_of(monkeypatch: pytest.MonkeyPatch) -> None:
    q = rand(BATCH, HEADS, ROWS, HEAD_DIM)
    assert problem_of(q, KEYS, t5_bias(BATCH)).mask_alignment == 0
    monkeypatch.setattr(extras, "DENSE_COPY_SCORES", 1)
    assert problem_of(q, KEYS, t5_bias(BATCH)).mask_alignment == MASK_ALIGNMENT


@pytest.mark.parametrize("keys", [44, 45])
def test_hoppers_kernels_take_rows_of_even_numbers_as_they_lie(
    keys: int, planned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their signature is known then."""
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    q, k, v = (rand(BATCH, HEADS, length, 64) for length in (ROWS, keys, keys))
    mask = torch.rand(BATCH, HEADS, ROWS, keys) > 0.3
    name = "fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general"
    out = attention(q, k, v, attn_mask=mask, kernel=name)
    expect_close(out, torchs_attention(q, k, v, attn_mask=mask))
    assert (planned[-1].data_ptr() == mask.data_ptr()) == (keys % 2 == 0)
    assert len(planned) == 1 + keys % 2
    notes = explain(q, k, v, attn_mask=mask, kernel=name).copies
    assert (notes == ()) == (keys % 2 == 0)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, HEADS, ROWS, KEYS),
        torch.zeros(HEADS, ROWS, 2 * KEYS)[..., :KEYS],  # rows far apart, keys side by side
        torch.zeros(BATCH, 1, ROWS, 1),  # the same for every key
        torch.zeros(1, HEADS, KEYS, ROWS)[:, :, :1, :1],
    ],
    ids=["contiguous", "long rows", "no keys", "one element"],
)
def test_others_are_read_where_they_lie(mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "DENSE_COPY_SCORES", 1)
    assert not extras.needs_dense_copy(mask.expand(BATCH, HEADS, ROWS, KEYS))


def test_small_ones_are_read_where_they_lie() -> None:
    """And their signature is known after the first call, as that of any mask."""
    mask = t5_bias(1)
    assert not extras.needs_dense_copy(mask.expand(BATCH, -1, -1, -1))
    large = torch.empty(1, 512, 512, 12).permute(0, 3, 1, 2)
    assert extras.needs_dense_copy(large)
    assert extras.needs_dense_copy(large.expand(16, -1, -1, -1))


def test_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    mask = t5_bias(1)
    assert "copied" not in str(explain(q, k, v, attn_mask=mask))
    monkeypatch.setattr(extras, "DENSE_COPY_SCORES", 1)
    text = str(explain(q, k, v, attn_mask=mask))
    assert f"copied   attn_mask, with strides (0, 1, {KEYS * HEADS}, {HEADS})" in text
    assert "copied" not in str(explain(q, k, v, attn_mask=mask.contiguous()))
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    assert "rows do not begin where" in str(explain(q, k, v, attn_mask=mask.contiguous()))
    columns = torch.randn(BATCH, HEADS, HEAD_DIM, KEYS, dtype=torch.float16).transpose(2, 3)
    assert f"copied   key, with strides {columns.stride()}" in str(explain(q, columns, v))


@pytest.mark.parametrize("num_axes", [4, 3])
def test_a_known_call_copies_its_own_mask(
    num_axes: int, planned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan has the strides of a copy: the caller's memory would be read with the wrong ones."""
    kept: list[Any] = []
    prepare = planning.prepare

    def noted(*arguments: Any) -> Any:
        kept.append(prepare(*arguments))
        return kept[-1]

    monkeypatch.setattr(calls, "prepare", noted)
    q, k, v = operands()
    for _ in range(3):
        mask = t5_bias(1)[(0,) * (4 - num_axes)]
        out = attention(q, k, v, attn_mask=mask, causal="top_left", scale=0.37)
        expected = attention(q, k, v, attn_mask=mask.contiguous(), causal="top_left", scale=0.37)
        assert torch.equal(out, expected)
    assert [found is None for found in kept] == [False, False]  # a copied mask's and a dense one's
    assert [found.copied_mask for found in kept] == [(BATCH, HEADS, ROWS, KEYS), None]


def test_no_plan_is_kept_for_a_copy_that_an_address_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the same strides elsewhere need none."""
    monkeypatch.setattr(mask_reads, "UNALIGNED_COPY_SCORES", 1)
    q, k = rand(1, HEADS, ROWS, HEAD_DIM), rand(1, HEADS, 48, HEAD_DIM)
    memory = torch.randn(HEADS * ROWS * 48 + 8, dtype=torch.float16)
    kept = []
    for start in (1, 0):
        mask = memory[start : start + HEADS * ROWS * 48].view(1, HEADS, ROWS, 48)
        options, inputs = Options(), Inputs(q, k, k, attn_mask=mask)
        bound = binding.bind(options, inputs)
        executed = planning.execute(bound, options, None, None)
        assert executed.copies_mask == (start == 1)
        kept.append(planning.prepare(executed, inputs, bound, executed.out, None))
    assert kept[0] is None
    assert kept[1] is not None
