"""seqlens_q, seqlens_k and attention_varlen: padded and packed sequences against one call per sequence."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass import attention, attention_varlen, dropout_mask
from sdpa_cutlass.call import calls, planning
from tests.library.reference import expect_close, rand, torchs_attention

ROWS, KEYS = 40, 70
LENGTHS_Q = (40, 0, 7, 33)
LENGTHS_K = (70, 13, 0, 41)
CAUSAL = (None, "top_left", "bottom_right")


def int32(values: tuple[int, ...] | list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)], device)


def padded(device: str, heads_kv: int = 4) -> list[torch.Tensor]:
    sizes = ((4, ROWS), (heads_kv, KEYS), (heads_kv, KEYS))
    return [rand(4, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes)]


def packed(device: str, heads_kv: int = 2, head_dim_v: int = 64) -> list[torch.Tensor]:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    sizes = ((total_q, 4, 64), (total_k, heads_kv, 64), (total_k, heads_kv, head_dim_v))
    return [rand(*size, device=device, seed=seed) for seed, size in enumerate(sizes)]


def sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:
    """Each sequence of a packed batch as [heads, rows, head_dim], and where its rows are."""
    found = []
    first_q = first_k = 0
    for rows, keys in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        where, columns = slice(first_q, first_q + rows), slice(first_k, first_k + keys)
        found.append((*(x.transpose(0, 1) for x in (q[where], k[columns], v[columns])), where))
        first_q, first_k = first_q + rows, first_k + keys
    return found


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("given", ["both", "seqlens_q", "seqlens_k"])
def test_padded_sequences_are_what_each_is_alone(causal: str | None, given: str, device: str) -> None:
    q, k, v = padded(device)
    lengths_q = LENGTHS_Q if given != "seqlens_k" else (ROWS,) * 4
    lengths_k = LENGTHS_K if given != "seqlens_q" else (KEYS,) * 4
    options = {}
    if given != "seqlens_k":
        options["seqlens_q"] = int32(lengths_q, device)
    if given != "seqlens_q":
        options["seqlens_k"] = int32(lengths_k, device)
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):  # whatever lies beyond
        k[b, :, keys:], v[b, :, keys:], q[b, :, rows:] = torch.nan, torch.inf, torch.nan
    for _ in range(2):
        out, lse = attention(q, k, v, causal=causal, return_lse=True, **options)
        for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            inputs = q[b, :, :rows], k[b, :, :keys], v[b, :, :keys]
            alone, lse_alone = attention(*inputs, causal=causal, return_lse=True)
            expect_close(out[b, :, :rows], alone)
            torch.testing.assert_close(lse[b, :, :rows], lse_alone, atol=1e-4, rtol=1e-5)
            assert (out[b, :, rows:] == 0).all()
            assert (lse[b, :, rows:] == -torch.inf).all()


def test_lengths_are_cut_to_the_tensors(device: str) -> None:
    q, k, v = padded(device)
    lengths = int32([-5, 1000, 2**31 - 1, -(2**31)], device)
    out, lse = attention(q, k, v, seqlens_q=lengths, seqlens_k=lengths, return_lse=True)
    whole, whole_lse = attention(q, k, v, return_lse=True)
    expect_close(out[1:3], whole[1:3])
    torch.testing.assert_close(lse[1:3], whole_lse[1:3], atol=1e-4, rtol=1e-5)
    assert (out[::3] == 0).all()
    assert (lse[::3] == -torch.inf).all()


def test_lengths_with_a_mask_and_grouped_heads(device: str) -> None:
    q, k, v = padded(device, heads_kv=2)
    mask = rand(4, 1, ROWS, KEYS, device=device, seed=7) > -0.5
    lengths = int32(LENGTHS_K, device)
    visible = mask & (torch.arange(KEYS, device=device) < lengths[:, None])[:, None, None]
    out = attention(q, k, v, attn_mask=mask, seqlens_k=lengths)
    expect_close(out, torchs_attention(q, k, v, attn_mask=visible, enable_gqa=True))


@pytest.mark.usefixtures("_call_path")
def test_a_known_signature_reads_the_new_lengths(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    q, k, v = padded(device)
    first, second = int32(LENGTHS_K, device), int32(LENGTHS_K[::-1], device)
    expected = attention(q.flip(0), k.flip(0), v.flip(0), seqlens_k=first).flip(0)
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    backwards = attention(q, k, v, seqlens_k=first)
    assert torch.equal(attention(q, k, v, seqlens_k=second), expected)
    assert torch.equal(attention(q, k, v, seqlens_k=first), backwards)
    assert not torch.equal(backwards, expected)
    assert len(calls._general) == 1


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_lengths_count_batches_of_every_rank(rank: int, device: str) -> None:
    q, k = rand(2, 2, 4, 9, 64, device=device)[(0,) * (5 - rank)], rand(2, 2, 4, 11, 64, device=device)
    k = k[(0,) * (5 - rank)]
    lengths = int32([3, 11, 0, 5] if rank == 5 else [3], device)
    out = attention(q, k, k, seqlens_k=lengths)
    flat = out.reshape(-1, 4, 9, 64) if rank == 5 else out[None]
    keys = k.reshape(-1, 4, 11, 64) if rank == 5 else k[None]
    queries = q.reshape(-1, 4, 9, 64) if rank == 5 else q[None]
    for b, count in enumerate(lengths.tolist()):
        alone = keys[b][..., :count, :]
        expect_close(flat[b], attention(queries[b], alone, alone))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("head_dim_v", [64, 32, 33])
def test_packed_sequences_are_what_each_is_alone(causal: str | None, head_dim_v: int, device: str) -> None:
    q, k, v = packed(device, head_dim_v=head_dim_v)
    cu_seqlens = starts(LENGTHS_Q, device), starts(LENGTHS_K, device)
    for bounds in ((ROWS, KEYS), (ROWS, KEYS), (1000, 2000)):
        out, lse = attention_varlen(q, k, v, *cu_seqlens, *bounds, causal=causal, return_lse=True)
        assert out.shape == (*q.shape[:2], head_dim_v)
        assert out.is_contiguous()
        assert lse.shape == (4, q.shape[0])
        for queries, keys, values, where in sequences(q, k, v):
            alone, lse_alone = attention(queries, keys, values, causal=causal, return_lse=True)
            expect_close(out[where].transpose(0, 1), alone)
            torch.testing.assert_close(lse[:, where], lse_alone, atol=1e-4, rtol=1e-5)


def test_packed_sequences_are_torchs(device: str) -> None:
    q, k, v = packed(device)
    out = attention_varlen(
        q, k, v, starts(LENGTHS_Q, device), starts(LENGTHS_K, device), ROWS, KEYS, scale=0.3
    )
    for queries, keys, values, where in sequences(q, k, v):
        expected = torchs_attention(queries, keys, values, scale=0.3, enable_gqa=True)
        expect_close(out[where].transpose(0, 1), expected)


def test_slices_of_a_packed_qkv(device: str) -> None:
    rows = sum(LENGTHS_Q)
    qkv = rand(rows, 3, 4, 64, device=device)
    cu_seqlens = starts(LENGTHS_Q, device)
    expected = attention_varlen(
        *(x.contiguous() for x in qkv.unbind(1)), cu_seqlens, cu_seqlens, ROWS, ROWS, causal="top_left"
    )
    for _ in range(2):
        out = attention_varlen(*qkv.unbind(1), cu_seqlens, cu_seqlens, ROWS, ROWS, causal="top_left")
        assert torch.equal(out, expected)


def test_rows_outside_every_sequence_stay_in_out(device: str) -> None:
    q, k, v = packed(device)
    expected = attention_varlen(q, k, v, starts(LENGTHS_Q, device), starts(LENGTHS_K, device), ROWS, KEYS)
    longer = torch.cat([q, q[:9]])
    for _ in range(2):
        out = torch.full_like(longer, 7)
        cu_seqlens = starts(LENGTHS_Q, device), starts(LENGTHS_K, device)
        assert attention_varlen(longer, k, v, *cu_seqlens, ROWS, KEYS, out=out) is out
        assert torch.equal(out[: len(q)], expected)
        assert (out[len(q) :] == 7).all()


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "bounds"),
    [
        ((), (), (5, 5)),
        ((0, 0), (3, 4), (5, 5)),
        ((3, 4), (0, 0), (5, 5)),
        ((3, 4), (0, 0), (5, 0)),
        ((3, 4), (3, 4), (5, 0)),
        ((3, 4), (3, 4), (0, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("p_dropout", [0.0, 0.5])
def test_empty_packed_batches(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    bounds: tuple[int, int],
    p_dropout: float,
    device: str,
) -> None:
    q, k = rand(sum(lengths_q), 2, 64, device=device), rand(sum(lengths_k), 2, 64, device=device)
    cu_seqlens = starts(lengths_q, device), starts(lengths_k, device)
    options = {"p_dropout": p_dropout, "return_lse": True}
    out, lse = attention_varlen(q, k, k, *cu_seqlens, *bounds, **options)
    assert (out.shape, lse.shape) == (q.shape, (2, len(q)))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    filled = torch.full((len(q) + 1, 2, 64), 7, dtype=q.dtype, device=device)
    longer = torch.cat([q, q.new_ones(1, 2, 64)])
    attention_varlen(longer, k, k, *cu_seqlens, *bounds, out=filled)
    assert (filled[-1] == 7).all()
    assert (filled[:-1] == (7 if bounds[0] == 0 else 0)).all()


@pytest.mark.usefixtures("_call_path")
def test_a_known_packed_signature_reads_the_new_lengths(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    q, k, v = packed(device)
    cu_seqlens = [starts(lengths, device) for lengths in (LENGTHS_Q, LENGTHS_K)]
    backwards = [starts(lengths[::-1], device) for lengths in (LENGTHS_Q, LENGTHS_K)]
    expected = attention_varlen(q, k, v, *backwards, ROWS, KEYS)
    forwards = attention_varlen(q, k, v, *cu_seqlens, ROWS, KEYS)
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    assert torch.equal(attention_varlen(q, k, v, *backwards, ROWS, KEYS), expected)
    assert torch.equal(attention_varlen(q, k, v, *cu_seqlens, ROWS, KEYS), forwards)
    assert len(calls._packed) == 1


def test_dropout_counts_within_a_sequence(device: str) -> None:
    """Row and column of the mask are the sequence's own, and its batch index is its number."""
    q, k, v = packed(device, heads_kv=4)
    cu_seqlens = starts(LENGTHS_Q, device), starts(LENGTHS_K, device)
    options = {"p_dropout": 0.4, "philox": (5, 6)}
    out, philox = attention_varlen(q, k, v, *cu_seqlens, ROWS, KEYS, return_philox=True, **options)
    assert philox == (5, 6)
    keep = dropout_mask(4, 4, ROWS, KEYS, 0.4, (5, 6), device=device)
    for b, (queries, keys, values, where) in enumerate(sequences(q, k, v)):
        weights = (queries.float() @ keys.float().mT / 8).softmax(-1)
        weights = weights * keep[b, :, : queries.shape[1], : keys.shape[1]] / 0.6
        expect_close(out[where].transpose(0, 1), (weights @ values.float()).nan_to_num(0))


def test_arrays_can_be_packed() -> None:
    q, k, v = packed("cpu")
    cu_seqlens = starts(LENGTHS_Q, "cpu"), starts(LENGTHS_K, "cpu")
    expected = attention_varlen(q, k, v, *cu_seqlens, ROWS, KEYS)
    arrays = [tensor.numpy() for tensor in (q, k, v, *cu_seqlens)]
    out = torch.empty_like(expected).numpy()
    assert attention_varlen(*arrays, ROWS, KEYS, out=out) is out
    assert torch.equal(torch.from_numpy(out), expected)


Q, K = rand(9, 4, 64), rand(11, 4, 64)
CU_Q, CU_K = starts((4, 5), "cpu"), starts((5, 6), "cpu")
REFUSED = {
    "rank": ((Q[None], K, K, CU_Q, CU_K, 5, 6), ValueError, r"query has shape .* allowed is \[total"),
    "head_dim": ((Q, K[..., :32], K, CU_Q, CU_K, 5, 6), ValueError, "key has head_dim 32"),
    "heads": ((Q, K[:, :3], K[:, :3], CU_Q, CU_K, 5, 6), ValueError, r"3 heads \(dimension -2\)"),
    "rows of value": ((Q, K, K[:-1], CU_Q, CU_K, 5, 6), ValueError, "value has seqlen 10"),
    "float32": ((Q.float(), K, K, CU_Q, CU_K, 5, 6), TypeError, "query has dtype"),
    "int64": ((Q, K, K, CU_Q.long(), CU_K, 5, 6), TypeError, "cu_seqlens_q has dtype torch.int64"),
    "list": ((Q, K, K, CU_Q, [0, 5, 11], 5, 6), TypeError, "cu_seqlens_k is a list"),
    "device": ((Q, K, K, CU_Q.to("meta"), CU_K, 5, 6), TypeError, "cu_seqlens_q is on meta; query"),
    "other batch": ((Q, K, K, CU_Q, CU_K[:2], 5, 6), ValueError, r"cu_seqlens_k has .* allowed is \(3"),
    "no start": ((Q, K, K, CU_Q[:0], CU_K, 5, 6), ValueError, r"cu_seqlens_q has .* allowed is \[b"),
    "matrix": ((Q, K, K, CU_Q[None], CU_K, 5, 6), ValueError, "cu_seqlens_q has shape"),
    "stride": ((Q, K, K, CU_Q, CU_K.repeat(2)[::2], 5, 6), ValueError, "cu_seqlens_k has stride 2"),
    "tensor bound": ((Q, K, K, CU_Q, CU_K, torch.tensor(5), 6), TypeError, "max_seqlen_q is a Tensor"),
    "float bound": ((Q, K, K, CU_Q, CU_K, 5, 6.0), TypeError, "max_seqlen_k is a float"),
    "negative bound": ((Q, K, K, CU_Q, CU_K, 5, -1), ValueError, "max_seqlen_k=-1; allowed are 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_varlen_refuses(case: str) -> None:
    arguments, kind, message = REFUSED[case]
    for _ in range(2):
        with pytest.raises(kind, match=message):
            attention_varlen(*arguments)


def test_varlen_refuses_as_well_when_the_signature_is_known() -> None:
    arguments = (K, K, CU_Q, CU_K, 5, 6)
    out = torch.empty_like(Q)
    attention_varlen(Q, *arguments, out=out)
    attention_varlen(Q, *arguments)
    with pytest.raises(NotImplementedError, match="out is given and an input requires grad"):
        attention_varlen(Q.clone().requires_grad_(), *arguments, out=out)
    with pytest.raises(ValueError, match="out overlaps query"):
        attention_varlen(out, *arguments, out=out)
    with pytest.raises(ValueError, match="out starts at address"):
        attention_varlen(Q, *arguments, out=Q.new_empty(Q.numel() + 1)[1:].view(Q.shape))
    with pytest.raises(ValueError, match="is not one of"):
        attention_varlen(Q, *arguments, kernel="none")
