"""attn_mask: dtypes, every way to broadcast, strides, copies that are not made, and the cache of plans."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass import attention, scaled_dot_product_attention
from sdpa_cutlass.call import calls, checks, extras, planning
from sdpa_cutlass.call.checks import canonical_operands
from tests.library.reference import expect_close, rand, softmax_lse, torchs_attention

BATCH, HEADS, ROWS, KEYS = 2, 4, 33, 50
FULL = (BATCH, HEADS, ROWS, KEYS)


def qkv(device: str, heads_kv: int = HEADS) -> list[torch.Tensor]:
    sizes = ((HEADS, ROWS), (heads_kv, KEYS), (heads_kv, KEYS))
    return [rand(BATCH, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes)]


def some_mask(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    values = rand(*shape, seed=9, dtype=torch.float32)
    return (values > -0.5).to(device) if dtype is torch.bool else values.to(device, dtype)


DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)
SHAPES = [
    (),
    (1,),
    (KEYS,),
    (ROWS, 1),
    (ROWS, KEYS),
    (1, KEYS),
    (HEADS, 1, 1),
    (HEADS, ROWS, KEYS),
    (BATCH, 1, 1, KEYS),
    (BATCH, 1, ROWS, KEYS),
    (1, HEADS, ROWS, 1),
    FULL,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcasts_to_batch_heads_rows_keys(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    q, k, v = qkv(device)
    mask = some_mask(shape, dtype, device)
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    wide = mask.expand(FULL)
    expect_close(out, torchs_attention(q, k, v, attn_mask=wide))
    torch.testing.assert_close(lse, softmax_lse(q, k, attn_mask=wide), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spoil", ["transposed", "sliced", "one off", "every other column", "expanded"])
def test_strides(spoil: str, dtype: torch.dtype, device: str) -> None:
    q, k, v = qkv(device)
    mask = {
        "transposed": lambda: some_mask((BATCH, HEADS, KEYS, ROWS), dtype, device).mT,
        "sliced": lambda: some_mask((BATCH, HEADS, ROWS + 3, KEYS + 5), dtype, device)[:, :, 2:-1, 3:-2],
        "one off": lambda: some_mask((ROWS * KEYS + 1,), dtype, device)[1:].view(ROWS, KEYS),
        "every other column": lambda: some_mask((ROWS, 2 * KEYS), dtype, device)[:, ::2],
        "expanded": lambda: some_mask((BATCH, 1, 1, KEYS), dtype, device).expand(FULL),
    }[spoil]()
    expected = torchs_attention(q, k, v, attn_mask=mask)
    for _ in range(2):
        expect_close(attention(q, k, v, attn_mask=mask), expected)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_with_a_causal_mask_and_grouped_heads(causal: str, heads_kv: int, device: str) -> None:
    q, k, v = qkv(device, heads_kv)
    mask = some_mask((ROWS, KEYS), torch.bool, device)
    diagonal = 0 if causal == "top_left" else KEYS - ROWS
    both = mask & torch.ones_like(mask).tril(diagonal)
    out = attention(q, k, v, attn_mask=mask, causal=causal)
    expect_close(out, torchs_attention(q, k, v, attn_mask=both, enable_gqa=True))


RANKS = {
    "2-D": ((5, 64), (7, 64), (5, 7)),
    "3-D": ((3, 5, 64), (3, 7, 64), (3, 5, 7)),
    "5-D": ((2, 3, 2, 5, 64), (2, 3, 2, 7, 64), (2, 3, 2, 5, 7)),
    "5-D, inner batch": ((2, 3, 2, 5, 64), (2, 3, 2, 7, 64), (3, 1, 5, 7)),
    "5-D, outer batch": ((2, 3, 2, 5, 64), (2, 3, 2, 7, 64), (2, 1, 1, 1, 7)),
    "5-D, no batch": ((2, 3, 2, 5, 64), (2, 3, 2, 7, 64), (5, 7)),
    "5-D inputs that broadcast": ((2, 1, 2, 5, 64), (3, 2, 7, 64), (2, 3, 1, 5, 7)),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("case", RANKS)
def test_ranks(case: str, dtype: torch.dtype, device: str) -> None:
    shape_q, shape_k, shape = RANKS[case]
    q, k, v = (rand(*s, device=device, seed=seed) for seed, s in enumerate((shape_q, shape_k, shape_k)))
    mask = some_mask(shape, dtype, device)
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    expect_close(out, torchs_attention(q, k, v, attn_mask=mask))
    torch.testing.assert_close(lse, softmax_lse(q, k, attn_mask=mask), atol=1e-4, rtol=1e-5)
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask), out)


@pytest.mark.parametrize("case", RANKS)
def test_only_batches_that_do_not_merge_are_copied(case: str) -> None:
    """And what they broadcast over is not: the copy has the mask's own size in heads, rows and keys."""
    shape_q, shape_k, shape = RANKS[case]
    operands = canonical_operands(rand(*shape_q), rand(*shape_k), rand(*shape_k), enable_gqa=True)
    mask = some_mask(shape, torch.bool, "cpu")
    canonical = extras.canonical_mask(mask, operands)
    assert canonical.shape == (*operands.query.shape[:3], operands.key.shape[2])
    assert (canonical.data_ptr() != mask.data_ptr()) == (case in ("5-D, inner batch", "5-D, outer batch"))
    stored = canonical.untyped_storage().nbytes()
    assert stored <= mask.numel() * (6 if len(shape_q) > 4 else 1)


def test_a_row_that_sees_no_key_is_zero(device: str) -> None:
    q, k, v = qkv(device)
    hidden = torch.ones(ROWS, KEYS, dtype=torch.bool, device=device)
    hidden[3] = False
    for mask in (hidden, torch.zeros(ROWS, KEYS, device=device).masked_fill(~hidden, -torch.inf)):
        out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
        assert (out[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -torch.inf).all()
        assert lse[:, :, 4].isfinite().all()


@pytest.mark.usefixtures("_call_path")
def test_a_known_signature_reads_the_new_mask(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    q, k, v = qkv(device)
    masks = [some_mask((ROWS, KEYS), torch.bool, device), torch.eye(ROWS, KEYS, device=device).bool()]
    expected = [torchs_attention(q, k, v, attn_mask=mask) for mask in masks]
    attention(q, k, v, attn_mask=masks[0])
    assert len(calls._general) == 1
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    for mask, wanted in 2 * list(zip(masks, expected, strict=True)):
        expect_close(attention(q, k, v, attn_mask=mask), wanted)
    assert len(calls._general) == 1


def test_another_kind_of_mask_is_another_signature(device: str) -> None:
    q, k, v = qkv(device)
    mask = some_mask((ROWS, KEYS), torch.bool, device)
    kinds = [mask, mask.float(), mask.half(), mask.mT.contiguous().mT, mask[:1], mask[None], None]
    for _ in range(2):
        for other in kinds:
            expect_close(attention(q, k, v, attn_mask=other), torchs_attention(q, k, v, attn_mask=other))


def test_out_and_copied_inputs(device: str) -> None:
    q, k, v = qkv(device)
    mask = some_mask((ROWS, KEYS), torch.bool, device)
    expected = attention(q, k, v, attn_mask=mask)
    out = torch.empty_like(expected)
    for _ in range(2):
        assert attention(q, k, v, attn_mask=mask, out=out) is out
        assert torch.equal(out, expected)
        assert torch.equal(attention(q, k.mT.contiguous().mT, v, attn_mask=mask), expected)
    misaligned = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape).copy_(q)
    assert torch.equal(attention(misaligned, k, v, attn_mask=mask), expected)


def test_arrays_are_masks_too() -> None:
    q, k, v = qkv("cpu")
    mask = some_mask((ROWS, KEYS), torch.bool, "cpu")
    expected = attention(q, k, v, attn_mask=mask)
    assert torch.equal(attention(q, k, v, attn_mask=mask.numpy()), expected)
    assert torch.equal(attention(q.numpy(), k.numpy(), v.numpy(), attn_mask=mask.numpy()), expected)


def test_autocast_casts_a_float_mask_with_the_inputs(device: str) -> None:
    """As torch does; a value that float16 rounds tells the two apart."""
    q, k, v = qkv(device)
    mask = some_mask((ROWS, KEYS), torch.float32, device) + 1e-4
    uncast = attention(q, k, v, attn_mask=mask)
    cast = attention(q, k, v, attn_mask=mask.half())
    assert not torch.equal(uncast, cast)
    with torch.autocast(device, dtype=torch.float16):
        for inputs in ((q, k, v), (q.float(), k.float(), v.float())):
            for _ in range(2):
                assert torch.equal(attention(*inputs, attn_mask=mask), cast)
        assert torch.equal(attention(q, k, v, attn_mask=mask > 0), attention(q, k, v, attn_mask=mask > 0))
    assert torch.equal(attention(q, k, v, attn_mask=mask), uncast)


def test_causal_biases_of_torch(device: str) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = qkv(device)
    for bias, causal in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        out = scaled_dot_product_attention(q, k, v, bias(ROWS, KEYS))
        assert torch.equal(out, attention(q, k, v, causal=causal))
    with pytest.raises(ValueError, match="CausalBias for seqlen_q 3 and seqlen_k 4; the tensors have 33"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(3, 4))
    with pytest.raises(TypeError, match="attn_mask is a CausalBias"):
        attention(q, k, v, attn_mask=causal_upper_left(ROWS, KEYS))


def test_empty_sizes(device: str) -> None:
    q, k, v = qkv(device)
    mask = some_mask((ROWS, KEYS), torch.bool, device)
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], attn_mask=mask[:, :0], return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert attention(q[:, :, :0], k, v, attn_mask=mask[:0]).shape == (BATCH, HEADS, 0, 64)
    assert attention(q[:0], k[:0], v[:0], attn_mask=mask).shape == (0, HEADS, ROWS, 64)


def test_problems_name_their_mask() -> None:
    q, k, v = qkv("cpu")
    operands = canonical_operands(q, k, v, enable_gqa=True)
    mask = extras.canonical_mask(some_mask((ROWS, KEYS), torch.bfloat16, "cpu"), operands)
    problem = checks.problem_of(operands, None, extras.Extras(mask))
    assert "mask=bf16" in str(problem)
    assert not problem.is_plain
