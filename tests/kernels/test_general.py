"""General and split kernels without anything that needs one: sizes, causal alignments, strides, schedules."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_cutlass.library.registry import Takes
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, launch, make_case_params, random_qkv, run_case
from tests.kernels.general_numerics import case_violations, check_case
from tests.kernels.harness import HOST_THREADS, OUTPUT_POISON, Guarded, TestedKernel
from tests.kernels.masks import random_mask

ALIGNMENTS = (None, *Causal)

# Sizes relative to the tile: "m" and "n" stand for block_m and block_n.
SIZES = {
    "one-by-one": (lambda m, n: (1, 1)),
    "one-row": (lambda m, n: (1, 3 * n + 1)),
    "one-key": (lambda m, n: (97, 1)),
    "tile-1": (lambda m, n: (m - 1, n - 1)),
    "tile": (lambda m, n: (m, n)),
    "tile+1": (lambda m, n: (m + 1, n + 1)),
    "130x200": (lambda m, n: (130, 200)),
    "200x130": (lambda m, n: (200, 130)),
    "1025-keys": (lambda m, n: (9, 1025)),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(lengths_kernel: TestedKernel, size: str) -> None:
    rows, keys = SIZES[size](lengths_kernel.info.block_m, lengths_kernel.info.block_n)
    inputs = random_qkv(lengths_kernel, rows, keys, batch=1, heads=1)
    for causal in ALIGNMENTS:
        check_case(lengths_kernel, Case(**inputs, causal=causal))


@pytest.mark.parametrize("offset", [-2000, -7, 3, 64, 2000])
def test_any_causal_offset(lengths_kernel: TestedKernel, offset: int) -> None:
    """The ABI's causal_offset is a number; a boolean mask says the same."""
    rows, keys = lengths_kernel.info.block_m + 3, 2 * lengths_kernel.info.block_n + 9
    inputs = random_qkv(lengths_kernel, rows, keys, batch=1)
    out = Guarded(
        (1, 2, rows, lengths_kernel.info.head_dim),
        lengths_kernel.dtype,
        lengths_kernel.device,
        poison=OUTPUT_POISON[lengths_kernel.dtype],
    )
    params, held = make_case_params(Case(**inputs, causal=Causal.TOP_LEFT), out.tensor, None)
    params.causal_offset = offset
    launch(lengths_kernel, params, held)
    out.check_untouched("out")
    mask = torch.ones(rows, keys, dtype=torch.bool, device=lengths_kernel.device).tril(offset)
    assert not case_violations(Case(**inputs, mask=mask), out.tensor, None)


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_grouped_query_heads(lengths_kernel: TestedKernel, heads_kv: int) -> None:
    inputs = random_qkv(lengths_kernel, 33, 70, heads=4, heads_kv=heads_kv, bshd=True)
    check_case(lengths_kernel, Case(**inputs, causal=Causal.BOTTOM_RIGHT), bshd=True)


def test_expanded_batches(lengths_kernel: TestedKernel) -> None:
    one = random_qkv(lengths_kernel, 70, 97, batch=1)
    inputs = {name: tensor.expand(3, -1, -1, -1) for name, tensor in one.items()}
    check_case(lengths_kernel, Case(**inputs, lengths_k=Lengths(seqlens=(97, 40, 1))))


@pytest.mark.kernels(head_dim=64)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_32_bits(lengths_kernel: TestedKernel, dim: int) -> None:
    """Two batches, heads or rows more than 2^31 elements apart, in memory that is mostly never touched."""
    shape = [1, 1, 1, 56]
    shape[dim] = 2
    strides = [2**31 + 64 if i == dim else 64 for i in range(3)]
    storage = torch.empty(2**31 + 128, dtype=lengths_kernel.dtype, device=lengths_kernel.device)
    far = storage.as_strided(shape, (*strides, 1))
    far.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.25)
    check_case(lengths_kernel, Case(q=far, k=far, v=far, causal=Causal.TOP_LEFT))


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-6, 30.0])
def test_scales(lengths_kernel: TestedKernel, scale: float) -> None:
    inputs = random_qkv(lengths_kernel, 50, 2 * lengths_kernel.info.block_n + 7, batch=1)
    check_case(lengths_kernel, Case(**inputs, causal=Causal.BOTTOM_RIGHT, scale=scale))


def test_rows_whose_scores_are_all_minus_infinity(lengths_kernel: TestedKernel) -> None:
    """They are rows that see no key, whichever blocks, groups and splits find that out."""
    keys = (2 * lengths_kernel.info.kv_groups + 1) * lengths_kernel.info.block_n
    inputs = random_qkv(lengths_kernel, 5, keys)
    inputs["q"][..., 0] = 1
    inputs["k"][0, ..., 0] = -math.inf
    out, lse = run_case(lengths_kernel, Case(**inputs))
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()


def everything(kernel: TestedKernel) -> Case:
    """Lengths, a smaller head_dim, a causal diagonal and, if the kernel takes any, a mask at once."""
    rows, keys = kernel.info.block_m + 1, (2 * kernel.info.kv_groups + 1) * kernel.info.block_n + 5
    return Case(
        **random_qkv(kernel, rows, keys, head_dim=kernel.info.head_dim - 8),
        mask=random_mask(torch.bool, (2, 1, rows, keys), kernel.device) if kernel.info.mask_types else None,
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(rows, rows - 7)),
        lengths_k=Lengths(seqlens=(keys - 3, keys)),
    )


def test_softmax_lse_is_optional(lengths_kernel: TestedKernel) -> None:
    case = everything(lengths_kernel)
    with_lse, _ = check_case(lengths_kernel, case)
    without, _ = run_case(lengths_kernel, case, with_lse=False)
    assert torch.equal(with_lse, without)


@pytest.mark.kernels(device="cpu")
def test_schedules_do_not_change_a_bit(lengths_kernel: TestedKernel) -> None:
    """Host: a seed permutes the order in which warps run; a missing barrier shows as other bits."""
    case = everything(lengths_kernel)
    expected, expected_lse = run_case(lengths_kernel, case)
    library = lengths_kernel.library
    try:
        for seed in (1, 2, 3, 4):
            library.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            out, lse = run_case(lengths_kernel, case)
            assert torch.equal(out, expected), f"schedule seed {seed}"
            assert torch.equal(lse, expected_lse), f"schedule seed {seed}"
    finally:
        library.host_configure(num_threads=HOST_THREADS)


TAKEN_BY_GENERAL_KERNELS = {
    "smaller-head-dim": lambda kernel: {
        "head_dim": kernel.info.head_dim - 8,
        "head_dim_v": kernel.info.head_dim - 8,
    },
    "smaller-head-dim-v": lambda kernel: {"head_dim_v": kernel.info.head_dim - 8},
    "mask": lambda kernel: {"mask": 4096, "mask_type": 1},
    "dropout": lambda kernel: {"p_dropout": 0.1},
    "seqlens": lambda kernel: {"seqlens_k": 4096},
    "cu-seqlens": lambda kernel: {"cu_seqlens_q": 4096, "total_q": 8},
}


@pytest.mark.parametrize("option", TAKEN_BY_GENERAL_KERNELS)
def test_plain_kernels_refuse_it(fused_kernel: TestedKernel, option: str) -> None:
    if option.startswith("smaller") and Takes.SMALLER_HEAD_DIM in fused_kernel.info.takes:
        pytest.skip("it takes smaller head dimensions")
    causal = Causal.TOP_LEFT if fused_kernel.info.is_causal else None
    case = Case(**random_qkv(fused_kernel, 8, 8), causal=causal)
    params, _ = make_case_params(case, torch.empty_like(case.q), None)
    library, index = fused_kernel.library, fused_kernel.info.index
    assert library.refusal(index, params) is None
    for name, value in TAKEN_BY_GENERAL_KERNELS[option](fused_kernel).items():
        setattr(params, name, value)
    assert library.refusal(index, params) is not None


REFUSED = {
    "large-head-dim": ("head_dim", lambda info: info.head_dim + 8),
    "large-head-dim-v": ("head_dim_v", lambda info: info.head_dim + 8),
    "odd-head-dim": ("head_dim", lambda info: 12),
    "odd-head-dim-v": ("head_dim_v", lambda info: 4),
    "dropout": ("p_dropout", lambda info: 0.1),
    "unknown-mask-type": ("mask_type", lambda info: 9),
    "nan-scale": ("softmax_scale", lambda info: math.nan),
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused(lengths_kernel: TestedKernel, change: str) -> None:
    case = Case(**random_qkv(lengths_kernel, 8, 8))
    out = torch.empty_like(case.q)
    params, _ = make_case_params(case, out, None)
    index = lengths_kernel.info.index
    params.num_splits = lengths_kernel.num_splits
    assert lengths_kernel.library.refusal(index, params) is None
    name, value = REFUSED[change]
    setattr(params, name, value(lengths_kernel.info))
    reason = lengths_kernel.library.refusal(index, params)
    assert reason is not None
    assert name in reason
