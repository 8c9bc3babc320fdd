"""Lengths per sequence in every general and split kernel: padded and packed, whatever lies beyond them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, launch, make_case_params, random_qkv, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import OUTPUT_POISON, Guarded, TestedKernel

ALIGNMENTS = (None, *Causal)


def fill_beyond(case: Case) -> None:
    """NaNs and infinities in every row of q, k and v that no sequence counts."""
    sequences_q, sequences_k = zip(*case.sequences, strict=True)
    for tensors, sequences in (((case.q,), sequences_q), ((case.k, case.v), sequences_k)):
        counts = torch.zeros(tensors[0].shape[0], tensors[0].shape[2], dtype=torch.bool)
        for sequence in sequences:
            first = sequence.first_row
            counts[sequence.index, first : first + sequence.length] = True
        beyond = ~counts[:, None, :, None].to(case.q.device)
        for tensor in tensors:
            tensor.masked_fill_(beyond, math.nan)
            tensor[..., 1::3].masked_fill_(beyond, math.inf)
            tensor[..., 2::3].masked_fill_(beyond, -math.inf)


def padded_sizes(kernel: TestedKernel) -> tuple[int, int]:
    return kernel.info.block_m + 7, (kernel.info.kv_groups + 1) * kernel.info.block_n + 13


@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_padded(lengths_kernel: TestedKernel, causal: Causal | None) -> None:
    """Among them lengths of 0, of a whole tile, of everything, and beyond what is there."""
    rows, keys = padded_sizes(lengths_kernel)
    n = lengths_kernel.info.block_n
    case = Case(
        **random_qkv(lengths_kernel, rows, keys, batch=8, heads=2, heads_kv=1),
        causal=causal,
        lengths_q=Lengths(seqlens=(rows, 1, 0, rows - 7, 17, rows + 1000, 30, -3)),
        lengths_k=Lengths(seqlens=(keys, n + 1, 40, 1, 0, 2**31 - 1, n, 5)),
    )
    fill_beyond(case)
    out, lse = check_case(lengths_kernel, case)
    assert (out[2] == 0).all()
    assert (out[4] == 0).all()
    assert (lse[4] == -math.inf).all()
    assert (out[3, :, rows - 7 :] == 0).all()
    assert (lse[3, :, rows - 7 :] == -math.inf).all()


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_rows_beyond_are_zeros_where_the_others_are_nan(lengths_kernel: TestedKernel, tensor: str) -> None:
    rows, keys = padded_sizes(lengths_kernel)
    case = Case(
        **random_qkv(lengths_kernel, rows, keys, batch=2, heads=2, heads_kv=1),
        lengths_q=Lengths(seqlens=(rows, 3)),
    )
    getattr(case, tensor)[1, :, 2] = math.nan
    out, lse = run_case(lengths_kernel, case)
    assert out[0].isfinite().all()
    assert out[1, :, :3].isnan().all()
    assert (out[1, :, 3:] == 0).all()
    assert lse is not None
    assert (lse[1, :, 3:] == -math.inf).all()


@pytest.mark.parametrize("side", ["q", "k"])
def test_padded_on_one_side(lengths_kernel: TestedKernel, side: str) -> None:
    rows, keys = padded_sizes(lengths_kernel)
    lengths = Lengths(seqlens=(11, 33, 0))
    case = Case(
        **random_qkv(lengths_kernel, rows, keys, batch=3, bshd=True),
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=lengths if side == "q" else Lengths(),
        lengths_k=lengths if side == "k" else Lengths(),
    )
    fill_beyond(case)
    check_case(lengths_kernel, case, bshd=True)


def packed_case(kernel: TestedKernel, causal: Causal | None, *, bshd: bool = True) -> Case:
    """Six sequences, three of them without rows or without keys, and rows before and behind them."""
    rows, keys = padded_sizes(kernel)
    cu_seqlens_q = (3, 3 + rows, 3 + rows, 8 + rows, 9 + rows, 9 + rows, 39 + rows)
    cu_seqlens_k = (1, 1 + keys, 21 + keys, 21 + keys, 22 + keys, 40 + keys, 140 + keys)
    inputs = random_qkv(kernel, 44 + rows, 150 + keys, batch=1, heads=2, heads_kv=1, bshd=bshd)
    return Case(
        **inputs,
        causal=causal,
        lengths_q=Lengths(cu_seqlens=cu_seqlens_q),
        lengths_k=Lengths(cu_seqlens=cu_seqlens_k),
    )


@pytest.mark.parametrize("bshd", [True, False], ids=["token-major", "head-major"])
@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_packed(lengths_kernel: TestedKernel, causal: Causal | None, bshd: bool) -> None:
    case = packed_case(lengths_kernel, causal, bshd=bshd)
    fill_beyond(case)
    check_case(lengths_kernel, case, bshd=bshd)


def test_max_seqlen_is_a_bound(lengths_kernel: TestedKernel) -> None:
    case = packed_case(lengths_kernel, Causal.BOTTOM_RIGHT)
    out, lse = check_case(lengths_kernel, case)
    loose = replace(
        case,
        lengths_q=replace(case.lengths_q, longest=case.seqlen_q + lengths_kernel.info.block_m + 5),
        lengths_k=replace(case.lengths_k, longest=case.seqlen_k + 1000),
    )
    loose_out, loose_lse = run_case(lengths_kernel, loose)
    used = ~case.unused_rows()
    assert torch.equal(loose_out[:, :, used], out[:, :, used])
    assert torch.equal(loose_lse[:, :, used], lse[:, :, used])


def test_a_packed_sequence_has_the_bits_that_it_has_alone(lengths_kernel: TestedKernel) -> None:
    case = packed_case(lengths_kernel, Causal.BOTTOM_RIGHT)
    out, lse = run_case(lengths_kernel, case)
    for q, k in case.sequences:
        if q.length == 0 or k.length == 0:
            continue
        rows = slice(q.first_row, q.first_row + q.length)
        keys = slice(k.first_row, k.first_row + k.length)
        alone = Case(q=case.q[:, :, rows], k=case.k[:, :, keys], v=case.v[:, :, keys], causal=case.causal)
        alone_out, alone_lse = run_case(lengths_kernel, alone)
        assert torch.equal(alone_out, out[:, :, rows])
        assert torch.equal(alone_lse, lse[:, :, rows])


def test_packed_sequences_may_be_shorter_than_their_room(lengths_kernel: TestedKernel) -> None:
    """cu_seqlens and seqlens together: a cache with spare rows behind each sequence."""
    case = packed_case(lengths_kernel, Causal.BOTTOM_RIGHT)
    case = replace(
        case,
        lengths_q=replace(case.lengths_q, seqlens=(20, 0, 3, 5, 0, 30)),
        lengths_k=replace(case.lengths_k, seqlens=(15, 4, 0, 0, 9, 1000)),
    )
    fill_beyond(case)
    check_case(lengths_kernel, case)


def test_packed_queries_and_padded_keys(lengths_kernel: TestedKernel) -> None:
    """Each side has lengths of its own kind, or none."""
    keys = lengths_kernel.info.block_n + 9
    queries = random_qkv(lengths_kernel, 60, 1, batch=1, bshd=True)
    caches = random_qkv(lengths_kernel, 1, keys, batch=3, seed=1)
    case = Case(
        q=queries["q"],
        k=caches["k"],
        v=caches["v"],
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(cu_seqlens=(2, 3, 40, 60)),
        lengths_k=Lengths(seqlens=(keys, 37, 5)),
    )
    fill_beyond(case)
    check_case(lengths_kernel, case, bshd=True)
    all_keys = replace(
        case, k=case.k[1:2, :, :37].expand(3, -1, -1, -1), v=case.v[1:2, :, :37].expand(3, -1, -1, -1)
    )
    check_case(lengths_kernel, replace(all_keys, lengths_k=Lengths()), bshd=True)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_nothing_but_empty_sequences(lengths_kernel: TestedKernel, layout: str) -> None:
    """All of `out` becomes 0 where it is padded; packed, nothing is there to write."""
    inputs = random_qkv(lengths_kernel, 40, 50, batch=2 if layout == "padded" else 1)
    lengths = Lengths(seqlens=(0, 0)) if layout == "padded" else Lengths(cu_seqlens=(4, 4, 4), longest=64)
    out, lse = run_case(lengths_kernel, Case(**inputs, lengths_q=lengths, lengths_k=lengths))
    if layout == "padded":
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("cu_seqlens_q", "cu_seqlens_k"),
    [((0, 40, 9000), (0, 50, 2**31 - 1)), ((-5, 30, 20), (-(2**31), 30, 10)), ((40, 0, 40), (70, 60, 50))],
    ids=["beyond", "negative", "decreasing"],
)
def test_offsets_that_make_no_sense_lead_nowhere(
    lengths_kernel: TestedKernel, cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...]
) -> None:
    """Wrong values on the device cannot be reported; nor may they touch memory outside the tensors."""
    case = Case(
        **random_qkv(lengths_kernel, 40, 50, batch=1),
        lengths_q=Lengths(cu_seqlens=cu_seqlens_q, longest=40),
        lengths_k=Lengths(cu_seqlens=cu_seqlens_k, longest=50),
    )
    poison = OUTPUT_POISON[lengths_kernel.dtype]
    out = Guarded(case.out_shape, lengths_kernel.dtype, lengths_kernel.device, poison=poison)
    launch(lengths_kernel, *make_case_params(case, out.tensor, None))
    out.check_untouched("out")


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_grouped_query_heads(lengths_kernel: TestedKernel, heads_kv: int) -> None:
    case = Case(
        **random_qkv(lengths_kernel, 33, 70, batch=3, heads=4, heads_kv=heads_kv),
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(33, 20, 1)),
        lengths_k=Lengths(seqlens=(50, 70, 33)),
    )
    fill_beyond(case)
    check_case(lengths_kernel, case)
