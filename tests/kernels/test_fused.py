"""Numerics of every fused kernel: sizes, masks, strides, scales, schedules, and a few identities."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.harness import HOST_THREADS, Inputs, TestedKernel, random_inputs, run_kernel
from tests.kernels.numerics import check_numerics

# Sizes relative to the tile: "m" and "n" stand for block_m and block_n.
SIZES = {
    "one-by-one": (lambda m, n: (1, 1)),
    "one-row": (lambda m, n: (1, 97)),
    "one-key": (lambda m, n: (97, 1)),
    "tile-1": (lambda m, n: (m - 1, n - 1)),
    "tile": (lambda m, n: (m, n)),
    "tile+1": (lambda m, n: (m + 1, n + 1)),
    "130x200": (lambda m, n: (130, 200)),
    "200x130": (lambda m, n: (200, 130)),
    "1025-rows": (lambda m, n: (1025, 33)),
    "1025-keys": (lambda m, n: (33, 1025)),
    "1025-square": (lambda m, n: (1025, 1025)),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(fused_kernel: TestedKernel, size: str) -> None:
    seqlen_q, seqlen_k = SIZES[size](fused_kernel.info.block_m, fused_kernel.info.block_n)
    inputs = random_inputs(fused_kernel, seqlen_q, seqlen_k)
    alignments = fused_kernel.alignments
    for causal in alignments[:1] if seqlen_q == seqlen_k else alignments:  # which are one in a square
        check_numerics(fused_kernel, inputs, causal=causal)


def test_every_tile_of_every_head(fused_kernel: TestedKernel) -> None:
    """More tiles of a head than the scheduler's runs have, for several heads of several batches."""
    inputs = random_inputs(fused_kernel, 10 * fused_kernel.info.block_m + 3, 33, batch=2, heads=3)
    check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[0])


@pytest.mark.kernels(causal=True)
def test_fully_masked_rows_are_zero_and_minus_infinity(fused_kernel: TestedKernel) -> None:
    rows, keys = 2 * fused_kernel.info.block_m + 44, 41
    inputs = random_inputs(fused_kernel, rows, keys)
    out, lse = check_numerics(fused_kernel, inputs, causal=Causal.BOTTOM_RIGHT)
    assert (out[:, :, : rows - keys] == 0).all()
    assert (lse[:, :, : rows - keys] == -torch.inf).all()
    assert lse[:, :, rows - keys :].isfinite().all()


@pytest.mark.kernels(causal=True)
def test_keys_that_no_row_sees_may_be_nan(fused_kernel: TestedKernel) -> None:
    """top_left with more keys than rows: the keys behind the last row's diagonal are never used."""
    rows, keys = fused_kernel.info.block_m // 2 + 5, 2 * fused_kernel.info.block_n + 9
    clean = random_inputs(fused_kernel, rows, keys)
    expected, expected_lse = run_kernel(fused_kernel, clean, causal=Causal.TOP_LEFT)
    dirty = random_inputs(fused_kernel, rows, keys)
    dirty.k[:, :, rows:] = torch.nan
    dirty.v[:, :, rows:] = torch.nan
    out, lse = run_kernel(fused_kernel, dirty, causal=Causal.TOP_LEFT)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def _bshd(kernel: TestedKernel) -> Inputs:
    return random_inputs(kernel, 70, 97, batch=2, heads=3, bshd=True)


def _expanded_batch(kernel: TestedKernel) -> Inputs:
    one = random_inputs(kernel, 70, 97, heads=2)
    return Inputs(*(tensor.expand(2, -1, -1, -1) for tensor in (one.q, one.k, one.v)))


def _sliced_heads(kernel: TestedKernel) -> Inputs:
    many = random_inputs(kernel, 70, 97, batch=2, heads=5)
    return Inputs(many.q[:, 1::2], many.k[:, :2], many.v[:, 3:])


def _fused_qkv(kernel: TestedKernel) -> Inputs:
    """Slices of one [batch, seqlen, 3, heads, head_dim] projection."""
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(2, 70, 3, 2, kernel.info.head_dim, generator=generator) * 0.25
    q, k, v = qkv.to(kernel.device, kernel.dtype).permute(2, 0, 3, 1, 4)
    return Inputs(q, k, v)


STRIDES = {
    "bshd": _bshd,
    "expanded-batch": _expanded_batch,
    "sliced-heads": _sliced_heads,
    "fused-qkv": _fused_qkv,
}


@pytest.mark.parametrize("layout", STRIDES)
def test_strides(fused_kernel: TestedKernel, layout: str) -> None:
    inputs = STRIDES[layout](fused_kernel)
    check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[-1], bshd=layout == "bshd")


@pytest.mark.kernels(head_dim=64)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_32_bits(fused_kernel: TestedKernel, dim: int) -> None:
    """Two batches, heads or rows more than 2^31 elements apart, in memory that is mostly never touched."""
    shape = [1, 1, 1, 64]
    shape[dim] = 2
    strides = [2**31 + 64 if i == dim else 64 for i in range(3)]
    storage = torch.empty(2**31 + 128, dtype=fused_kernel.dtype, device=fused_kernel.device)
    far = storage.as_strided(shape, (*strides, 1))
    far.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.25)
    check_numerics(fused_kernel, Inputs(far, far, far), causal=fused_kernel.alignments[-1])


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_grouped_query_heads(fused_kernel: TestedKernel, heads_kv: int) -> None:
    inputs = random_inputs(fused_kernel, 33, 70, batch=2, heads=4, heads_kv=heads_kv)
    check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[-1])


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-6, 8.0, 30.0])
def test_scales(fused_kernel: TestedKernel, scale: float) -> None:
    inputs = random_inputs(fused_kernel, 50, 2 * fused_kernel.info.block_n + 7)
    check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[-1], scale=scale)


def test_softmax_lse_is_optional(fused_kernel: TestedKernel) -> None:
    inputs = random_inputs(fused_kernel, 65, 66)
    causal = fused_kernel.alignments[-1]
    with_lse, _ = run_kernel(fused_kernel, inputs, causal=causal)
    without, _ = run_kernel(fused_kernel, inputs, causal=causal, with_lse=False)
    assert torch.equal(with_lse, without)


def test_batches_and_heads_are_independent(fused_kernel: TestedKernel) -> None:
    """Each head alone gives the bits that it gives among others."""
    inputs = random_inputs(fused_kernel, 35, 66, batch=2, heads=2)
    causal = fused_kernel.alignments[-1]
    out, lse = run_kernel(fused_kernel, inputs, causal=causal)
    for bidb, bidh in ((0, 1), (1, 0)):
        part = (slice(bidb, bidb + 1), slice(bidh, bidh + 1))
        alone = Inputs(inputs.q[part], inputs.k[part], inputs.v[part])
        alone_out, alone_lse = run_kernel(fused_kernel, alone, causal=causal)
        assert torch.equal(alone_out, out[part])
        assert torch.equal(alone_lse, lse[part])


@pytest.mark.kernels(device="cpu")
def test_schedules_do_not_change_a_bit(fused_kernel: TestedKernel) -> None:
    """Host: a seed permutes the order in which warps run; a missing barrier shows as other bits."""
    info = fused_kernel.info
    inputs = random_inputs(fused_kernel, info.block_m + 1, (2 * info.kv_groups + 1) * info.block_n + 5)
    causal = fused_kernel.alignments[-1]
    expected, expected_lse = check_numerics(fused_kernel, inputs, causal=causal)
    library = fused_kernel.library
    try:
        for seed in (1, 2, 3, 4, 5):
            library.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            out, lse = run_kernel(fused_kernel, inputs, causal=causal)
            assert torch.equal(out, expected), f"schedule seed {seed}"
            assert torch.equal(lse, expected_lse), f"schedule seed {seed}"
    finally:
        library.host_configure(num_threads=HOST_THREADS)


@pytest.mark.kernels(device="cpu", causal=True)
def test_tiles_without_keys_end_in_every_schedule(fused_kernel: TestedKernel) -> None:
    """A CTA takes several tiles whose rows all stand before the first key, and one that sees it."""
    inputs = random_inputs(fused_kernel, 2 * fused_kernel.info.block_m + 1, 1)
    library = fused_kernel.library
    try:
        for seed in range(6):
            library.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            check_numerics(fused_kernel, inputs, causal=Causal.BOTTOM_RIGHT)
    finally:
        library.host_configure(num_threads=HOST_THREADS)


@pytest.mark.kernels(causal=False)
def test_order_of_keys_does_not_matter(fused_kernel: TestedKernel) -> None:
    """Permuting rows of K and V together changes nothing but rounding."""
    inputs = random_inputs(fused_kernel, 33, 150)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(5)).to(fused_kernel.device)
    shuffled = Inputs(inputs.q, inputs.k[:, :, order], inputs.v[:, :, order])
    out, lse = check_numerics(fused_kernel, shuffled)
    expected, expected_lse = run_kernel(fused_kernel, inputs)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=8e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)


def test_constant_value_rows_give_that_constant(fused_kernel: TestedKernel) -> None:
    """Weights sum to one: V with equal rows comes out again, to the rounding of P."""
    inputs = random_inputs(fused_kernel, 70, 131)
    inputs.v[:] = inputs.v[:, :, :1]
    out, _ = run_kernel(fused_kernel, inputs, causal=Causal.TOP_LEFT if fused_kernel.info.is_causal else None)
    tolerance = 2e-3 if fused_kernel.dtype is torch.float16 else 8e-3
    torch.testing.assert_close(out, inputs.v[:, :, :1].expand_as(out), atol=1e-5, rtol=tolerance)
