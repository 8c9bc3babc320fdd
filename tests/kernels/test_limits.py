"""What fused kernels take and refuse at the very limits: sizes, strides, addresses. Nothing is launched."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, make_case_params, random_qkv
from tests.kernels.harness import TestedKernel

INT_MAX = 2**31 - 1
OPERANDS = ("q", "k", "v", "out")
AXES = ("batch", "head", "row")


def refusal(kernel: TestedKernel, **changes: object) -> str:
    """Why not, or "", for two batches, heads, rows and keys with these fields of sdpa_params."""
    causal = Causal.TOP_LEFT if kernel.info.is_causal else None
    case = Case(**random_qkv(kernel, 2, 2, heads_kv=2), causal=causal)
    params, _ = make_case_params(case, torch.empty_like(case.q), None)
    params.num_splits = kernel.num_splits
    for name, value in changes.items():
        setattr(params, name, value)
    return kernel.library.refusal(kernel.info.index, params) or ""


def strides(kernel: TestedKernel, axis: str, stride: int) -> tuple[int, int, int]:
    """Dense ones of two heads with two rows, but for one axis."""
    dense = {"batch": 4 * kernel.info.head_dim, "head": 2 * kernel.info.head_dim, "row": kernel.info.head_dim}
    batch, head, row = (dense | {axis: stride}).values()
    return batch, head, row


def check_strides(kernel: TestedKernel) -> None:
    for name in OPERANDS:
        for axis in AXES:
            assert refusal(kernel, **{f"{name}_stride": strides(kernel, axis, 8)}) == ""
            for bad in (4, 9, -1):
                reason = refusal(kernel, **{f"{name}_stride": strides(kernel, axis, bad)})
                assert f"{name}: {axis} stride {bad} must be a multiple of 8" in reason


def check_addresses(kernel: TestedKernel) -> None:
    for name in OPERANDS:
        assert refusal(kernel, **{name: 4096}) == ""
        assert f"{name}: address 0x1008 must be a multiple of 16" in refusal(kernel, **{name: 4096 + 8})


def check_ctas(kernel: TestedKernel, most_batches: int = INT_MAX) -> None:
    """One batch or head is one CTA here, or a pair of CTAs."""
    one_head = {"num_heads_q": 1, "num_heads_kv": 1, "num_splits": min(kernel.num_splits, 1)}
    ctas = kernel.info.detail("cluster", 1)
    assert refusal(kernel, batch=most_batches // ctas, **one_head) == ""
    assert "make 2147483648 CTAs" in refusal(
        kernel, **one_head | {"batch": 2**30 // ctas, "num_heads_q": 2, "num_heads_kv": 2}
    )


def test_strides(fused_kernel: TestedKernel) -> None:
    check_strides(fused_kernel)


def check_strides_of_maps(kernel: TestedKernel) -> None:
    """Negative ones, and broadcast rows and results; broadcast heads and batches of inputs it has."""
    if not kernel.info.is_for_one_arch:
        pytest.skip("it does not load by TMA")
    for name, axis in product(OPERANDS, AXES):
        for stride in (0, -8):
            reason = refusal(kernel, **{f"{name}_stride": strides(kernel, axis, stride)})
            if stride == 0 and name != "out" and axis != "row":
                assert reason == ""
            else:
                assert f"{name}: {axis} stride {stride}; this kernel takes positive strides" in reason


def test_strides_that_a_tensor_map_has_no_words_for(fused_kernel: TestedKernel) -> None:
    check_strides_of_maps(fused_kernel)


def test_strides_that_a_ragged_map_has_no_words_for(lengths_kernel: TestedKernel) -> None:
    check_strides_of_maps(lengths_kernel)


def test_strides_too_large_for_a_ragged_map(lengths_kernel: TestedKernel) -> None:
    if not lengths_kernel.info.is_for_one_arch:
        pytest.skip("it does not load by TMA")
    for name in OPERANDS:
        for axis, most in (("row", 2**30), ("batch", 2**34)):
            assert refusal(lengths_kernel, **{f"{name}_stride": strides(lengths_kernel, axis, most)}) == ""
        for axis, stride in (("row", 2**34), ("batch", 2**38 + 8)):
            reason = refusal(lengths_kernel, **{f"{name}_stride": strides(lengths_kernel, axis, stride)})
            assert f"{name}: strides" in reason


def test_strides_of_general_kernels(lengths_kernel: TestedKernel) -> None:
    check_strides(lengths_kernel)


def test_addresses(fused_kernel: TestedKernel) -> None:
    check_addresses(fused_kernel)


def test_addresses_of_general_kernels(lengths_kernel: TestedKernel) -> None:
    check_addresses(lengths_kernel)


def test_number_of_ctas(fused_kernel: TestedKernel) -> None:
    check_ctas(fused_kernel)


def test_number_of_ctas_of_general_kernels(lengths_kernel: TestedKernel) -> None:
    """The rows of all batches have to fit into a ragged map."""
    check_ctas(lengths_kernel, 2**20 if lengths_kernel.info.is_for_one_arch else INT_MAX)


def test_longest_sequences(fused_kernel: TestedKernel) -> None:
    longest = {
        "seqlen_q": INT_MAX - 2 * fused_kernel.info.block_m,
        "seqlen_k": INT_MAX - 2 * fused_kernel.info.block_n,
    }
    assert refusal(fused_kernel, **longest) == ""
    for name, size in longest.items():
        assert f"{name} {size + 1}" in refusal(fused_kernel, **longest | {name: size + 1})


def test_longest_sequences_of_general_kernels(lengths_kernel: TestedKernel) -> None:
    """Their rows and keys are added."""
    longest = 2**30 if lengths_kernel.info.is_for_one_arch else INT_MAX  # of a ragged map
    most = longest - 2 * lengths_kernel.info.block_m
    one_tile = {
        "batch": 1,
        "num_heads_q": 1,
        "num_heads_kv": 1,
        "num_splits": min(lengths_kernel.num_splits, 1),
    }
    assert refusal(lengths_kernel, **one_tile, seqlen_q=most - 2) == ""
    assert f"seqlen_q {most - 1}" in refusal(lengths_kernel, **one_tile, seqlen_q=most - 1)
    if lengths_kernel.info.block_n <= lengths_kernel.info.block_m:
        assert refusal(lengths_kernel, **one_tile, seqlen_k=most - 2) == ""
    assert f"seqlen_k {most - 1}" in refusal(lengths_kernel, **one_tile, seqlen_k=most - 1)


@pytest.mark.parametrize("ratio", [1, 4])
def test_most_rows_of_a_split_kernel(split_kernel: TestedKernel, ratio: int) -> None:
    """Those of all query heads that read one key head, where a tile has them, and with the keys."""
    if not split_kernel.info.packs_heads:
        pytest.skip("a tile has the rows of one head")
    most = (INT_MAX - 2 * split_kernel.info.block_m) // ratio
    heads = {"batch": 1, "num_heads_q": ratio, "num_heads_kv": 1, "seqlen_k": 1}
    assert refusal(split_kernel, **heads, seqlen_q=most - 1) == ""
    if ratio > 1:
        assert refusal(split_kernel, **heads, seqlen_q=most) == ""
    assert f"seqlen_q {most + 1}" in refusal(split_kernel, **heads, seqlen_q=most + 1)


def test_packed_tensors_have_one_batch_and_all_rows(lengths_kernel: TestedKernel) -> None:
    """So the stride of the batch does not count, and that of a row counts where each sequence has one."""
    packed = {
        "seqlen_q": 1,
        "seqlen_k": 1,
        "total_q": 2,
        "total_k": 2,
        "cu_seqlens_q": 4096,
        "cu_seqlens_k": 4096,
    }
    for name in OPERANDS:
        assert (
            refusal(lengths_kernel, **packed, **{f"{name}_stride": strides(lengths_kernel, "batch", 9)}) == ""
        )
        reason = refusal(lengths_kernel, **packed, **{f"{name}_stride": strides(lengths_kernel, "row", 9)})
        assert f"{name}: row stride 9" in reason
