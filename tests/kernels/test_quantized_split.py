"""Split kernels of 8 bits: the CTAs of a tile share its keys, its rows are those of all heads of a key head.

What they have in common with other quantised kernels is tested beside those, with one CTA and with three.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.structs import MAX_TILES
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks, refusal_of, run_case
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.test_lengths import fill_beyond
from tests.kernels.test_quantized import check_contract
from tests.kernels.test_quantized_model import check_model

pytestmark = pytest.mark.kernels(split=True, splits=(1,))

ALIGNMENTS = (None, *Causal)
BLOCK = 64
KEYS = 9 * BLOCK + 13  # ten blocks, the last of them cut
SPLITS = (1, 2, 3, 7, 13)  # of ten blocks, 5, 4 and 2 (and two splits of none), more than blocks
MOST = 1024


def check_nothing_beyond_is_read(quantized_kernel: TestedKernel, case: Case, *, bshd: bool = False) -> None:
    """The contract, and the same bits where what lies beyond the lengths is NaN."""
    check_contract(quantized_kernel, case, few_keys=True, bshd=bshd)
    before = run_case(quantized_kernel, case, bshd=bshd)
    filled = dataclasses.replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
    fill_beyond(filled)
    for found, want in zip(run_case(quantized_kernel, filled, bshd=bshd), before, strict=True):
        assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))  # NaN: rows of no sequence


@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 32])
def test_ratios_and_splits(quantized_kernel: TestedKernel, ratio: int) -> None:
    """Against the arithmetic in NumPy: tiles begin and end within a position's heads."""
    for i, (rows, num_splits) in enumerate(zip((33, 17, 16, 5, 2, 1), (*SPLITS, MOST), strict=True)):
        inputs = random_qkv(quantized_kernel, rows, KEYS, batch=1, heads=2 * ratio, heads_kv=2)
        check_model(quantized_kernel.with_splits(num_splits), Case(**inputs, causal=ALIGNMENTS[i % 3]))


def test_every_split_may_have_a_block(quantized_kernel: TestedKernel) -> None:
    """All splits are active; the last CTA reads them sixteen at a time."""
    for most in (15, 16, 17, 40):
        inputs = random_qkv(quantized_kernel, 1, (most - 1) * BLOCK + 1, batch=1, heads=3)
        check_model(quantized_kernel.with_splits(most), Case(**inputs))


@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_lengths_that_leave_splits_empty(quantized_kernel: TestedKernel, causal: Causal | None) -> None:
    case = Case(
        **random_qkv(quantized_kernel, 11, KEYS, batch=8, heads=6, heads_kv=2),
        causal=causal,
        lengths_q=Lengths(seqlens=(11, 11, 3, 11, 0, 11, 7, 11)),
        lengths_k=Lengths(seqlens=(KEYS, 0, 1, BLOCK, 50, BLOCK + 1, 3 * BLOCK, 2**31 - 1)),
    )
    for num_splits in SPLITS:
        check_nothing_beyond_is_read(quantized_kernel.with_splits(num_splits), case)
        out, lse = run_case(quantized_kernel.with_splits(num_splits), case)
        for empty in (out[1], out[2, :, 3:], out[4], out[6, :, 7:]):
            assert (empty == 0).all()
        for empty in (lse[1], lse[2, :, 3:], lse[4], lse[6, :, 7:]):
            assert (empty == -math.inf).all()
    few = dataclasses.replace(case, q=case.q[:3, :, :1], lengths_q=Lengths(seqlens=(1, 1, 0)))
    few = dataclasses.replace(few, k=case.k[:3], v=case.v[:3], lengths_k=Lengths(seqlens=(KEYS, 0, 1)))
    check_contract(quantized_kernel.with_splits(MOST), few, few_keys=True)


@pytest.mark.parametrize("causal", ALIGNMENTS)
@pytest.mark.parametrize("bshd", [True, False], ids=["token-major", "head-major"])
def test_packed_sequences(quantized_kernel: TestedKernel, causal: Causal | None, bshd: bool) -> None:
    total = 4 + KEYS + 3 * BLOCK
    case = Case(
        **random_qkv(quantized_kernel, 50, total, batch=1, heads=8, heads_kv=2, bshd=bshd),
        causal=causal,
        lengths_q=Lengths(cu_seqlens=(2, 3, 3, 20, 49, 50)),
        lengths_k=Lengths(cu_seqlens=(1, 1 + KEYS, 2 + KEYS, 2 + KEYS + BLOCK, 2 + KEYS + BLOCK, total)),
    )
    for num_splits in (1, 3, 7):
        check_nothing_beyond_is_read(quantized_kernel.with_splits(num_splits), case, bshd=bshd)


@pytest.mark.parametrize("window", [(0, 0), (70, 0), (-1, 20), (300, 33)], ids=str)
def test_windows(quantized_kernel: TestedKernel, window: tuple[int, int]) -> None:
    for num_splits in (1, 3, 7):
        case = Case(**random_qkv(quantized_kernel, 40, KEYS, batch=1, heads=4, heads_kv=2), window=window)
        check_contract(quantized_kernel.with_splits(num_splits), case, few_keys=True)


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_sinks_and_keys_of_a_large_mean(quantized_kernel: TestedKernel, spread: float) -> None:
    """q·c comes back once, to the sum of all parts, and before the sink joins it."""
    inputs = random_qkv(quantized_kernel, 5, KEYS, batch=2, heads=6, heads_kv=2)
    inputs["k"] += 6 * torch.randn_like(inputs["k"][:, :, :1])
    sinks = random_sinks(quantized_kernel, 6, torch.float32, spread)
    for num_splits in (1, 3, 13):
        for given in (None, sinks):
            check_contract(quantized_kernel.with_splits(num_splits), Case(**inputs, sinks=given))


def test_rows_that_see_no_key(quantized_kernel: TestedKernel) -> None:
    """More rows than keys, aligned at the end: of a tile, some rows, all rows, or none see keys."""
    rows, keys = 20, BLOCK + 5
    inputs = random_qkv(quantized_kernel, rows + keys, keys, batch=2, heads=8, heads_kv=2)
    for num_splits in (1, 2, 7):
        out, lse = run_case(
            quantized_kernel.with_splits(num_splits), Case(**inputs, causal=Causal.BOTTOM_RIGHT)
        )
        assert (out[:, :, :rows] == 0).all()
        assert (lse[:, :, :rows] == -math.inf).all()
        assert lse[:, :, rows:].isfinite().all()


def test_a_nan_comes_out_of_any_split(quantized_kernel: TestedKernel) -> None:
    """Of every row: its key has a scale with others."""
    for key in (0, KEYS // 2, KEYS - 1):
        inputs = random_qkv(quantized_kernel, 3, KEYS, batch=1, heads=4)
        inputs["k"][:, :, key] = math.nan
        for num_splits in (1, 3, 7):
            out, lse = run_case(quantized_kernel.with_splits(num_splits), Case(**inputs))
            assert out.isnan().all()
            assert lse.isnan().all()


def test_softmax_lse_is_optional(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 5, KEYS, heads=6, heads_kv=2))
    for num_splits in (1, 3):
        split = quantized_kernel.with_splits(num_splits)
        assert torch.equal(run_case(split, case)[0], run_case(split, case, with_lse=False)[0])


@pytest.mark.kernels(device="cpu", split=True, splits=(1,))
def test_schedules_and_threads_do_not_change_a_bit(quantized_kernel: TestedKernel) -> None:
    """Threads decide which CTA of a tile is the last one, seeds the order within it."""
    case = Case(
        **random_qkv(quantized_kernel, 9, KEYS, batch=3, heads=8, heads_kv=2),
        causal=Causal.BOTTOM_RIGHT,
        lengths_k=Lengths(seqlens=(KEYS, KEYS // 2, 1)),
    )
    split, host = quantized_kernel.with_splits(3), library(Target.HOST)
    first = run_case(split, case)
    try:
        for seed, threads in ((1, 1), (2, 3), (3, 2)):
            host.host_configure(schedule_seed=seed, num_threads=threads)
            assert all(map(torch.equal, first, run_case(split, case))), f"schedule seed {seed}"
    finally:
        host.host_configure(num_threads=HOST_THREADS)


def test_numbers_of_splits_that_are_refused(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 1, BLOCK, batch=1, heads=1))
    for num_splits in (-1, 0, 1025):
        reason = refusal_of(quantized_kernel, case, num_splits=num_splits)
        assert reason is not None
        assert f"num_splits is {num_splits}; this kernel takes 1 to 1024" in reason
    assert refusal_of(quantized_kernel, case, num_splits=2, batch=MAX_TILES) is None
    assert "more than 1 split takes at most" in (
        refusal_of(quantized_kernel, case, num_splits=2, batch=MAX_TILES + 1) or ""
    )


@pytest.mark.kernels(split=False)
def test_no_other_kernel_splits(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, 1, BLOCK, batch=1, heads=1))
    assert "this kernel takes 0" in (refusal_of(quantized_kernel, case, num_splits=2) or "")
