"""Masks and biases in the quantised kernels: the contract holds with them, and no bias is too large."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.quantised_data import FAMILIES
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks, run_case
from tests.kernels.general_numerics import expected
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import BIAS_DTYPES, LAYOUTS, MASK_DTYPES, MASK_SHAPES, random_mask
from tests.kernels.quantized_data import check_small_values, contract_violations, small_values
from tests.kernels.test_quantized_model import family_case

pytestmark = pytest.mark.kernels(masks=True)

ALIGNMENTS = (None, *Causal)
DTYPE_IDS = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}
ROWS, KEYS = 70, 200  # two blocks of rows of some kernels, three whole blocks of keys and a part


def check_masked(kernel: TestedKernel, case: Case, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Holds the case with `mask` to the contract. Returns (out, softmax_lse)."""
    masked = dataclasses.replace(case, mask=mask)
    out, lse = run_case(kernel, masked)
    assert lse is not None
    broken = contract_violations(kernel.info.accuracy, masked, out, lse, is_normal=False, few_keys=True)
    assert not broken, f"{kernel}, {masked}: {broken}"
    return out, lse


def random_bias(kernel: TestedKernel, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Nothing is hidden."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (2 * values).to(kernel.device, dtype)


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_contract(quantized_kernel: TestedKernel, kind: str, dtype: torch.dtype) -> None:
    for seed, causal in enumerate((None, Causal.BOTTOM_RIGHT)):
        case = family_case(quantized_kernel, kind, 1, 2, 2, 130, 512, causal=causal, seed=seed)
        mask = random_mask(dtype, (2, 130, 512), quantized_kernel.device, seed=seed)
        check_masked(quantized_kernel, case, mask)


@pytest.mark.parametrize("pattern", MASK_SHAPES)
def test_shapes(quantized_kernel: TestedKernel, pattern: str) -> None:
    """Grouped heads too. A mask that batches share, and heads do not, makes batches follow each other."""
    case = Case(**random_qkv(quantized_kernel, ROWS, KEYS, heads=4, heads_kv=2))
    for i, dtype in enumerate(MASK_DTYPES):
        mask = random_mask(dtype, MASK_SHAPES[pattern](2, 4, ROWS, KEYS), quantized_kernel.device, seed=i)
        check_masked(quantized_kernel, dataclasses.replace(case, causal=ALIGNMENTS[i % 3]), mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(quantized_kernel: TestedKernel, layout: str) -> None:
    """Bit for bit what the same mask does where loads take four elements at once."""
    case = Case(**random_qkv(quantized_kernel, ROWS, KEYS + 1))
    for i, dtype in enumerate(MASK_DTYPES):
        shape = (2, 1, ROWS, KEYS + 1)
        aligned, other = (
            random_mask(dtype, shape, quantized_kernel.device, seed=i, layout=name)
            for name in ("aligned", layout)
        )
        want = check_masked(quantized_kernel, case, aligned)
        found = run_case(quantized_kernel, dataclasses.replace(case, mask=other))
        assert all(map(torch.equal, found, want)), f"{dtype}"


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_with_lengths_windows_and_sinks(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    sinks = random_sinks(quantized_kernel, 2, torch.float32)
    lengths = {"lengths_q": Lengths(seqlens=(70, 33)), "lengths_k": Lengths(seqlens=(131, 200))}
    options: tuple[dict, ...] = (
        {"window": (40, 20)},
        {"window": (90, 0), "causal": Causal.TOP_LEFT},
        {"sinks": sinks},
        {**lengths, "causal": Causal.BOTTOM_RIGHT},
        {**lengths, "sinks": sinks, "window": (64, -1)},
    )
    for seed, given in enumerate(options):
        case = Case(**random_qkv(quantized_kernel, ROWS, KEYS), **given)
        check_masked(
            quantized_kernel, case, random_mask(dtype, (2, 2, ROWS, KEYS), quantized_kernel.device, seed=seed)
        )
    packed = Case(
        **random_qkv(quantized_kernel, ROWS, KEYS, batch=1),
        lengths_q=Lengths(cu_seqlens=(0, 30, 70)),
        lengths_k=Lengths(cu_seqlens=(0, 111, 200)),
    )
    check_masked(quantized_kernel, packed, random_mask(dtype, (2, 2, 40, 111), quantized_kernel.device))


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_rows_and_blocks_that_are_fully_masked(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    seen = torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:16] = seen[ROWS - 1] = False  # all rows of one warp, and one beside rows that see keys
    seen[16, 64:] = False  # sees keys of the block that is visited last only
    seen[17, :128] = False
    seen[18] = False
    seen[18, 3] = True
    seen[:, 64:128] = False  # all of one block
    mask = seen.to(quantized_kernel.device)
    if dtype is not torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
    for causal in ALIGNMENTS:
        case = Case(**random_qkv(quantized_kernel, ROWS, KEYS), causal=causal)
        out, lse = check_masked(quantized_kernel, case, mask)
        for row in (*range(16), ROWS - 1):
            assert (out[:, :, row] == 0).all()
            assert (lse[:, :, row] == -math.inf).all()
    sinks = random_sinks(quantized_kernel, 2, torch.float32)
    out, lse = check_masked(quantized_kernel, dataclasses.replace(case, sinks=sinks), mask)
    assert (out[:, :, :16] == 0).all()
    torch.testing.assert_close(lse[:, :, :16], sinks[:, None].expand(2, 2, 16))


def test_a_mask_that_hides_nothing_changes_no_bit(quantized_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(quantized_kernel, ROWS, KEYS), causal=Causal.BOTTOM_RIGHT)
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool, device=quantized_kernel.device)
    mask[:16, KEYS - ROWS + 16 :] = False  # behind the diagonal
    masked = run_case(quantized_kernel, dataclasses.replace(case, mask=mask))
    assert all(map(torch.equal, masked, run_case(quantized_kernel, case)))


@pytest.mark.parametrize("kind", ["normal", "vout", "vchan"])
@pytest.mark.parametrize("shift", [-6e4, -1e9, 1e6, 3e38, -3e38], ids=str)
def test_only_differences_within_a_row_matter(
    quantized_kernel: TestedKernel, kind: str, shift: float
) -> None:
    """The same bias for all keys of a row. One that float32 adds to a logit without a trace leaves the mean
    of the values: those whose scales differ, too.
    """
    case = family_case(quantized_kernel, kind, 1, 2, 2, ROWS, KEYS)
    bias = random_bias(quantized_kernel, torch.float32, ROWS, KEYS)
    bias[:40] = shift
    bias[40:50] += shift if abs(shift) < 1e5 else 0
    masked = dataclasses.replace(case, mask=bias)
    out, lse = run_case(quantized_kernel, masked)
    assert lse is not None
    assert lse.isfinite().all()
    if abs(shift) < 1e5:
        want = expected(masked).out
    else:
        want = expected(dataclasses.replace(masked, mask=bias.masked_fill(bias == shift, 0))).out
        want[:, :, :40] = case.v.double().mean(2, keepdim=True)
        if abs(shift) < 1e7:  # float32 keeps some of the logits' bits
            want, out = want[:, :, 40:], out[:, :, 40:]
    broken = (out.double() - want).norm(dim=(2, 3)) / want.norm(dim=(2, 3))
    assert broken.max() < 4e-2, f"(a) max error {broken.max().item():.1e} with {shift} for all keys of a row"


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_the_lowest_and_the_largest_finite_bias(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """finfo.min hides a key beside others, finfo.max all others. In a row of nothing else they are biases
    like any other; those of bfloat16 and float32 swallow all differences, as in torch.
    """
    limits = torch.finfo(dtype)
    case = family_case(quantized_kernel, "vout", 1, 2, 2, ROWS, KEYS)
    bias = random_bias(quantized_kernel, dtype, ROWS, KEYS)
    bias[:, 130:140] = limits.min
    bias[7:9] = limits.min
    bias[9] = -math.inf
    bias[9, 3:70] = limits.min
    bias[10] = limits.min
    bias[10, 5] = 0
    bias[11, 100] = limits.max
    bias[12] = limits.max
    bias[13, :64] = limits.max
    masked = dataclasses.replace(case, mask=bias)
    out, lse = run_case(quantized_kernel, masked)
    assert lse is not None
    assert lse.isfinite().all()
    want = expected(masked).out
    if dtype is torch.float16:
        want[:, :, 7:9] = expected(dataclasses.replace(case, mask=torch.zeros_like(bias))).out[:, :, 7:9]
    else:
        mean = case.v.double().mean(2)
        want[:, :, 7] = want[:, :, 8] = want[:, :, 12] = mean
        want[:, :, 9] = case.v[:, :, 3:70].double().mean(2)
        want[:, :, 13] = case.v[:, :, :64].double().mean(2)
    for row in range(ROWS):
        off = ((out[:, :, row].double() - want[:, :, row]).norm() / want[:, :, row].norm()).item()
        assert off < 0.1, f"row {row}: off by {off:.1e}"
    assert ((out.double() - want).norm() / want.norm()).item() < 3.4e-2


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_the_cap_of_the_logits_is_not_the_biases(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """Biases beyond 127² · D / 100 in log2 units keep their distances."""
    case = family_case(quantized_kernel, "normal", 1, 1, 1, ROWS, KEYS)
    bias = torch.zeros(ROWS, KEYS, dtype=torch.float32, device=quantized_kernel.device)
    bias[:, 40:80] = 40000.0
    bias[:, 60] = 40064.0  # a step of bfloat16 there is 256
    bias = bias.to(dtype)
    want = case.v[:, :, 60] if dtype is not torch.bfloat16 else case.v[:, :, 40:80].mean(2)
    out, _ = run_case(quantized_kernel, dataclasses.replace(case, mask=bias, scale=0.0))
    torch.testing.assert_close(out, want[:, :, None].expand_as(out), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", BIAS_DTYPES, **DTYPE_IDS)
def test_a_bias_that_is_not_finite(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """NaN and inf make their row NaN where it sees their key, and no other row; behind the diagonal, none."""
    case = Case(**random_qkv(quantized_kernel, ROWS, KEYS), causal=Causal.BOTTOM_RIGHT)
    bias = random_bias(quantized_kernel, dtype, ROWS, KEYS)
    want = run_case(quantized_kernel, dataclasses.replace(case, mask=bias))
    others = torch.arange(ROWS) != 20
    for key in (0, 70, KEYS - ROWS + 20):
        for value in (math.nan, math.inf):
            spoilt = bias.clone()
            spoilt[20, key] = value
            spoilt[20:40, KEYS - 1] = value
            found = run_case(quantized_kernel, dataclasses.replace(case, mask=spoilt))
            for result, wanted in zip(found, want, strict=True):
                assert result is not None
                assert wanted is not None
                assert result[:, :, 20].isnan().all(), f"{value} at key {key}"
                # An infinite reference moves those of the warp's other rows, whose last bits change.
                torch.testing.assert_close(result[:, :, others], wanted[:, :, others], rtol=2e-2, atol=2e-2)


def test_rows_beyond_a_length_ignore_biases(quantized_kernel: TestedKernel) -> None:
    """They are 0 whatever the bias of the last row is that attends."""
    case = Case(**random_qkv(quantized_kernel, 40, KEYS, batch=1), lengths_q=Lengths(seqlens=(33,)))
    bias = random_bias(quantized_kernel, torch.float32, 40, KEYS)
    bias[32:] = math.nan
    out, lse = run_case(quantized_kernel, dataclasses.replace(case, mask=bias))
    assert lse is not None
    assert out[:, :, 32].isnan().all()
    assert (out[:, :, 33:] == 0).all()
    assert (lse[:, :, 33:] == -math.inf).all()


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-6, 3.0])
def test_scales(quantized_kernel: TestedKernel, scale: float) -> None:
    """The scale is applied to the products and not to the bias."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, ROWS, KEYS)
    case.q.mul_(0.1)
    for dtype in MASK_DTYPES:
        mask = random_mask(dtype, (ROWS, KEYS), quantized_kernel.device)
        check_masked(quantized_kernel, dataclasses.replace(case, scale=scale), mask)


@pytest.mark.parametrize("dtype", MASK_DTYPES, **DTYPE_IDS)
def test_small_values_in_many_blocks(quantized_kernel: TestedKernel, dtype: torch.dtype) -> None:
    """Blocks are hidden where kMagic would have to leave O."""
    case = small_values(quantized_kernel, 129)
    is_seen = torch.arange(case.seqlen_k, device=quantized_kernel.device) // 64 % 32 != 0
    mask = is_seen if dtype is torch.bool else torch.where(is_seen, 0, -math.inf).to(dtype)
    check_small_values(quantized_kernel, dataclasses.replace(case, mask=mask.expand(1, 1, 1, -1)))
