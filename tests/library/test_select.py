"""The cost model and the registry: choices on known grids, quantisation, masks, names of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdpa_cutlass import Causal, DType, Family, KernelInfo, MaskType, Problem, kernels
from sdpa_cutlass.choice.cost import MODELS, estimate
from sdpa_cutlass.choice.legal import mismatches
from sdpa_cutlass.library.device import HOST, DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Op, Takes
from sdpa_cutlass.problem import ATTENTION_DTYPES
from tests.kernel_rows import GENERAL, UNBIASED, dropping, kernel_row

H200 = DeviceInfo(
    target=Target.CUDA, index=0, name="H200", compute_capability=(9, 0), sms=132, mma_flops_per_clock=2580
)
QUANTISED = (Family.FMHA_FWD_Q8, Family.FMHA_FWD_Q8_SM90)


def kernel(block_m: int, block_n: int, warps: int, kv_groups: int = 1, ctas_per_sm: int = 1) -> KernelInfo:
    return kernel_row(
        f"m{block_m}n{block_n}w{warps}g{kv_groups}",
        block_m=block_m,
        block_n=block_n,
        stages=2,
        warps=warps,
        kv_groups=kv_groups,
        smem_bytes=49152 if kv_groups == 1 else kv_groups * 3 * 2 * 64 * block_n,
        ctas_per_sm=ctas_per_sm,
    )


def problem(batch: int, seqlen_q: int, seqlen_k: int | None = None, causal: Causal | None = None) -> Problem:
    return Problem(
        dtype=DType.F16,
        batch=batch,
        num_heads_q=8,
        num_heads_kv=8,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if seqlen_k is None else seqlen_k,
        head_dim=64,
        causal=causal,
    )


CAUSAL = Causal.TOP_LEFT
MEASURED = [  # µs on an H200, 2026-11; test_measured_choices.py has those of few keys without KV groups
    (kernel(32, 128, 4, 2), problem(1, 512), 4.98),
    (kernel(32, 128, 4, 2), problem(2, 512), 6.83),
    (kernel(32, 128, 4, 2), problem(1, 512, causal=CAUSAL), 5.46),
    (kernel(32, 128, 4, 2), problem(1, 128), 3.32),
    (kernel(16, 64, 4, 4), problem(1, 512), 5.42),
    (kernel(16, 64, 4, 4), problem(2, 512), 9.48),
    (kernel(16, 64, 4, 4), problem(1, 512, causal=CAUSAL), 5.25),
    (kernel(16, 64, 4, 4), problem(1, 128), 2.93),
    (kernel(32, 64, 4, 2), problem(1, 512), 5.30),
    (kernel(32, 64, 8, 4), problem(1, 512), 5.50),
    (kernel(32, 32, 8, 4), problem(1, 512), 5.56),
    (kernel(64, 64, 8, 2), problem(1, 512), 7.33),
    (kernel(64, 128, 4, 1, 2), problem(2, 2048, causal=CAUSAL), 36.47),
    (kernel(128, 64, 4, 1, 2), problem(2, 2048, causal=CAUSAL), 42.23),
]


@pytest.mark.parametrize(
    ("row", "task", "microseconds"), MEASURED, ids=lambda value: getattr(value, "name", None)
)
def test_the_model_reproduces_its_measurements(row: KernelInfo, task: Problem, microseconds: float) -> None:
    assert estimate(row, task, H200).microseconds == pytest.approx(microseconds, rel=0.2)


def test_groups_win_on_small_grids_and_tall_tiles_on_large_ones() -> None:
    rows = [kernel(16, 64, 4, 4), kernel(32, 128, 4, 2), kernel(64, 64, 4, 1, 2), kernel(128, 64, 4, 1, 2)]

    def best(task: Problem) -> str:
        return min(rows, key=lambda row: estimate(row, task, H200).cycles).name

    assert best(problem(1, 512)) == "m32n128w4g2"
    assert best(problem(1, 512, causal=CAUSAL)) == "m16n64w4g4"
    assert best(problem(1, 128)) == "m16n64w4g4"
    assert best(problem(8, 128)) == "m64n64w4g1"
    assert best(problem(8, 2048)) == "m128n64w4g1"
    assert best(problem(8, 512, causal=CAUSAL)) == "m64n64w4g1"
    assert best(problem(1, 1, 8192)) == "m16n64w4g4"


def test_waste_in_partial_tiles_counts() -> None:
    row = kernel(128, 64, 4, 1, 2)
    full, partial = estimate(row, problem(1, 1024), H200), estimate(row, problem(1, 1025), H200)
    assert full.useful == pytest.approx(1)
    assert partial.useful == pytest.approx(1025 / 1152 * 1025 / 1088)
    assert partial.cycles > full.cycles


def test_causal_costs_about_half() -> None:
    row = dataclasses.replace(kernel(128, 64, 4, 1, 2), takes=Takes.CAUSAL | Takes.UNDROPPED)
    ratio = (
        estimate(row, problem(8, 4096, causal=Causal.TOP_LEFT), H200).cycles
        / estimate(row, problem(8, 4096), H200).cycles
    )
    assert 0.5 < ratio < 0.56


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 9), (9, 5), (7, 7), (1, 20), (20, 1)])
def test_visible_scores(causal: Causal | None, rows: int, keys: int) -> None:
    task = problem(1, rows, keys, causal)
    seen = [(i, j) for i in range(rows) for j in range(keys) if causal is None or j <= i + task.causal_offset]
    assert task.visible_scores == len(seen)


def test_mismatches_name_what_differs() -> None:
    row = dataclasses.replace(
        kernel(64, 64, 4), head_dim=80, takes=Takes.CAUSAL | Takes.DROPOUT, dtype=DType.BF16
    )
    assert mismatches(row, problem(1, 4)) == [
        "dtype is bf16, not f16",
        "is causal",
        "applies dropout",
        "head_dim is 80, not 64",
    ]
    assert mismatches(kernel(64, 64, 4), problem(1, 4)) == []
    everything = dataclasses.replace(
        problem(1, 4), head_dim_v=72, mask=MaskType.BOOL, has_dropout=True, has_lengths=True
    )
    assert mismatches(kernel(64, 64, 4), everything) == [
        "takes no mask",
        "takes no lengths",
        "applies no dropout",
        "value's head_dim is query's",
    ]


def test_general_kernels_take_what_plain_ones_do_not() -> None:
    row = dataclasses.replace(kernel(64, 64, 4), head_dim=80, takes=GENERAL)
    dropout = dataclasses.replace(row, takes=dropping(GENERAL))
    for task in (
        problem(1, 4),
        problem(1, 4, causal=Causal.BOTTOM_RIGHT),
        dataclasses.replace(problem(1, 4), head_dim=8, head_dim_v=80, mask=MaskType.F32, has_lengths=True),
    ):
        assert mismatches(row, task) == []
        assert mismatches(dropout, task) == ["applies dropout"]
        task = dataclasses.replace(task, has_dropout=True)
        assert mismatches(row, task) == ["applies no dropout"]
        assert mismatches(dropout, task) == []
    for sizes in ({"head_dim": 88}, {"head_dim_v": 88}):
        assert mismatches(row, dataclasses.replace(problem(1, 4), **sizes)) == ["head_dim is at most 80"]


def test_unbiased_kernels_take_boolean_masks_only() -> None:
    row = dataclasses.replace(kernel(64, 64, 4), takes=UNBIASED)
    for mask in MaskType:
        task = dataclasses.replace(problem(1, 4), mask=mask, has_lengths=True)
        assert mismatches(row, task) == ([] if mask is MaskType.BOOL else ["takes no bias"])
    assert mismatches(row, problem(1, 4)) == []


def test_general_kernels_cost_more_and_head_dim_counts() -> None:
    plain, task = kernel(64, 64, 4), problem(8, 1024)
    general = dataclasses.replace(plain, takes=GENERAL)

    def cycles(row: KernelInfo, **changes: object) -> float:
        return estimate(row, dataclasses.replace(task, **changes), H200).cycles

    assert cycles(plain) < cycles(general) < 1.18 * cycles(plain)
    for mask in MaskType:
        assert cycles(general) < cycles(general, mask=mask) < 1.5 * cycles(general)
    assert cycles(general, has_dropout=True) > cycles(general)
    wider = dataclasses.replace(general, head_dim=128)
    assert cycles(wider, head_dim=32, head_dim_v=32) > cycles(general, head_dim=32, head_dim_v=32)
    assert cycles(general) < cycles(general, head_dim=32, head_dim_v=32) < 1.3 * cycles(general)
    assert cycles(general, head_dim_v=32) == pytest.approx(cycles(general), rel=0.005)


def test_names_say_what_rows_are() -> None:
    rows = kernels(Target.HOST)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.family is Family.COMBINE:
            name = f"combine_sm{row.arch}_d{row.head_dim}_s{row.stages}_w{row.warps}_{row.dtype.value}"
            assert row.name == name
            continue
        if row.family is Family.FMHA_BWD:
            name = f"fmha_bwd_sm{row.arch}_d{row.head_dim}_m{row.block_m}n{row.block_n}"
            name += f"_s{row.stages}_w{row.warps}_q{row.detail('dq_block_m')}k{row.detail('dq_block_n')}"
            name += f"_{row.dtype.value}"
            assert row.name == name + "_dropout" * row.has_dropout
            continue
        if row.family is Family.FMHA_BWD_FUSED:
            name = f"fmha_bwd_fused_sm{row.arch}_d{row.head_dim}_m{row.block_m}n{row.block_n}"
            name += f"_s{row.stages}_w{row.warps}_{row.dtype.value}"
            assert row.name == name + "_dropout" * row.has_dropout
            continue
        lead = row.family.value.removesuffix("_sm90")
        name = f"{lead}_sm{row.arch}_d{row.head_dim}_m{row.block_m}n{row.block_n}"
        name += (
            f"_s{row.stages}_w{row.warps}"
            + f"_g{row.kv_groups}" * (row.kv_groups > 1)
            + "_qreg" * row.q_in_regs
            + "_c2" * (row.detail("cluster", 1) == 2)
            + f"_{row.dtype.value}"
        )
        if row.family in QUANTISED:
            name += {Accuracy.INT8: "_int8", Accuracy.INT8_QK: "_int8qk"}[row.accuracy]
            assert row.name == name + "_split" * row.is_split
            continue
        name += "_causal" * row.is_causal + "_general" * row.is_general + "_dropout" * row.has_dropout
        name += "_split" * row.is_split + "_unbiased" * row.is_unbiased
        assert row.name == name
        assert row.is_general or not (row.has_dropout or row.is_split)
        assert not (row.is_split and row.has_dropout)
        assert not row.is_unbiased or (row.is_general and not row.has_dropout and not row.is_split)
        assert not (row.is_general and row.is_causal)


def test_every_head_dim_has_every_variant_in_every_family() -> None:
    rows = kernels(Target.HOST)
    all_general = (*QUANTISED, Family.FMHA_BWD, Family.FMHA_BWD_FUSED)
    found = {(row.family, row.head_dim, row.dtype, row.is_causal) for row in rows}
    wanted = {
        (family, head_dim, dtype, is_causal)
        for family in MODELS
        if family not in all_general  # and for smaller head_dims too
        for head_dim in (
            (64, 80, 96, 128, 160, 192, 256) if family is Family.FMHA_FWD_SM90 else (32, 64, 80, 96, 128)
        )
        for dtype in ATTENTION_DTYPES
        for is_causal in (False, True)
    }
    assert found >= wanted


def test_every_row_has_a_cost() -> None:
    for row in (row for row in kernels(Target.HOST) if row.op is Op.FORWARD):
        task = dataclasses.replace(
            problem(1, 100, 300, Causal.TOP_LEFT if row.is_causal else None),
            head_dim=row.head_dim,
            head_dim_v=row.head_dim,
            dtype=row.dtype,
        )
        cost = estimate(row, task, HOST)
        assert cost.cycles > 0
        assert cost.ctas > 0
        assert 0 < cost.useful <= 1


def test_flops_and_bytes() -> None:
    task = problem(2, 512)
    assert task.flops == 4 * 2 * 8 * 512 * 512 * 64
    assert dataclasses.replace(task, causal=Causal.TOP_LEFT).flops == task.flops // 2
    assert task.bytes == 2 * 2 * 512 * 64 * 2 * (8 + 8)
    assert dataclasses.replace(task, num_heads_kv=2).bytes == 2 * 2 * 512 * 64 * 2 * (8 + 2)
    wider = dataclasses.replace(task, head_dim_v=192)
    assert wider.flops == 2 * task.flops
    assert wider.bytes == 2 * task.bytes


@pytest.mark.parametrize(
    ("limits", "seen"),
    [
        ({}, 100),
        ({"causal": Causal.TOP_LEFT}, 8),
        ({"causal": Causal.BOTTOM_RIGHT}, 100),
        ({"window": (10, 0)}, 18),
        ({"window": (10, 2)}, 18),
        ({"window": (-1, 2)}, 100),
        ({"causal": Causal.TOP_LEFT, "diagonal": -3}, 5),
        ({"causal": Causal.TOP_LEFT, "diagonal": -8}, 0),
        ({"window": (2, -1), "diagonal": 50}, 52),
    ],
    ids=str,
)
def test_keys_that_no_row_sees_are_not_read(limits: dict[str, Any], seen: int) -> None:
    task = dataclasses.replace(problem(1, 8, 100), **limits)
    assert task.seen_keys == seen
    assert task.bytes == problem(1, 8, seen).bytes


def test_what_the_l2_cache_cannot_hold_takes_the_drams_time() -> None:
    """Of all kernels; prices of the SMs are a little higher where that is nearly as long."""
    card = dataclasses.replace(H200, l2_bytes=50 * 2**20, dram_gbps=4800.0)
    row = kernel(16, 64, 4, kv_groups=4)
    small, large = problem(1, 64, 4096), problem(32, 1, 16384)
    assert small.bytes < card.l2_bytes < large.bytes
    for task in small, large:
        found, blind = estimate(row, task, card), estimate(row, task, H200)
        assert (found.cycles > blind.cycles) == (task is large)
        assert (found.microseconds > blind.microseconds) == (task is large)
    assert found.dram_us == pytest.approx(large.bytes / 4464e3)
    assert found.microseconds == pytest.approx(found.dram_us + 1500 / 1750)
    assert problem(1, 5, 9, Causal.BOTTOM_RIGHT).causal_offset == 4
    assert problem(1, 5, 9, Causal.TOP_LEFT).causal_offset == 0
