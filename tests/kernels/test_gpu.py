"""On a GPU only: problems too large for the host target, and runs that have to repeat bit for bit."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel, random_inputs, run_kernel
from tests.kernels.masks import mask_dtypes, random_mask
from tests.kernels.numerics import check_numerics
from tests.kernels.test_quantized import check_contract

pytestmark = pytest.mark.gpu


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k"),
    [(1, 8, 512, 512), (8, 8, 256, 256), (2, 3, 1025, 2049), (1, 2, 8192, 8192), (1, 4, 1, 16384)],
)
def test_large_fused(
    fused_kernel: TestedKernel, batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> None:
    inputs = random_inputs(fused_kernel, seqlen_q, seqlen_k, batch=batch, heads=heads)
    for causal in fused_kernel.alignments:
        check_numerics(fused_kernel, inputs, causal=causal)


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize(("batch", "heads", "seqlen"), [(1, 8, 512), (1, 3, 1025), (1, 2, 4096)])
def test_large_unfused(unfused_kernel: TestedKernel, batch: int, heads: int, seqlen: int) -> None:
    inputs = random_inputs(unfused_kernel, seqlen, seqlen, batch=batch, heads=heads)
    for causal in unfused_kernel.alignments:
        check_numerics(unfused_kernel, inputs, causal=causal)


def large_cases(kernel: TestedKernel, seqlen_q: int, seqlen_k: int) -> list[Case]:
    """Every kind of mask, then padded and packed sequences."""
    inputs = random_qkv(kernel, seqlen_q, seqlen_k, batch=2, heads=4, heads_kv=2)
    common = {
        "p_dropout": 0.2 if kernel.info.has_dropout else 0.0,
        "philox": PhiloxState(2**40 + 1, 2**33 + 4),
    }
    cases = [
        Case(**inputs, **common, mask=random_mask(dtype, (2, 1, seqlen_q, seqlen_k), kernel.device))
        for dtype in mask_dtypes(kernel.info)
    ]
    padded = {
        "lengths_q": Lengths(seqlens=(seqlen_q - 5, seqlen_q)),
        "lengths_k": Lengths(seqlens=(seqlen_k, seqlen_k // 2)),
    }
    cases.append(Case(**inputs, **common, **padded, causal=Causal.BOTTOM_RIGHT))
    packed = {
        "lengths_q": Lengths(cu_seqlens=(0, seqlen_q // 3, seqlen_q - 1)),
        "lengths_k": Lengths(cu_seqlens=(3, seqlen_k // 2, seqlen_k)),
    }
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    cases.append(Case(**one, **common, **packed, causal=Causal.TOP_LEFT))
    return cases


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1025, 2049), (2048, 2048)])
def test_large_general(general_kernel: TestedKernel, seqlen_q: int, seqlen_k: int) -> None:
    for case in large_cases(general_kernel, seqlen_q, seqlen_k):
        check_case(general_kernel, case)


@pytest.mark.kernels(device="cuda")
def test_large_dropout(dropout_kernel: TestedKernel) -> None:
    for case in large_cases(dropout_kernel, 1025, 2049):
        check_case(dropout_kernel, case)


@pytest.mark.kernels(device="cuda")
def test_repeated_runs_of_dropout_give_the_same_bits(dropout_kernel: TestedKernel) -> None:
    for case in large_cases(dropout_kernel, 333, 555):
        used = ~case.unused_rows().to(dropout_kernel.device)
        expected, expected_lse = run_case(dropout_kernel, case)
        for _ in range(10):
            out, lse = run_case(dropout_kernel, case)
            assert torch.equal(out[:, :, used], expected[:, :, used])
            assert torch.equal(lse[:, :, used], expected_lse[:, :, used])


@pytest.mark.kernels(device="cuda")
def test_repeated_runs_give_the_same_bits(fused_kernel: TestedKernel) -> None:
    inputs = random_inputs(fused_kernel, 333, 555, batch=4, heads=8)
    causal = fused_kernel.alignments[-1]
    expected, expected_lse = run_kernel(fused_kernel, inputs, causal=causal)
    for _ in range(20):
        out, lse = run_kernel(fused_kernel, inputs, causal=causal)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


DECODING = [  # batch, heads_q, heads_kv, seqlen_q, seqlen_k
    (1, 32, 8, 1, 32768),
    (4, 32, 8, 1, 8192),
    (16, 8, 8, 1, 4096),
    (1, 64, 1, 3, 16384),
    (2, 12, 4, 33, 10000),
]


def decoding_case(kernel: TestedKernel, sizes: tuple[int, int, int, int, int]) -> Case:
    batch, heads, heads_kv, rows, keys = sizes
    return Case(
        **random_qkv(kernel, rows, keys, batch=batch, heads=heads, heads_kv=heads_kv),
        causal=Causal.BOTTOM_RIGHT,
        lengths_k=Lengths(seqlens=tuple(keys - 777 * b % keys for b in range(batch))),
    )


@pytest.mark.kernels(device="cuda")
@pytest.mark.parametrize("sizes", DECODING, ids=str)
def test_decoding(split_kernel: TestedKernel, sizes: tuple[int, int, int, int, int]) -> None:
    case = decoding_case(split_kernel, sizes)
    for num_splits in (1, 2, 7, 16, 100):
        check_case(split_kernel.with_splits(num_splits), case)


@pytest.mark.kernels(device="cuda")
def test_repeated_runs_of_splits_give_the_same_bits(split_kernel: TestedKernel) -> None:
    """Whichever CTA of a tile is the last; `launch` sees to it that the counters are 0 after each run."""
    for sizes in DECODING:
        case = decoding_case(split_kernel, sizes)
        for num_splits in (2, 16):
            kernel = split_kernel.with_splits(num_splits)
            expected, expected_lse = run_case(kernel, case)
            for _ in range(20):
                out, lse = run_case(kernel, case)
                assert torch.equal(out, expected)
                assert torch.equal(lse, expected_lse)


@pytest.mark.kernels(device="cuda", split=True, splits=(1,))
@pytest.mark.parametrize("sizes", DECODING, ids=str)
def test_decoding_in_8_bits(quantized_kernel: TestedKernel, sizes: tuple[int, int, int, int, int]) -> None:
    """The contract, and the same bits in every run."""
    case = decoding_case(quantized_kernel, sizes)
    for num_splits in (1, 2, 16, 100):
        kernel = quantized_kernel.with_splits(num_splits)
        check_contract(kernel, case)
        expected = run_case(kernel, case)
        for _ in range(10):
            assert all(map(torch.equal, expected, run_case(kernel, case)))
