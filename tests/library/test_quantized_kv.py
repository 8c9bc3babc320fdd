"""quantize_kv: the bits of a plain call with a precision, made once; what it keeps, and how it grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sdpa_cutlass import (
    DType,
    NoKernelError,
    Precision,
    QuantizedKV,
    attention,
    kernels,
    quantize_kv,
)
from sdpa_cutlass.call.extras import needs_dense_copy
from sdpa_cutlass.call.quantized_memory import BLOCK, key_bytes
from sdpa_cutlass.errors import ArgumentError
from sdpa_cutlass.library.locate import Target
from tests.library.reference import rand
from tests.library.test_lengths import int32
from tests.library.test_precision import relative_error

PRECISIONS = tuple(Precision)
DTYPES = (torch.float16, torch.bfloat16)
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def inputs(
    device: str,
    rows: int = 70,
    keys: int = 130,
    *,
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    head_dim_v: int = 64,
    batch: int = 2,
    heads: int = 2,
) -> list[torch.Tensor]:
    sizes = ((2 * heads, rows, head_dim), (heads, keys, head_dim), (heads, keys, head_dim_v))
    return [rand(batch, *size, device=device, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


def plain_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: QuantizedKV, **options: Any) -> Any:
    """By the kernel that the object was made with: others have other last bits."""
    name = kept._kernel.name
    return attention(q, k, v, precision=kept.precision, return_lse=True, **{"kernel": name, **options})


def kept_call(q: torch.Tensor, kept: QuantizedKV, **options: Any) -> Any:
    return attention(q, kept, return_lse=True, **{"kernel": kept._kernel.name, **options})


def expect_the_same_bits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: Precision, **options: Any
) -> None:
    """Of out and softmax_lse, twice: a call changes nothing that the next one reads."""
    kept = quantize_kv(k, v, precision=precision)
    want = plain_call(q, k, v, kept, **options)
    for _ in range(2):
        assert all(map(torch.equal, kept_call(q, kept, **options), want))


def bytes_of(kept: QuantizedKV) -> tuple[torch.Tensor, ...]:
    """What the kernels read of the blocks that there are."""
    memory, blocks = kept._memory, -(-kept.seqlen_k // BLOCK)
    values = () if kept._values is None else (kept._values[:, :, : kept.seqlen_k],)
    return (memory.blocks[:, :blocks], memory.k_scale[:, :blocks], memory.k_mean, *values)


@precisions
def test_masks(device: str, precision: Precision) -> None:
    """Boolean, and added: read in place, as any array, copied where that is better, cast by autocast."""
    q, k, v = inputs(device)
    bias = rand(2, 4, 70, 130, device=device, seed=5)
    for mask in (bias > -0.3, bias, bias.float()[:, :1], bias.mT.contiguous().mT, bias[0, 0, 0]):
        expect_the_same_bits(q, k, v, precision, attn_mask=mask, causal="bottom_right")
    kept = quantize_kv(k, v, precision=precision)
    lengths = int32((130, 65), device)
    padded = quantize_kv(k, v, precision=precision, seqlens_k=lengths)
    for found, options in ((kept, {}), (padded, {"seqlens_k": lengths})):
        want = plain_call(q, k, v, found, attn_mask=bias, **options)
        assert all(map(torch.equal, attention(q, found, attn_mask=bias, return_lse=True), want))
    with torch.autocast(device, torch.float16):
        out = attention(q.float(), kept, attn_mask=bias.float())
    assert torch.equal(out, attention(q, kept, attn_mask=bias))
    strided = rand(4, 4096, 70, device=device, seed=6).mT
    assert needs_dense_copy(strided[None])
    q, k, v = inputs(device, keys=4096, batch=1)
    expect_the_same_bits(q, k, v, precision, attn_mask=strided)


@precisions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"window": (40, 0)},
        {"window": (20, 20), "causal": "bottom_right"},
        {"scale": -0.3},
        {"row_offset": 60, "causal": "top_left"},
    ],
    ids=str,
)
def test_the_bits_of_a_plain_call(
    device: str, precision: Precision, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    expect_the_same_bits(*inputs(device, dtype=dtype), precision, **options)


@precisions
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 200])
def test_any_number_of_keys(device: str, precision: Precision, keys: int) -> None:
    """One query row, as in decoding, and as many as keys."""
    for rows in (1, keys):
        expect_the_same_bits(*inputs(device, rows, keys, batch=1), precision, causal="bottom_right")


@precisions
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(40, 64), (72, 128), (128, 16), (37, 21)])
def test_head_dims(device: str, precision: Precision, head_dim: int, head_dim_v: int) -> None:
    """Those of other kernels, and those that are copied and filled up with zeros."""
    tensors = inputs(device, 20, 70, head_dim=head_dim, head_dim_v=head_dim_v, batch=1)
    expect_the_same_bits(*tensors, precision)


@precisions
def test_sinks_lengths_of_queries_and_layouts(device: str, precision: Precision) -> None:
    q, k, v = inputs(device)
    sinks = rand(4, device=device, dtype=torch.float32)
    seqlens_q = int32((70, 9), device)
    expect_the_same_bits(q, k, v, precision, sinks=sinks, seqlens_q=seqlens_q, causal="bottom_right")
    kept = quantize_kv(k, v, precision=precision)
    swapped = q.transpose(1, 2)
    out, lse = attention(swapped, kept, layout="bshd", return_lse=True)
    want, want_lse = attention(q, kept, return_lse=True)
    assert torch.equal(out.transpose(1, 2), want)
    assert torch.equal(lse, want_lse)


@precisions
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_padded_lengths(device: str, precision: Precision, causal: str | None) -> None:
    """Keys beyond a length are not read; the object has the lengths, whatever becomes of the caller's."""
    q, k, v = inputs(device, batch=4)
    seqlens_k = int32((130, 0, 64, 7), device)
    clean = k.clone(), v.clone()
    for i, length in enumerate((130, 0, 64, 7)):
        k[i, :, length:] = v[i, :, length:] = math.nan
    kept = quantize_kv(k, v, precision=precision, seqlens_k=seqlens_k)
    want = plain_call(q, *clean, kept, seqlens_k=seqlens_k, causal=causal)
    seqlens_k.zero_()
    assert all(map(torch.equal, kept_call(q, kept, causal=causal), want))


@precisions
def test_keys_that_no_row_sees_count_here(device: str, precision: Precision) -> None:
    """A plain call that is causal from the top left takes the mean of the keys that some row sees alone."""
    q, k, v = inputs(device, 40, 130)
    out = attention(q, quantize_kv(k, v, precision=precision), causal="top_left")
    assert 1e-3 < relative_error(out, attention(q, k, v, causal="top_left")) < 2e-2


@precisions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pieces", [(0, 130), (10, 30, 90), (63, 1), (1, 1, 61)], ids=str)
def test_pieces_that_begin_with_less_than_a_block(
    device: str, precision: Precision, dtype: torch.dtype, pieces: tuple[int, ...]
) -> None:
    """While all keys are at hand in 16 bits, all are quantised again: bit for bit as at once."""
    q, k, v = inputs(device, 5, sum(pieces), dtype=dtype)
    kept = quantize_kv(k[:, :, : pieces[0]], v[:, :, : pieces[0]], precision=precision)
    first = pieces[0]
    for count in pieces[1:]:
        kept.append(k[:, :, first : first + count], v[:, :, first : first + count])
        first += count
        want = plain_call(q, k[:, :, :first], v[:, :, :first], kept)
        assert kept.seqlen_k == first
        assert all(map(torch.equal, kept_call(q, kept), want))


@precisions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_give_the_bits_of_one_piece(device: str, precision: Precision, dtype: torch.dtype) -> None:
    """Behind the first 64 keys, however the others come: the mean is fixed, and blocks stand alone."""
    _, k, v = inputs(device, 1, 300, dtype=dtype, head_dim=40, head_dim_v=72)
    at_once, grown = (quantize_kv(k[:, :, :100], v[:, :, :100], precision=precision) for _ in range(2))
    at_once.append(k[:, :, 100:], v[:, :, 100:])
    first = 100
    for count in (1, 27, 1, 63, 64, 5, 39):
        before = [tensor[:, : first // BLOCK].clone() for tensor in bytes_of(grown)[:2]]
        grown.append(k[:, :, first : first + count], v[:, :, first : first + count])
        after = [tensor[:, : first // BLOCK] for tensor in bytes_of(grown)[:2]]
        assert all(map(torch.equal, before, after))  # full blocks stay as they are
        first += count
    assert first == grown.seqlen_k == at_once.seqlen_k == 300
    pairs = zip(bytes_of(grown), bytes_of(at_once), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    whole = quantize_kv(k, v, precision=precision)
    if precision is Precision.INT8:  # values have no mean
        tile = BLOCK * grown._kernel.head_dim
        assert torch.equal(bytes_of(grown)[0][..., tile:], bytes_of(whole)[0][..., tile:])
    q = rand(2, 4, 3, 40, device=device, dtype=dtype)
    assert all(map(torch.equal, *(attention(q, kept, return_lse=True) for kept in (grown, at_once))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_bytes_of_appended_keys_are_the_kernels(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Bit for bit, with groups of zeros, keys of 0, the largest numbers and some that are not finite."""
    _, k, v = inputs(device, 1, 200, dtype=dtype, head_dim=head_dim, heads=3)
    k[0, 0] = 0.5
    k[0, 1, 64:128] *= 2.0**-14
    k[0, 2, 70] = torch.finfo(dtype).max
    k[0, 2, 71] = -torch.finfo(dtype).max
    k[1, 0, 130, 3] = math.inf
    k[1, 1, 199, 0] = math.nan  # a part of the mean: no key of the head stays finite
    k[1, 2, 0] = -torch.finfo(dtype).max  # a part of the mean, too: further from the next than any bfloat16
    k[1, 2, 5] = torch.finfo(dtype).max
    kept = quantize_kv(k, v, precision="int8_qk")
    found, scales = key_bytes(k.flatten(0, 1), kept._memory.k_mean)
    blocks, known, _, _ = bytes_of(kept)
    is_finite = ~known.isnan()
    assert torch.equal(scales.isnan(), ~is_finite)
    assert torch.equal(scales[is_finite], known[is_finite])
    whole = is_finite.all(-1)  # what is not finite becomes some byte
    assert whole.sum() == 6 * 4 - 1 - 4
    assert torch.equal(found[whole], blocks[whole])


def test_what_is_not_finite_is_not_hidden_when_it_comes_later(device: str) -> None:
    q, k, v = inputs(device, 3, 130)
    k[0, 0, 129, 5] = math.inf
    v[1, 1, 128, 2] = math.nan
    kept = quantize_kv(k[:, :, :100], v[:, :, :100])
    assert attention(q, kept).isfinite().all()
    kept.append(k[:, :, 100:], v[:, :, 100:])
    out = attention(q, kept)
    assert out[0, :2].isnan().all()
    assert out[1, 2:].isnan().any(-1).all()
    assert out[0, 2:].isfinite().all()
    assert out[1, :2].isfinite().all()


@precisions
def test_room_grows_by_half_and_keeps_what_was_there(device: str, precision: Precision) -> None:
    q, k, v = inputs(device, 2, 700, batch=1, heads=1)
    kept = quantize_kv(k[:, :, :70], v[:, :, :70], precision=precision)
    at_once = quantize_kv(k[:, :, :70], v[:, :, :70], precision=precision)
    at_once.append(k[:, :, 70:], v[:, :, 70:])
    capacities = {kept._memory.capacity}
    for first in range(70, 700, 30):
        kept.append(k[:, :, first : first + 30], v[:, :, first : first + 30])
        capacities.add(kept._memory.capacity)
    assert len(capacities) <= 2 + math.log(700 / 128, 1.5)
    assert kept.seqlen_k <= kept._memory.capacity <= 1.5 * kept.seqlen_k + BLOCK
    assert torch.equal(attention(q, kept), attention(q, at_once))


@precisions
@pytest.mark.parametrize("head_dim", [64, 128])
def test_memory(device: str, precision: Precision, head_dim: int) -> None:
    """Bytes and scales alone, and the values in 16 bits under int8_qk: no copy of all keys."""
    _, k, v = inputs(device, 1, 1001, head_dim=head_dim, head_dim_v=head_dim, batch=1)
    kept = quantize_kv(k, v, precision=precision)
    for_a_key = head_dim + 0.25 + (2 * head_dim if precision is Precision.INT8_QK else head_dim + 8)
    of_blocks = 2 * 1024 * for_a_key
    of_last_block = 2 * (1001 % 64) * head_dim * 2 * (1 if precision is Precision.INT8_QK else 2)
    assert of_blocks + of_last_block <= kept.nbytes <= of_blocks + of_last_block + 2 * head_dim * 4 + 1100
    held = [getattr(kept, name) for name in QuantizedKV.__slots__]
    tensors = [tensor for tensor in (*held, *kept._tail) if isinstance(tensor, torch.Tensor)]
    tensors.append(kept._memory._store)
    assert kept.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_facts(device: str) -> None:
    _, k, v = inputs(device, dtype=torch.bfloat16, head_dim=40, head_dim_v=72)
    kept = quantize_kv(k, v, precision="int8_qk")
    assert (kept.batch, kept.num_heads_kv, kept.seqlen_k) == (2, 2, 130)
    assert (kept.head_dim, kept.head_dim_v) == (40, 72)
    assert (kept.dtype, kept.device, kept.precision) == (torch.bfloat16, k.device, Precision.INT8_QK)
    assert quantize_kv(k, v).precision is Precision.INT8
    for name in ("batch", "seqlen", "nbytes", "precision"):
        with pytest.raises(AttributeError):
            setattr(kept, name, 1)
    assert "int8_qk, batch=2, num_heads_kv=2, seqlen_k=130, head_dim=40, head_dim_v=72" in repr(kept)


@precisions
def test_no_keys_yet(device: str, precision: Precision) -> None:
    q, k, v = inputs(device, 3, 40)
    kept = quantize_kv(k[:, :, :0], v[:, :, :0], precision=precision)
    out, lse = attention(q, kept, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    kept.append(k[:, :, :0], v[:, :, :0])
    kept.append(k, v)
    assert torch.equal(kept_call(q, kept)[0], plain_call(q, k, v, kept)[0])
    nothing = quantize_kv(k[:0], v[:0], precision=precision)
    nothing.append(k[:0], v[:0])
    assert attention(q[:0], nothing).shape == (0, 4, 3, 64)


def test_out_and_what_a_call_returns(device: str) -> None:
    q, k, v = inputs(device)
    kept = quantize_kv(k, v)
    out = torch.empty_like(q)
    version = out._version
    found, lse, philox = attention(q, kept, out=out, return_lse=True, return_philox=True)
    assert found is out
    assert out._version > version
    assert tuple(philox) == (0, 0)
    want, want_lse = attention(q, k, v, precision="int8", return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    with pytest.raises(ArgumentError, match="out overlaps query"):
        attention(q, kept, out=q)
    with pytest.raises(ArgumentError, match="out has shape"):
        attention(q, kept, out=out[:, :, 1:])
    one = quantize_kv(k[:1], v[:1])
    assert torch.equal(attention(q[0], one)[0], attention(q[:1], one)[0])


def tiled_kernels(device: str, head_dim: int) -> list[str]:
    """Those of int8 and float16 that run there, and share no keys of a tile."""
    rows = kernels(Target.CUDA if device == "cuda" else Target.HOST)
    runs_hoppers = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    return [
        row.name
        for row in rows
        if (row.head_dim, row.dtype) == (head_dim, DType.F16)
        and row.serves(Precision.INT8)
        and not row.is_split
        and (runs_hoppers or not row.is_for_one_arch)
    ]


def test_a_kernel_by_name(device: str) -> None:
    """One whose blocks are those of the memory, and no other."""
    q, k, v = inputs(device)
    kept = quantize_kv(k, v)
    names = {head_dim: tiled_kernels(device, head_dim)[0] for head_dim in (64, 128)}
    assert names[64] == kept._kernel.name
    assert torch.equal(
        attention(q, kept, kernel=names[64]), attention(q, k, v, kernel=names[64], precision="int8")
    )
    with pytest.raises(NoKernelError, match="a QuantizedKV for kernels of head_dim 64"):
        attention(q, kept, kernel=names[128])
    with pytest.raises(ArgumentError, match="is not one of"):
        attention(q, kept, kernel="fmha_fwd")


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (40, 3)}], ids=str)
def test_kernels_of_all_families_read_the_same_bytes(device: str, options: dict[str, Any]) -> None:
    """Those of Hopper what the others have made, a block that is not full included."""
    q, k, v = inputs(device, head_dim=128, head_dim_v=104)
    kept = quantize_kv(k[:, :, :100], v[:, :, :100])
    kept.append(k[:, :, 100:], v[:, :, 100:])
    want, want_lse = attention(q, kept, return_lse=True, kernel=kept._kernel.name, **options)
    names = tiled_kernels(device, 128)
    assert kept._kernel.name in names
    assert len(names) > 1 or device == "cuda"
    for name in names:
        out, lse = attention(q, kept, return_lse=True, kernel=name, **options)
        assert relative_error(out, want) < 1e-3
        assert (lse - want_lse).abs().max() < 1e-4
