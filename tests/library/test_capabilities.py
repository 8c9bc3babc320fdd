"""What a row takes: the package and the library ask the same of it, and say the same of what it lacks."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import pytest

from sdpa_cutlass import Causal, MaskType
from sdpa_cutlass.choice.legal import mismatches, needs
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo, Op, Takes, dtype_code, mask_code, read_kernels
from sdpa_cutlass.library.structs import Params
from sdpa_cutlass.problem import DType, Problem

ADDRESS = 1 << 20
PLAIN = Problem(dtype=DType.F16, batch=2, num_heads_q=2, num_heads_kv=1, seqlen_q=9, seqlen_k=9, head_dim=64)


def host_rows() -> list[KernelInfo]:
    """A row of attention for each family, head_dim and set of what rows take."""
    rows = [row for row in read_kernels(library(Target.HOST)) if row.op is Op.FORWARD]
    return list({(row.family, row.head_dim, row.takes): row for row in rows}.values())


def params_of(problem: Problem, *, packed: bool = False, num_splits: int = 0) -> Params:
    """The C struct of `problem`, whose tensors lie nowhere: nothing is launched."""
    dense = (2 * 16 * 64 * 2, 16 * 64 * 2, 64 * 2)
    params = Params(
        struct_size=ctypes.sizeof(Params), dtype=dtype_code(problem.dtype), batch=problem.batch,
        num_heads_q=problem.num_heads_q, num_heads_kv=problem.num_heads_kv, seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
        is_causal=int(problem.is_causal), softmax_scale=0.125, q=ADDRESS, k=ADDRESS, v=ADDRESS, out=ADDRESS,
        q_stride=dense, k_stride=dense, v_stride=dense, out_stride=dense, lse_stride=(18, 9),
        mask=ADDRESS if problem.mask else 0, mask_type=mask_code(problem.mask),
        p_dropout=0.5 if problem.has_dropout else 0, num_splits=num_splits,
    )  # fmt: skip
    if problem.window is not None:
        params.has_window, params.window_left, params.window_right = 1, *problem.window
    if problem.has_sinks:
        params.sinks, params.sinks_type = ADDRESS, mask_code(MaskType.F32)
    if problem.has_lengths and packed:
        params.cu_seqlens_q = params.cu_seqlens_k = ADDRESS
        params.total_q = params.total_k = 18
    elif problem.has_lengths:
        params.seqlens_k = ADDRESS
    return params


@pytest.fixture(scope="module")
def host() -> Library:
    return library(Target.HOST)


def test_every_row_is_for_one_op_and_says_what_it_takes(host: Library) -> None:
    rows = read_kernels(host)
    assert {row.op for row in rows} == set(Op)
    for row in rows:
        if row.op is Op.MERGE:
            assert row.takes == Takes.SMALLER_HEAD_DIM, row.name
            continue
        assert row.takes & (Takes.FULL | Takes.CAUSAL), row.name
        assert bool(row.takes & Takes.UNDROPPED) != bool(row.takes & Takes.DROPOUT), row.name
        assert row.block_m * row.block_n * row.stages * row.warps > 0, row.name


@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT], ids=["full", "causal"])
@pytest.mark.parametrize("mask", [None, *MaskType], ids=str)
def test_both_sides_refuse_the_same(causal: Causal | None, mask: MaskType | None, host: Library) -> None:
    refused = 0
    for row, lengths, packed, dropout, head_dim_v, head_dim, window, sinks in itertools.product(
        host_rows(),
        (False, True),
        (False, True),
        (False, True),
        (64, 56),
        (64, 40),
        (None, (3, 1)),
        (False, True),
    ):
        problem = replace(
            PLAIN, causal=causal, mask=mask, has_lengths=lengths, has_dropout=dropout,
            head_dim=head_dim, head_dim_v=head_dim_v, window=window, has_sinks=sinks,
        )  # fmt: skip
        num_splits = int(Takes.SPLITS in row.takes)
        reason = host.refusal(row.index, params_of(problem, packed=packed, num_splits=num_splits))
        known = mismatches(row, problem)
        assert (reason is None) == (not known), (row.name, problem, reason, known)
        missing = needs(row, problem) & ~row.takes
        assert reason is not None or not missing
        refused += reason is not None
    assert refused > 0


@pytest.mark.parametrize("bit", Takes, ids=lambda bit: bit.name)
def test_a_bit_that_is_lacked_is_named(bit: Takes, host: Library) -> None:
    lacking = next((row for row in host_rows() if bit not in row.takes and row.head_dim == 64), None)
    if lacking is None:
        pytest.skip("every row takes it")
    asked = {
        Takes.FULL: (PLAIN, "is_causal is 0; this kernel takes 1"),
        Takes.CAUSAL: (replace(PLAIN, causal=Causal.TOP_LEFT), "is_causal is 1; this kernel takes 0"),
        Takes.BOOL: (replace(PLAIN, mask=MaskType.BOOL), "mask is given; this kernel takes none"),
        Takes.BIAS16: (replace(PLAIN, mask=MaskType.F16), "mask is (given|a bias); this kernel takes"),
        Takes.BIAS32: (replace(PLAIN, mask=MaskType.F32), "mask is (given|a bias); this kernel takes"),
        Takes.LENGTHS: (replace(PLAIN, has_lengths=True), "seqlens_k is given; this kernel takes no lengths"),
        Takes.PACKED: (
            replace(PLAIN, has_lengths=True),
            "cu_seqlens_q is given; this kernel takes no",
        ),
        Takes.UNDROPPED: (PLAIN, "p_dropout is 0; this kernel takes more than 0"),
        Takes.DROPOUT: (replace(PLAIN, has_dropout=True), "p_dropout is 0.5; this kernel takes 0 only"),
        Takes.SMALLER_HEAD_DIM: (
            replace(PLAIN, head_dim_v=56),
            "head_dim is 64 and head_dim_v 56; this kernel takes 64 for both",
        ),
        Takes.SPLITS: (PLAIN, "num_splits is 1; this kernel takes 0"),
        Takes.WINDOW: (replace(PLAIN, window=(3, 1)), r"window is \(3, [01]\); this kernel takes none"),
        Takes.SINKS: (replace(PLAIN, has_sinks=True), "sinks is given; this kernel takes none"),
    }
    problem, message = asked[bit]
    if bit is not Takes.FULL and bit is not Takes.CAUSAL and Takes.FULL not in lacking.takes:
        problem = replace(problem, causal=Causal.TOP_LEFT)
    if bit is not Takes.DROPOUT and Takes.UNDROPPED not in lacking.takes and bit is not Takes.UNDROPPED:
        problem = replace(problem, has_dropout=True)
    params = params_of(problem, packed=bit is Takes.PACKED, num_splits=int(bit is Takes.SPLITS))
    with pytest.raises(Exception, match=f"{lacking.name}: {message}"):
        host.make_plan(lacking.index, params, 0)


def test_a_split_kernel_has_a_number_of_splits(host: Library) -> None:
    row = next(row for row in host_rows() if Takes.SPLITS in row.takes)
    assert host.refusal(row.index, params_of(replace(PLAIN, head_dim=row.head_dim), num_splits=1)) is None
    reason = host.refusal(row.index, params_of(replace(PLAIN, head_dim=row.head_dim)))
    assert reason is not None
    assert "num_splits is 0; this kernel takes 1 to" in reason


def test_the_baseline_takes_what_its_rows_say() -> None:
    baseline = [row for row in host_rows() if row.family is Family.UNFUSED]
    assert {row.takes for row in baseline} == {
        Takes.FULL | Takes.UNDROPPED,
        Takes.CAUSAL | Takes.UNDROPPED,
    }


def test_of_several_things_that_are_lacked_the_first_is_named(host: Library) -> None:
    row = next(row for row in host_rows() if row.takes == Takes.FULL | Takes.UNDROPPED and row.head_dim == 64)
    problem = replace(PLAIN, mask=MaskType.BOOL, has_lengths=True, has_dropout=True, head_dim_v=56)
    reason = host.refusal(row.index, params_of(problem))
    assert reason == f"{row.name}: mask is given; this kernel takes none"
    assert mismatches(row, problem)[0] == "takes no mask"
