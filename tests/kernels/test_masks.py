"""Boolean masks and biases in every general kernel: shapes, memory layouts, special values, other options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, make_case_params, random_qkv, random_sinks, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import BIAS_DTYPES, LAYOUTS, MASK_DTYPES, MASK_SHAPES, mask_dtypes, random_mask

ALIGNMENTS = (None, *Causal)
DTYPE_IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


def small_sizes(kernel: TestedKernel) -> tuple[int, int]:
    """Less than one block of rows, or some of a second small one; more than two blocks of keys for each group
    of warps.
    """
    return max(kernel.info.block_m - 11, 21), (kernel.info.kv_groups + 1) * kernel.info.block_n + 13


@pytest.mark.parametrize("pattern", MASK_SHAPES)
def test_shapes(general_kernel: TestedKernel, pattern: str) -> None:
    rows, keys = small_sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys)
    for i, dtype in enumerate(mask_dtypes(general_kernel.info)):
        mask = random_mask(dtype, MASK_SHAPES[pattern](2, 2, rows, keys), general_kernel.device, seed=i)
        check_case(general_kernel, Case(**inputs, mask=mask, causal=ALIGNMENTS[i % 3]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(general_kernel: TestedKernel, layout: str) -> None:
    rows, keys = small_sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys, bshd=True)
    for i, dtype in enumerate(mask_dtypes(general_kernel.info)):
        mask = random_mask(dtype, (2, 1, rows, keys), general_kernel.device, seed=i, layout=layout)
        check_case(general_kernel, Case(**inputs, mask=mask, causal=ALIGNMENTS[(i + 1) % 3]))


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_sizes(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """Several blocks of rows, and keys that end in and beside every vector of the mask's loads."""
    m, n = general_kernel.info.block_m, general_kernel.info.block_n
    for i, (rows, keys) in enumerate([(1, 1), (1, 97), (m + 1, n), (3, n + 1), (5, 2 * n - 7), (2, n + 8)]):
        inputs = random_qkv(general_kernel, rows, keys, batch=1)
        for layout in ("aligned", "dense"):
            mask = random_mask(dtype, (rows, keys), general_kernel.device, seed=i, layout=layout)
            check_case(general_kernel, Case(**inputs, mask=mask))


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_rows_and_blocks_that_are_fully_masked(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    rows, keys = small_sizes(general_kernel)
    n = general_kernel.info.block_n
    seen = torch.rand(rows, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:16] = seen[rows - 1] = False  # all rows of one warp, and one beside rows that see keys
    seen[16, n:] = False  # sees keys of the block that is visited last only
    seen[17, :n] = False
    seen[18] = False
    seen[18, 3] = True
    seen[:, n : 2 * n] = False  # all of one block
    mask = seen.to(general_kernel.device)
    if dtype is not torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
    inputs = random_qkv(general_kernel, rows, keys)
    for causal in ALIGNMENTS:
        out, lse = check_case(general_kernel, Case(**inputs, mask=mask, causal=causal))
        for row in (*range(16), rows - 1):
            assert (out[:, :, row] == 0).all()
            assert (lse[:, :, row] == -math.inf).all()


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_a_mask_that_hides_everything(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    rows, keys = small_sizes(general_kernel)
    mask = random_mask(dtype, (1, 1), general_kernel.device, density=0)
    out, lse = run_case(general_kernel, Case(**random_qkv(general_kernel, rows, keys, batch=1), mask=mask))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_nan_and_infinite_keys_behind_false_do_not_count(
    general_kernel: TestedKernel, causal: Causal | None
) -> None:
    """A boolean mask selects: what the key of a hidden score holds is gone, and not a bit changes."""
    rows, keys = small_sizes(general_kernel)
    mask = random_mask(torch.bool, (2, 1, rows, keys), general_kernel.device, density=0.5)
    mask[:, :, :, 4] = mask[:, :, :, keys - 1] = False
    mask[1, :, :, :20] = False
    clean = Case(**random_qkv(general_kernel, rows, keys), mask=mask, causal=causal)
    out, lse = check_case(general_kernel, clean)
    clean.k[:, :, 4] = math.nan
    clean.k[:, :, keys - 1, ::3] = math.inf
    clean.k[1, :, :20] = -math.inf
    dirty_out, dirty_lse = run_case(general_kernel, clean)
    assert torch.equal(dirty_out, out)
    assert torch.equal(dirty_lse, lse)


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_the_lowest_finite_bias(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """finfo.min hides a key beside others. In a row of nothing else it is a bias like any other: that of
    float16 leaves the scores their differences, those of bfloat16 and float32 swallow them, as in torch.
    """
    rows, keys = small_sizes(general_kernel)
    lowest = torch.finfo(dtype).min
    mask = random_mask(dtype, (rows, keys), general_kernel.device)
    mask = mask.clamp(min=lowest)
    mask[7:9] = lowest
    mask[9] = -math.inf
    mask[9, 3:70] = lowest
    mask[10] = lowest
    mask[10, 5] = 0
    case = Case(**random_qkv(general_kernel, rows, keys, batch=1), mask=mask)
    out, _ = check_case(general_kernel, case)
    if dtype is not torch.float16:
        mean = case.v.double().mean(2, keepdim=True)
        torch.testing.assert_close(out[:, :, 7:9].double(), mean.expand(1, 2, 2, -1), atol=1e-3, rtol=1e-2)


def test_other_masks_are_refused(general_kernel: TestedKernel) -> None:
    """Those that the kernel has no function for."""
    rows, keys = small_sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys, batch=1)
    taken = mask_dtypes(general_kernel.info)
    for dtype in MASK_DTYPES:
        mask = random_mask(dtype, (rows, keys), general_kernel.device)
        params, _held = make_case_params(Case(**inputs, mask=mask), torch.empty_like(inputs["q"]), None)
        reason = general_kernel.library.refusal(general_kernel.info.index, params)
        assert (reason is None) == (dtype in taken)
        assert reason is None or "mask is a bias; this kernel takes boolean masks" in reason


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-6, 8.0])
def test_scales(general_kernel: TestedKernel, scale: float) -> None:
    """The scale is applied to the scores and not to the bias."""
    rows, keys = small_sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys, batch=1)
    for dtype in mask_dtypes(general_kernel.info):
        mask = random_mask(dtype, (rows, keys), general_kernel.device)
        check_case(general_kernel, Case(**inputs, mask=mask, scale=scale))


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_a_bias_may_have_any_size(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """Alibi-like slopes, and rows whose bias is far from 0: only differences within a row matter."""
    rows, keys = small_sizes(general_kernel)
    slope = torch.arange(keys, dtype=torch.float32) - torch.arange(rows, dtype=torch.float32)[:, None]
    shift = torch.tensor([-3000.0, 0.0, 800.0, 20000.0]).repeat(rows)[:rows, None]
    mask = (torch.tensor([[[0.5]], [[4.0]]]) * slope + shift).to(general_kernel.device, dtype)
    inputs = random_qkv(general_kernel, rows, keys, batch=1)
    check_case(general_kernel, Case(**inputs, mask=mask, causal=Causal.BOTTOM_RIGHT))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], **DTYPE_IDS)
def test_beside_lengths(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """A mask counts rows and columns within a sequence, padded or packed."""
    rows, keys = small_sizes(general_kernel)
    mask = random_mask(dtype, (2, 2, rows, keys), general_kernel.device)
    padded = Case(
        **random_qkv(general_kernel, rows, keys),
        mask=mask,
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(rows - 9, rows)),
        lengths_k=Lengths(seqlens=(keys, keys - 20)),
    )
    check_case(general_kernel, padded)
    packed = Case(
        **random_qkv(general_kernel, rows + 9, keys + 30, batch=1),
        mask=mask,
        causal=Causal.TOP_LEFT,
        lengths_q=Lengths(cu_seqlens=(1, 8, rows + 8)),
        lengths_k=Lengths(cu_seqlens=(2, keys + 2, keys + 25)),
    )
    check_case(general_kernel, packed)


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_beside_a_window_lengths_and_sinks(general_kernel: TestedKernel, dtype: torch.dtype) -> None:
    rows, keys = small_sizes(general_kernel)
    case = Case(
        **random_qkv(general_kernel, rows, keys),
        mask=random_mask(dtype, (2, 2, rows, keys), general_kernel.device),
        lengths_q=Lengths(seqlens=(rows, rows - 9)),
        lengths_k=Lengths(seqlens=(keys - 20, keys)),
        sinks=random_sinks(general_kernel, 2, torch.float32),
    )
    for causal, window in (
        (None, (keys // 2, 9)),
        (Causal.BOTTOM_RIGHT, (30, -1)),
        (Causal.TOP_LEFT, (-1, 0)),
    ):
        check_case(general_kernel, replace(case, causal=causal, window=window))


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_a_bias_of_nan_at_hidden_scores_does_not_count(
    general_kernel: TestedKernel, dtype: torch.dtype
) -> None:
    """Outside of a window or beyond a length: not a bit changes, whatever the sign of the scale."""
    rows, keys = small_sizes(general_kernel)
    inputs = random_qkv(general_kernel, rows, keys, batch=1)
    clean = random_mask(dtype, (rows, keys), general_kernel.device, density=1.0)
    row = torch.arange(rows, device=general_kernel.device)[:, None]
    key = torch.arange(keys, device=general_kernel.device)
    cut = keys - 30
    hidden = (key >= cut) | (key > row + cut - rows + 5) | (key < row + cut - rows - 40)
    case = Case(**inputs, mask=clean, lengths_k=Lengths(seqlens=(cut,)), window=(40, 5))
    for scale in (None, -0.2):
        expected, expected_lse = check_case(general_kernel, replace(case, scale=scale))
        dirty = replace(case, scale=scale, mask=clean.masked_fill(hidden, math.nan))
        out, lse = run_case(general_kernel, dirty)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.kernels(head_dim=64)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_32_bits(general_kernel: TestedKernel, dim: int) -> None:
    """Two batches, heads or rows more than 2^32 bytes apart, in memory that is mostly never touched."""
    shape = [1, 1, 1, 40]
    shape[dim] = 2
    strides = [2**31 + 64 if i == dim else 64 for i in range(3)]
    storage = torch.empty(2**31 + 128, dtype=torch.float16, device=general_kernel.device)
    mask = storage.as_strided(shape, (*strides, 1))
    mask.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    check_case(general_kernel, Case(**random_qkv(general_kernel, shape[2], 40, batch=shape[0]), mask=mask))
