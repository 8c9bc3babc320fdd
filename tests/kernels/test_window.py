"""Sliding windows: which keys a row sees, in every kernel that takes lengths; sizes relative to its tile."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.registry import Takes
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, launch, make_case_params, random_qkv, refusal_of, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import random_mask

ALIGNMENTS = (None, *Causal)
SPLITS = (1, 2, 3)


def all_splits(kernel: TestedKernel) -> list[TestedKernel]:
    """`kernel` with several numbers of splits, where it takes them."""
    return [kernel.with_splits(count) for count in SPLITS] if kernel.info.is_split else [kernel]


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_left_and_right_next_to_block_borders(lengths_kernel: TestedKernel, causal: Causal | None) -> None:
    m, n = lengths_kernel.info.block_m, lengths_kernel.info.block_n
    inputs = random_qkv(lengths_kernel, 2 * m + 5, 4 * n + 9, batch=1, heads=1)
    kernels = itertools.cycle(all_splits(lengths_kernel))
    for left in (0, 1, n - 2, n - 1, n, n + 1, 2 * n, -1):
        for right in (0, 1, n - 1, n, -1) if causal is None else (-1,):
            check_case(next(kernels), Case(**inputs, causal=causal, window=(left, right)))


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
@pytest.mark.parametrize("causal", ALIGNMENTS)
@pytest.mark.parametrize("sizes", [(1, 300), (300, 40), (40, 300), (1, 1)], ids=str)
def test_rows_before_and_behind_the_keys(
    lengths_kernel: TestedKernel, causal: Causal | None, sizes: tuple[int, int]
) -> None:
    """Some rows see no key: their output is 0, their softmax_lse -inf."""
    inputs = random_qkv(lengths_kernel, *sizes, batch=1)
    for window in ((0, 0), (7, 3), (100, -1), (-1, 30), (2**31 - 1, 2**31 - 1)):
        case = Case(**inputs, causal=causal, window=window)
        for kernel in all_splits(lengths_kernel):
            check_case(kernel, case)


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
@pytest.mark.parametrize("window", [(5, -1), (90, 20), (0, 0)], ids=str)
def test_lengths_and_packed_sequences(lengths_kernel: TestedKernel, window: tuple[int, int]) -> None:
    """The window counts from each sequence's own last row and key."""
    padded = Case(
        **random_qkv(lengths_kernel, 70, 200, batch=5, heads=4, heads_kv=2),
        window=window,
        lengths_q=Lengths(seqlens=(70, 1, 0, 33, 70)),
        lengths_k=Lengths(seqlens=(200, 130, 5, 0, 64)),
    )
    packed = Case(
        **random_qkv(lengths_kernel, 50, 260, batch=1, heads=4, heads_kv=2),
        window=window,
        lengths_q=Lengths(cu_seqlens=(2, 3, 3, 20, 49, 50)),
        lengths_k=Lengths(cu_seqlens=(1, 131, 132, 190, 192, 260)),
    )
    for case in (padded, packed):
        for kernel in all_splits(lengths_kernel):
            check_case(kernel, case)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32], ids=str)
def test_next_to_a_mask(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    if dtype is not torch.bool and len(general_kernel.info.mask_types) == 1:
        pytest.skip("takes no bias")
    inputs = random_qkv(general_kernel, 100, 230, batch=1)
    mask = random_mask(dtype, (1, 2, 100, 230), general_kernel.device, seed=3, density=0.5)
    for window in ((20, 5), (70, -1)):
        check_case(general_kernel, Case(**inputs, mask=mask, window=window))


def test_next_to_dropout(dropout_kernel: TestedKernel) -> None:
    if Takes.WINDOW not in dropout_kernel.info.takes:
        pytest.skip("takes no window")
    inputs = random_qkv(dropout_kernel, 100, 230, batch=1)
    check_case(dropout_kernel, Case(**inputs, window=(60, 9), p_dropout=0.3, philox=PhiloxState(5, 6)))


def test_keys_outside_the_window_are_not_read(lengths_kernel: TestedKernel) -> None:
    """NaN in V of blocks that no row of a tile sees, and in K of keys that no row sees, changes nothing."""
    n = lengths_kernel.info.block_n
    inputs = random_qkv(lengths_kernel, 3, 6 * n, batch=1)
    window = (n, -1)
    clean, clean_lse = run_case(lengths_kernel, Case(**inputs, window=window, causal=Causal.BOTTOM_RIGHT))
    first_seen = 6 * n - 3 - n
    inputs["k"][:, :, :first_seen] = math.nan
    inputs["v"][:, :, : first_seen // n * n] = math.nan
    out, lse = run_case(lengths_kernel, Case(**inputs, window=window, causal=Causal.BOTTOM_RIGHT))
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


def test_a_window_wide_enough_changes_no_bit(lengths_kernel: TestedKernel) -> None:
    inputs = random_qkv(lengths_kernel, 50, 170, batch=1)
    for causal in ALIGNMENTS:
        out, lse = run_case(lengths_kernel, Case(**inputs, causal=causal))
        for window in ((-1, -1), (169, 169), (2**31 - 1, -1)):
            wide, wide_lse = run_case(lengths_kernel, Case(**inputs, causal=causal, window=window))
            assert torch.equal(out, wide)
            assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize("offset", [-(2**31), -(2**31) + 9, -70, 2**31 - 1, 2**31 - 9])
def test_offsets_at_the_ends_of_int32(lengths_kernel: TestedKernel, offset: int) -> None:
    """No sum of offset and window overflows: every row is before the first key, or behind the last one."""
    case = Case(**random_qkv(lengths_kernel, 40, 90, batch=1), window=(3, 2))
    out, lse = torch.ones_like(case.q), torch.ones(1, 2, 40, device=case.q.device)
    params, held = make_case_params(case, out, lse)
    params.causal_offset = offset
    launch(lengths_kernel, params, held)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"has_window": 2}, "has_window is 2; it must be 0 or 1"),
        ({"window_left": -2}, "window_left is -2 and window_right 4; they must be at least 0, or -1"),
        ({"window_right": -9}, "window_left is 3 and window_right -9"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(lengths_kernel: TestedKernel, changes: dict[str, int], word: str) -> None:
    case = Case(**random_qkv(lengths_kernel, 4, 9, batch=1), window=(3, 4))
    assert refusal_of(lengths_kernel, case) is None
    assert word in (refusal_of(lengths_kernel, case, **changes) or "")


def test_plain_kernels_take_none(fused_kernel: TestedKernel) -> None:
    causal = Causal.TOP_LEFT if fused_kernel.info.is_causal else None
    case = Case(**random_qkv(fused_kernel, 8, 8), causal=causal, window=(3, 2))
    reason = refusal_of(fused_kernel, case)
    assert "window is (3, 2); this kernel takes none" in (reason or "")
