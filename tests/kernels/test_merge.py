"""What merge_states computes, against the float64 reference: any parts, dtypes, strides and sinks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_cutlass import merge_states
from sdpa_cutlass.call import merging as call_merging
from sdpa_cutlass.call.launch import library_for
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.structs import MAX_LISTED_PARTS
from sdpa_cutlass.problem import DType
from tests.kernels import merging
from tests.kernels.harness import HOST_THREADS, OUTPUT_POISON, Guarded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF = math.inf


def parts(
    num_parts: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    spread: float = 4.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random outs of `shape`, and lses that differ by about `spread`."""
    draw = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=draw).to(device, dtype) for _ in range(num_parts)]
    lses = [(spread * torch.randn(shape[:-1], generator=draw)).to(device) for _ in range(num_parts)]
    return outs, lses


def check(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges, and applies the rule."""
    out, lse = merge_states(outs, lses, sinks=sinks, out_dtype=out_dtype)
    assert out.dtype is (out_dtype or outs[0].dtype)
    assert (out.shape, lse.shape, lse.dtype) == (outs[0].shape, lses[0].shape, torch.float32)
    assert not (broken := merging.violations(out, lse, outs, lses, sinks)), broken
    return out, lse


@pytest.mark.parametrize("special", [INF, math.nan], ids=str)
@pytest.mark.parametrize("others", [0.0, -INF, INF, math.nan], ids=str)
@pytest.mark.parametrize("where", ["first", "last", "sink"])
def test_infinity_and_nan_go_on_as_in_float64(special: float, others: float, where: str, device: str) -> None:
    outs, lses = parts(3, (2, 2, 4, 16), device=device)
    sinks = None
    for lse in lses:
        lse[0, 0, 1] = others
    if where == "sink":
        sinks = torch.tensor([special, 0.0], device=device)
    else:
        lses[0 if where == "first" else -1][0, 0, 1] = special
    check(outs, lses, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_keys_is_zero_whatever_its_parts_hold(dtype: torch.dtype, device: str) -> None:
    outs, lses = parts(4, (2, 3, 5, 40), dtype, device=device)
    for out, lse in zip(outs, lses, strict=True):
        lse[1, :, 2] = -INF
        out[1, :, 2] = math.nan
    lses[2][0, 0, 0] = -INF
    outs[2][0, 0, 0] = INF
    out, lse = check(outs, lses)
    assert (out[1, :, 2] == 0).all()
    assert (lse[1, :, 2] == -INF).all()
    sinks = torch.tensor([-3.0, 7.0, -INF], device=device)
    out, lse = check(outs, lses, sinks)
    assert (out[1, :, 2] == 0).all()
    assert torch.equal(lse[1, :, 2], sinks)


@pytest.mark.parametrize("sink", [None, 900.0, -900.0], ids=str)
@pytest.mark.parametrize("offsets", [(0, 300, -300), (-500, -400, 0), (1e4, 1e4, -1e4)], ids=str)
def test_weights_do_not_overflow(
    offsets: tuple[float, float, float], sink: float | None, device: str
) -> None:
    """Whichever part, or the sink, has the largest exponent."""
    outs, lses = parts(3, (1, 2, 5, 32), device=device)
    sinks = None if sink is None else torch.full((2,), sink, device=device)
    check(outs, [lse + offset for lse, offset in zip(lses, offsets, strict=True)], sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_comes_back_with_its_bits(dtype: torch.dtype, device: str) -> None:
    outs, lses = parts(1, (2, 2, 9, 24), dtype, device=device)
    out, lse = check(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


def test_the_sink_joins_once_however_many_parts_there_are(device: str) -> None:
    """Five parts without keys change nothing."""
    outs, lses = parts(2, (1, 2, 4, 32), device=device)
    sinks = torch.tensor([1.5, 0.0], device=device)
    few = check(outs, lses, sinks)
    nothing = [torch.full_like(lses[0], -INF)] * 5
    many = check(outs + [outs[0]] * 5, lses + nothing, sinks)
    assert torch.equal(few[0], many[0])
    assert torch.equal(few[1], many[1])


@pytest.mark.parametrize("num_parts", [2, 4, 5, MAX_LISTED_PARTS, MAX_LISTED_PARTS + 1, 70])
def test_a_list_and_a_leading_dimension_give_the_same_bits(num_parts: int, device: str) -> None:
    outs, lses = parts(num_parts, (2, 2, 3, 72), torch.float16, device=device)
    listed = check(outs, lses, out_dtype=torch.float32)
    stacked = merge_states(torch.stack(outs), torch.stack(lses), out_dtype=torch.float32)
    assert torch.equal(listed[0], stacked[0])
    assert torch.equal(listed[1], stacked[1])


def strided(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """The same values laid out in another way."""
    if order == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "spare columns":
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 16), math.nan)
        wide[..., 8:-8] = tensor
        return wide[..., 8:-8]
    if order == "other rows":
        tall = tensor.new_full((*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1]), math.nan)
        tall[..., ::2, :] = tensor
        return tall[..., ::2, :]
    return tensor[:1].expand(tensor.shape)  # the first batch


@pytest.mark.parametrize("order", ["bshd", "spare columns", "other rows", "expanded"])
def test_parts_may_have_any_strides_and_each_its_own(order: str, device: str) -> None:
    outs, lses = parts(3, (2, 3, 4, 48), torch.bfloat16, device=device)
    if order == "expanded":
        outs, lses = [strided(x, order) for x in outs], [strided(x, order) for x in lses]
    expected = check([x.contiguous() for x in outs], [x.contiguous() for x in lses])
    changed = [outs[0], strided(outs[1], order), outs[2]]
    by_head = lses[1].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    out, lse = check(changed, [lses[0], by_head, lses[2][:, :, :]])
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    everywhere = check([strided(x, order) for x in outs], lses)
    assert torch.equal(everywhere[0], expected[0])


def test_parts_of_a_leading_dimension_may_lie_apart_or_backwards_in_memory(device: str) -> None:
    outs, lses = parts(4, (1, 2, 5, 16), device=device)
    room, lse_room = torch.stack(outs), torch.stack(lses)
    chosen = check(outs[::2], lses[::2])
    assert torch.equal(merge_states(room[::2], lse_room[::2])[0], chosen[0])
    last = torch.stack(outs, 3)  # [batch, heads, rows, parts, columns]
    moved = merge_states(last.permute(3, 0, 1, 2, 4), torch.stack(lses, 3).permute(3, 0, 1, 2))
    assert torch.equal(moved[0], check(outs, lses)[0])


def test_out_is_laid_out_as_the_first_part_is(device: str) -> None:
    outs, lses = parts(2, (2, 3, 4, 16), torch.float16, device=device)
    swapped = [strided(out, "bshd") for out in outs]
    assert merge_states(swapped, lses)[0].stride() == swapped[0].stride()
    assert merge_states(swapped, lses, out_dtype=torch.float32)[0].stride() == swapped[0].stride()
    assert merge_states(outs, lses)[0].is_contiguous()


@pytest.mark.parametrize("shape", [(3, 7, 32), (5, 32)], ids=str)
def test_batch_and_heads_may_be_left_out(shape: tuple[int, ...], device: str) -> None:
    outs, lses = parts(3, (1,) * (4 - len(shape)) + shape, device=device)  # type: ignore[arg-type]
    sinks = torch.randn(outs[0].shape[1], generator=torch.Generator().manual_seed(5)).to(device)
    expected = check(outs, lses, sinks)
    few = [x.view(shape) for x in outs], [x.view(shape[:-1]) for x in lses]
    for given_parts in (few, (torch.stack(few[0]), torch.stack(few[1]))):
        out, lse = merge_states(*given_parts, sinks=sinks)
        assert (out.shape, lse.shape) == (shape, shape[:-1])
        assert torch.equal(out, expected[0].view(shape))
        assert torch.equal(lse, expected[1].view(shape[:-1]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_sinks_may_be_of_any_float_type_and_stride(dtype: torch.dtype, device: str) -> None:
    outs, lses = parts(2, (2, 4, 3, 16), device=device)
    sinks = torch.tensor([0.5, -2.0, 3.25, -INF], dtype=dtype, device=device)
    expected = check(outs, lses, sinks.float())
    strided_sinks = sinks[:, None].expand(4, 3).contiguous()[:, 1]
    for given_sinks in (sinks, strided_sinks, sinks[:1].expand(4)):
        out, lse = check(outs, lses, given_sinks)
        if given_sinks is not sinks and given_sinks.stride() == (0,):
            continue
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("size", [(0, 2, 3, 16), (2, 0, 3, 16), (2, 2, 0, 16)], ids=str)
def test_nothing_to_merge_gives_empty_results(size: tuple[int, int, int, int], device: str) -> None:
    outs, lses = parts(2, size, device=device)
    out, lse = merge_states(outs, lses)
    assert (out.shape, lse.shape) == (size, size[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_repeat_whatever_the_order_of_threads(dtype: torch.dtype) -> None:
    outs, lses = parts(7, (2, 3, 19, 80), dtype)
    host = library(Target.HOST)
    try:
        host.host_configure(schedule_seed=0, num_threads=1)
        expected = merge_states(outs, lses)
        for seed in (1, 2, 3):
            host.host_configure(schedule_seed=seed, num_threads=2)
            for got, wanted in zip(merge_states(outs, lses), expected, strict=True):
                assert torch.equal(got, wanted)
    finally:
        host.host_configure(num_threads=HOST_THREADS)


def test_bits_of_a_row_do_not_depend_on_its_neighbours(device: str) -> None:
    outs, lses = parts(5, (3, 2, 33, 56), torch.float16, device=device)
    whole = merge_states(outs, lses)[0]
    alone = merge_states([x[1:2, 1:, 7:8] for x in outs], [x[1:2, 1:, 7:8] for x in lses])[0]
    assert torch.equal(alone, whole[1:2, 1:, 7:8])


def test_parts_go_into_the_sum_in_their_order(device: str) -> None:
    """1 and -1 with equal weights leave what is small exactly when they meet first."""
    lse = torch.zeros(1, 1, 1, device=device)

    def merged(*values: float) -> float:
        outs = [torch.full((1, 1, 1, 8), value, device=device) for value in values]
        return float(merge_states(outs, [lse] * len(values))[0][0, 0, 0, 0])

    tiny = 2.0**-30
    assert merged(1.0, -1.0, tiny, 0.0) == tiny / 4
    assert merged(tiny, 1.0, -1.0, 0.0) == 0.0
    assert merged(*[0.0] * 4, 1.0, -1.0, tiny, 0.0) == tiny / 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 37, 72), (1, 5, 7, 256)], ids=str)
def test_nothing_outside_of_the_results_is_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    outs, lses = parts(5, shape, torch.float16, device=device)
    room = Guarded(shape, dtype, device, poison=OUTPUT_POISON[dtype], spare_rows=3, bshd=True)
    lse_room = Guarded(shape[:3], torch.float32, device, poison=OUTPUT_POISON[torch.float32])
    given_parts = call_merging.read(outs, lses, None, dtype)
    native, found = library_for(outs[0])
    kernel = call_merging._kernel(native, found, DType.F16, shape[3])
    params = call_merging._params(given_parts, None, room.tensor, lse_room.tensor)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    native.merge_states(kernel.index, params, found.index, stream)
    if device == "cuda":
        torch.cuda.synchronize()
    for what, guarded in (("out", room), ("lse", lse_room)):
        guarded.check_untouched(what)
        guarded.check_written(what)
    assert not (broken := merging.violations(room.tensor, lse_room.tensor, outs, lses)), broken


# What may stand in an lse, next to ordinary numbers.
_LSES = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, -INF, -INF, 88.0, -104.0, 1e4, -1e4, 3e38, -3e38]),
)


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parts_are_merged_as_float64_does(data: st.DataObject, device: str) -> None:
    draw = data.draw
    num_parts = draw(st.integers(1, 9), "num_parts")
    shape = (
        draw(st.integers(1, 3), "batch"),
        draw(st.integers(1, 3), "heads"),
        draw(st.sampled_from([1, 2, 7, 33]), "seqlen_q"),
        8 * draw(st.integers(1, 32), "head_dim / 8"),
    )
    dtype, out_dtype = draw(st.sampled_from(DTYPES), "dtype"), draw(st.sampled_from(DTYPES), "out_dtype")
    outs, lses = parts(num_parts, shape, dtype, seed=draw(st.integers(0, 99), "seed"), device=device)
    for lse in lses:
        flat = lse.view(-1)
        for at in draw(st.lists(st.integers(0, flat.numel() - 1), max_size=4), "special rows"):
            flat[at] = draw(_LSES, "lse")
    sinks = None
    if draw(st.booleans(), "has sinks"):
        values = st.one_of(_LSES, st.sampled_from([INF, -INF]))
        sinks = torch.tensor(draw(st.lists(values, min_size=shape[1], max_size=shape[1]), "sinks"))
        sinks = sinks.to(device, torch.float32)
    check(outs, lses, sinks, out_dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_logarithms_to_base_two_and_rows_before_heads_need_no_copy(dtype: torch.dtype, device: str) -> None:
    """FlashInfer's convention: v [rows, heads, head_dim], s [rows, heads] to base 2."""
    outs, lses = parts(2, (1, 4, 9, 64), dtype, device=device)
    v = [out[0].transpose(0, 1).contiguous() for out in outs]
    s = [lse[0].transpose(0, 1).contiguous() * math.log2(math.e) for lse in lses]
    out, lse = merge_states([x.transpose(0, 1) for x in v], [x.transpose(0, 1) * math.log(2) for x in s])
    assert out.transpose(0, 1).is_contiguous()
    expected = check(outs, lses)
    torch.testing.assert_close(out, expected[0][0], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(lse, expected[1][0], rtol=1e-5, atol=1e-5)
