"""Split kernels: several CTAs share the keys of a tile, and a tile holds the rows of all heads of a key head.

What they have in common with general kernels (sizes, strides, lengths, head_dims) is tested beside those.
`launch` fills every workspace with NaNs, and looks at what lies around it and at all counters afterwards.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.choice.cost.splits import MERGED_BY_LAST_CTA
from sdpa_cutlass.library.structs import MAX_TILES
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, SplitRoom, launch, make_case_params, random_qkv, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.test_lengths import fill_beyond

ALIGNMENTS = (None, *Causal)


def some_keys(kernel: TestedKernel) -> int:
    """Keys of ten blocks, the last of them cut."""
    return 9 * kernel.info.block_n + 13


SPLITS = (1, 2, 3, 7, 13)  # of ten key blocks, 10, 5, 4 and 2 (and two splits of none), more than blocks


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 32])
def test_ratios_and_splits(split_kernel: TestedKernel, ratio: int) -> None:
    """Tiles begin and end within a position's heads, wherever block_m falls."""
    keys = some_keys(split_kernel)
    cases = zip((33, 17, 16, 5, 2, 1), (*SPLITS, split_kernel.max_splits), strict=True)
    for i, (rows, num_splits) in enumerate(cases):
        inputs = random_qkv(split_kernel, rows, keys, batch=1, heads=2 * ratio, heads_kv=2, bshd=i % 2 > 0)
        kernel = split_kernel.with_splits(num_splits)
        check_case(kernel, Case(**inputs, causal=ALIGNMENTS[i % 3]), bshd=i % 2 > 0)


@pytest.mark.parametrize("rows", range(1, 34, 4))
def test_rows(split_kernel: TestedKernel, rows: int) -> None:
    inputs = random_qkv(split_kernel, rows, some_keys(split_kernel), heads=6, heads_kv=2)
    case = Case(**inputs, causal=ALIGNMENTS[rows // 4 % 3])
    for num_splits in SPLITS:
        check_case(split_kernel.with_splits(num_splits), case)


def test_several_tiles(split_kernel: TestedKernel) -> None:
    """Their rows, and the parts of a tile that see other keys than its other rows do."""
    rows, keys = 2 * split_kernel.info.block_m + 5, some_keys(split_kernel)
    inputs = random_qkv(split_kernel, rows, keys, batch=1, heads=2)
    for num_splits, causal in zip((2, 3, 5), ALIGNMENTS, strict=True):
        check_case(split_kernel.with_splits(num_splits), Case(**inputs, causal=causal))


def test_every_split_may_have_a_block(split_kernel: TestedKernel) -> None:
    """All splits are active; the last CTA reads them sixteen at a time."""
    for most in (15, 16, 17, 100):
        inputs = random_qkv(split_kernel, 1, (most - 1) * split_kernel.info.block_n + 1, batch=1, heads=3)
        check_case(split_kernel.with_splits(most), Case(**inputs))


@pytest.mark.parametrize("causal", ALIGNMENTS)
def test_lengths_that_leave_splits_empty(split_kernel: TestedKernel, causal: Causal | None) -> None:
    keys, n = some_keys(split_kernel), split_kernel.info.block_n
    case = Case(
        **random_qkv(split_kernel, 11, keys, batch=8, heads=6, heads_kv=2),
        causal=causal,
        lengths_q=Lengths(seqlens=(11, 11, 3, 11, 0, 11, 7, 11)),
        lengths_k=Lengths(seqlens=(keys, 0, 1, n, 50, n + 1, 3 * n, 2**31 - 1)),
    )
    fill_beyond(case)
    for num_splits in SPLITS:
        out, lse = check_case(split_kernel.with_splits(num_splits), case)
        for empty in (out[1], out[2, :, 3:], out[4], out[6, :, 7:]):
            assert (empty == 0).all()
        for empty in (lse[1], lse[2, :, 3:], lse[4], lse[6, :, 7:]):
            assert (empty == -math.inf).all()
    few = replace(case, q=case.q[:3, :, :1], lengths_q=Lengths(seqlens=(1, 1, 0)))
    few = replace(few, k=case.k[:3], v=case.v[:3], lengths_k=Lengths(seqlens=(keys, 0, 1)))
    check_case(split_kernel.with_splits(split_kernel.max_splits), few)


@pytest.mark.parametrize("causal", ALIGNMENTS)
@pytest.mark.parametrize("bshd", [True, False], ids=["token-major", "head-major"])
def test_packed_sequences(split_kernel: TestedKernel, causal: Causal | None, bshd: bool) -> None:
    keys, n = some_keys(split_kernel), split_kernel.info.block_n
    total = 4 + keys + 3 * n
    case = Case(
        **random_qkv(split_kernel, 50, total, batch=1, heads=8, heads_kv=2, bshd=bshd),
        causal=causal,
        lengths_q=Lengths(cu_seqlens=(2, 3, 3, 20, 49, 50)),
        lengths_k=Lengths(cu_seqlens=(1, 1 + keys, 2 + keys, 2 + keys + n, 2 + keys + n, total)),
    )
    fill_beyond(case)
    for num_splits in SPLITS:
        check_case(split_kernel.with_splits(num_splits), case, bshd=bshd)


def test_rows_that_see_no_key(split_kernel: TestedKernel) -> None:
    """More rows than keys, aligned at the end: of a tile, some rows, all rows, or none see keys."""
    rows, keys = 5 * split_kernel.info.block_m // 4, split_kernel.info.block_n + 5
    inputs = random_qkv(split_kernel, rows + keys, keys, batch=2, heads=8, heads_kv=2)
    lengths = {"lengths_k": Lengths(seqlens=(keys, 9)), "lengths_q": Lengths(seqlens=(rows + keys, rows))}
    for options in ({}, lengths):
        case = Case(**inputs, causal=Causal.BOTTOM_RIGHT, **options)
        for num_splits in (1, 2, 3, 7):
            out, lse = check_case(split_kernel.with_splits(num_splits), case)
            assert (out[0, :, :rows] == 0).all()
            assert (lse[0, :, :rows] == -math.inf).all()
            assert lse[0, :, rows:].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.2, 30.0])
def test_splits_of_very_different_weight(split_kernel: TestedKernel, scale: float) -> None:
    """All of a row's weight in one split, or none of it, or all splits alike."""
    inputs = random_qkv(split_kernel, 5, some_keys(split_kernel), batch=1, heads=4)
    case = Case(**inputs, scale=scale)
    for num_splits in (2, 7):
        check_case(split_kernel.with_splits(num_splits), case)


def test_a_nan_comes_out_of_any_split(split_kernel: TestedKernel) -> None:
    """Of the rows that see it; the merge must not take it for a small number."""
    keys = some_keys(split_kernel)
    for key in (0, keys // 2, keys - 1):
        inputs = random_qkv(split_kernel, 3, keys, batch=1, heads=4)
        inputs["k"][:, :, key] = math.nan
        for num_splits in (1, 3, 7):
            case = Case(**inputs, causal=Causal.BOTTOM_RIGHT)
            out, lse = run_case(split_kernel.with_splits(num_splits), case)
            sees = torch.tensor([key <= row + keys - 3 for row in range(3)], device=out.device)
            assert torch.equal(lse.isnan(), sees.expand(lse.shape))
            assert torch.equal(out.isnan(), sees[:, None].expand(out.shape))


def test_softmax_lse_is_optional(split_kernel: TestedKernel) -> None:
    case = Case(**random_qkv(split_kernel, 5, some_keys(split_kernel), heads=6, heads_kv=2))
    for num_splits in (1, 3):
        kernel = split_kernel.with_splits(num_splits)
        assert torch.equal(run_case(kernel, case)[0], run_case(kernel, case, with_lse=False)[0])


def ragged_case(kernel: TestedKernel) -> Case:
    """Several tiles of several lengths, causal."""
    keys = some_keys(kernel)
    return Case(
        **random_qkv(kernel, kernel.info.block_m // 2 + 1, keys, batch=3, heads=8, heads_kv=2),
        causal=Causal.BOTTOM_RIGHT,
        lengths_k=Lengths(seqlens=(keys, keys // 2, 1)),
    )


@pytest.mark.kernels(device="cpu")
def test_schedules_and_threads_do_not_change_a_bit(split_kernel: TestedKernel) -> None:
    """Threads decide which CTA of a tile is the last one, seeds the order within it."""
    case = ragged_case(split_kernel)
    library = split_kernel.library
    try:
        for num_splits in (2, 7):
            kernel = split_kernel.with_splits(num_splits)
            library.host_configure(num_threads=1)
            expected, expected_lse = run_case(kernel, case)
            for seed, num_threads in ((1, 1), (2, 2), (3, 4), (4, 7), (5, 3)):
                library.host_configure(schedule_seed=seed, num_threads=num_threads)
                out, lse = run_case(kernel, case)
                assert torch.equal(out, expected), f"seed {seed}, {num_threads} threads"
                assert torch.equal(lse, expected_lse), f"seed {seed}, {num_threads} threads"
    finally:
        library.host_configure(num_threads=HOST_THREADS)


@pytest.mark.kernels(device="cpu")
def test_scores_of_zero(split_kernel: TestedKernel) -> None:
    """A row_max whose bits are 0 looks like the flag of a CTA that is not the last: they share their room."""
    case = Case(**random_qkv(split_kernel, 2, some_keys(split_kernel), batch=2, heads=4))
    case.q.zero_()
    kernel, library = split_kernel.with_splits(3), split_kernel.library
    try:
        for seed in range(6):
            library.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
            check_case(kernel, case)
    finally:
        library.host_configure(num_threads=HOST_THREADS)


def test_it_does_not_matter_who_is_last(split_kernel: TestedKernel) -> None:
    """With counters that begin at c, the CTA that arrives c before the last one merges, from parts that an
    earlier launch left in the workspace. Not on a GPU: there a later CTA may write its part meanwhile.
    """
    if split_kernel.device == "cuda":
        pytest.skip("CTAs run at the same time there")
    num_splits = 5  # of two blocks each
    kernel = split_kernel.with_splits(num_splits)
    case = Case(**random_qkv(kernel, 3, some_keys(kernel), batch=2, heads=8, heads_kv=2))
    expected, expected_lse = run_case(kernel, case)
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    params, held = make_case_params(case, out, lse)
    params.num_splits = num_splits
    params.workspace_bytes = kernel.library.workspace_bytes(kernel.info.index, params)
    room = SplitRoom(kernel.device, params.workspace_bytes)
    params.workspace, params.split_arrivals = room.workspace, room.arrivals
    launch(kernel, params, held)
    room.check("all of them")
    for before in range(1, num_splits):
        out.zero_()
        lse.zero_()
        room.counters[:] = before
        launch(kernel, params, held)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert (room.counters == before).all()  # reset by the CTA that merged, then counted again


def parts_bytes(kernel: TestedKernel, rows: int, num_splits: int) -> int:
    return 4 * min(rows, kernel.info.block_m) * kernel.info.head_dim * num_splits


def test_a_second_launch_merges_large_parts(split_kernel: TestedKernel) -> None:
    """It looks at no counters, writes the bits that the last CTA of a tile would, and leaves rows of tiles
    that one CTA or none has keys for.
    """
    num_splits = max(MERGED_BY_LAST_CTA // parts_bytes(split_kernel, 64, 1) + 1, 10)
    keys = (num_splits - 1) * split_kernel.info.block_n + 13
    kernel = split_kernel.with_splits(num_splits)
    rows = kernel.info.block_m // 4 + 2  # of four heads: a whole tile and a cut one
    inputs = random_qkv(kernel, rows, keys, batch=4, heads=8, heads_kv=2)
    case = Case(**inputs, lengths_k=Lengths(seqlens=(keys, keys // 2, 1, 0)))
    assert parts_bytes(kernel, 4 * rows, num_splits) > MERGED_BY_LAST_CTA
    out, lse = check_case(kernel, case)
    params, held = make_case_params(case, again := torch.zeros_like(out), lse_again := torch.zeros_like(lse))
    params.num_splits = num_splits
    params.workspace_bytes = kernel.library.workspace_bytes(kernel.info.index, params)
    room = SplitRoom(kernel.device, params.workspace_bytes)
    params.workspace, params.split_arrivals = room.workspace, room.arrivals
    room.counters[:] = 1000  # no CTA of the launch is the last one
    launch(kernel, params, held)
    assert (room.counters == 1000).all()
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)

    if parts_bytes(kernel, 4, num_splits) <= MERGED_BY_LAST_CTA:  # of one row of four heads
        first = Case(**{**inputs, "q": inputs["q"][:, :, :1]}, lengths_k=case.lengths_k)
        first_out, first_lse = run_case(kernel, first)
        assert torch.equal(first_out, out[:, :, :1])
        assert torch.equal(first_lse, lse[:, :, :1])


def test_repeated_runs_give_the_same_bits(split_kernel: TestedKernel) -> None:
    case = ragged_case(split_kernel)
    for num_splits in (1, 2, 7):
        kernel = split_kernel.with_splits(num_splits)
        expected, expected_lse = run_case(kernel, case)
        for _ in range(3):
            out, lse = run_case(kernel, case)
            assert torch.equal(out, expected)
            assert torch.equal(lse, expected_lse)


def test_as_many_tiles_as_there_are_counters(split_kernel: TestedKernel) -> None:
    """Every second tile leaves early, having no keys."""
    keys, batch = split_kernel.info.block_n + 1, MAX_TILES // 4
    inputs = random_qkv(split_kernel, 1, keys, batch=batch, heads=8 if split_kernel.info.packs_heads else 4)
    inputs["k"], inputs["v"] = (t.expand(-1, 4, -1, -1) for t in (inputs["k"], inputs["v"]))
    lengths = Lengths(seqlens=(keys, 0) * (batch // 2))
    check_case(split_kernel.with_splits(2), Case(**inputs, lengths_k=lengths))


# ---- what the C ABI refuses ----


def refused(kernel: TestedKernel, **changes: int | float) -> str | None:
    """The reason for a small problem with these fields of sdpa_params, which is fine without."""
    params, _ = make_case_params(*small_problem(kernel), None)
    params.num_splits = 3
    assert kernel.library.refusal(kernel.info.index, params) is None
    for name, value in changes.items():
        setattr(params, name, value)
    return kernel.library.refusal(kernel.info.index, params)


def small_problem(kernel: TestedKernel) -> tuple[Case, torch.Tensor]:
    """One tile: four heads of one key head and one position, or one head."""
    heads = 4 if kernel.info.packs_heads else 1
    case = Case(**random_qkv(kernel, 1, some_keys(kernel), batch=1, heads=heads))
    return case, torch.empty_like(case.q)


def test_the_number_of_splits_has_limits(split_kernel: TestedKernel) -> None:
    most = split_kernel.max_splits
    for fine in (1, 2, most):
        assert refused(split_kernel, num_splits=fine) is None
    for bad in (0, -1, -(2**31), most + 1, 2**31 - 1):
        reason = refused(split_kernel, num_splits=bad)
        assert reason is not None
        assert f"num_splits is {bad}; this kernel takes 1 to {most}" in reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mask": 4096, "mask_type": 1}, "mask is given; this kernel takes none"),
        ({"p_dropout": 0.1}, "p_dropout"),
        ({"batch": MAX_TILES + 1}, f"{MAX_TILES + 1} tiles; more than 1 split takes at most {MAX_TILES}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(split_kernel: TestedKernel, changes: dict[str, int | float], word: str) -> None:
    reason = refused(split_kernel, **changes)
    assert reason is not None
    assert word in reason


def test_one_split_takes_any_number_of_tiles_and_no_workspace(split_kernel: TestedKernel) -> None:
    assert refused(split_kernel, batch=MAX_TILES + 1, num_splits=1) is None
    params, _ = make_case_params(*small_problem(split_kernel), None)
    library, index = split_kernel.library, split_kernel.info.index
    params.num_splits = 1
    assert library.workspace_bytes(index, params) == 0
    params.num_splits = 3
    rows = 3 * split_kernel.info.block_m
    parts = rows * 4 * (split_kernel.info.head_dim + 2)
    assert library.workspace_bytes(index, params) == parts + 4 * MAX_TILES


def test_the_library_brings_counters(split_kernel: TestedKernel) -> None:
    """Where the caller has none. The workspace is full of NaNs, and nothing around it is written."""
    kernel = split_kernel.with_splits(3)
    case = ragged_case(kernel)
    expected, expected_lse = run_case(kernel, case)
    for _ in range(3):
        out, lse = torch.zeros_like(expected), torch.zeros_like(expected_lse)
        params, held = make_case_params(case, out, lse)
        params.num_splits = kernel.num_splits
        params.workspace_bytes = kernel.library.workspace_bytes(kernel.info.index, params)
        room = SplitRoom(kernel.device, params.workspace_bytes)
        params.workspace = room.workspace
        launch(kernel, params, held)
        room.check("the counters of the caller are untouched")
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"split_arrivals": lambda room: room.arrivals + 2}, "it must be a multiple of 4"),
        ({"workspace": lambda room: None}, "workspace is (nil) with 0 bytes; this problem needs"),
        ({"workspace": lambda room: room.workspace + 128}, "it must be a multiple of 256"),
        ({"workspace_bytes": lambda room: 64}, "with 64 bytes; this problem needs"),
    ],
    ids=["misaligned-counters", "no-workspace", "misaligned-workspace", "small-workspace"],
)
def test_where_splits_meet_is_checked(split_kernel: TestedKernel, changes: dict, word: str) -> None:
    case, out = small_problem(split_kernel)
    params, held = make_case_params(case, out, None)
    params.num_splits = 3
    library, index = split_kernel.library, split_kernel.info.index
    params.workspace_bytes = library.workspace_bytes(index, params)
    room = SplitRoom(split_kernel.device, params.workspace_bytes)
    params.workspace, params.split_arrivals = room.workspace, room.arrivals
    for name, value in changes.items():
        setattr(params, name, value(room))
    assert library.launch_function(index, params, 0, None) == 1  # SDPA_INVALID_ARGUMENT
    assert word in library.last_error()
    room.check("nothing was launched")
    del held


def test_plain_kernels_take_no_splits(fused_kernel: TestedKernel) -> None:
    expect_no_splits(fused_kernel)


def test_general_kernels_take_no_splits(lengths_kernel: TestedKernel) -> None:
    if lengths_kernel.info.is_split:
        pytest.skip("it takes splits")
    expect_no_splits(lengths_kernel)


def test_the_baseline_takes_no_splits(unfused_kernel: TestedKernel) -> None:
    expect_no_splits(unfused_kernel)


def expect_no_splits(kernel: TestedKernel) -> None:
    case = Case(
        **random_qkv(kernel, 8, 8, heads=2, heads_kv=2),
        causal=Causal.TOP_LEFT if kernel.info.is_causal else None,
    )
    params, _ = make_case_params(case, torch.empty_like(case.q), None)
    library, index = kernel.library, kernel.info.index
    assert library.refusal(index, params) is None
    for num_splits in (-1, 1, 2):
        params.num_splits = num_splits
        reason = library.refusal(index, params)
        assert reason is not None
        assert f"num_splits is {num_splits}; this kernel takes 0" in reason
