"""The suites' masks, lengths, packing and dropout: what each kind is, and that all say the same keys."""

from __future__ import annotations

import pytest
import torch

from sdpa_cutlass.cli import conditions, suites
from sdpa_cutlass.cli.accuracy import make_reference, naive_attention
from sdpa_cutlass.cli.conditions import Conditions, make_conditions
from sdpa_cutlass.cli.inputs import QKV, random_qkv
from sdpa_cutlass.cli.suites import Case

CPU = torch.device("cpu")
CASES = {case.name.rpartition("d64")[2].strip("_") or "plain": case for case in suites.host_masks()}


def make(case: Case, dtype: torch.dtype = torch.float16) -> Conditions:
    return make_conditions(case, dtype=dtype, device=CPU, seed=0)


def test_kinds() -> None:
    found = {name: make(case) for name, case in CASES.items()}
    masks = {name: made.mask for name, made in found.items() if made.mask is not None}
    assert {name: (tuple(mask.shape), str(mask.dtype)) for name, mask in masks.items()} == {
        "lengths": ((2, 1, 1, 97), "torch.bool"),
        "lengths_full": ((2, 1, 1, 97), "torch.bool"),
        "padding": ((2, 1, 1, 97), "torch.bool"),
        "packed": ((2, 1, 1, 97), "torch.bool"),
        "dense": ((2, 1, 97, 97), "torch.bool"),
        "document": ((2, 1, 97, 97), "torch.bool"),
        "bias_f16": ((1, 4, 97, 97), "torch.float16"),
        "bias_f32": ((1, 4, 97, 97), "torch.float32"),
    }
    assert make(CASES["bias_f16"], torch.bfloat16).mask.dtype is torch.bfloat16
    for name in ("lengths", "padding", "packed", "dense", "document"):
        mask = masks[name].expand(2, 1, 97, 97)
        assert mask.any(-1).all()  # every row sees a key
        if name != "packed":
            assert found[name].visible == pytest.approx(mask.double().mean().item())
    assert 0.85 < found["dense"].visible < 0.95
    assert 1 / 16 < found["document"].visible < 1 / 2
    assert found["lengths_full"].visible == found["bias_f16"].visible == 1.0
    assert [made.p_dropout for made in found.values() if made.p_dropout] == [0.1, 0.1]
    with pytest.raises(ValueError, match="'stripes' is not known"):
        make(Case(**{**vars(CASES["dense"]), "mask": "stripes"}))


def test_what_this_library_is_given() -> None:
    for name, case in CASES.items():
        made = make(case)
        assert (made.own_mask is not None) == (
            name in ("padding", "dense", "document", "bias_f16", "bias_f32")
        )
        assert (made.seqlens_k is not None) == name.startswith("lengths")
        assert (made.cu_seqlens is not None) == made.is_packed == (name == "packed")
        assert (made.computed < 1) == (name in ("lengths", "packed"))


def test_lengths() -> None:
    made = make(CASES["lengths"])
    assert made.seqlens_k.dtype is torch.int32
    assert (made.seqlens_k >= 0.7 * 97).all()
    assert torch.equal(made.mask.sum(-1).flatten(), made.seqlens_k)
    assert make(CASES["lengths_full"]).seqlens_k.tolist() == [97, 97]
    again = make(CASES["lengths"])
    assert torch.equal(again.seqlens_k, made.seqlens_k)


def test_biases_fall_with_the_distance() -> None:
    bias = make(CASES["bias_f32"]).mask[0]
    assert bias[:, 5, 5].tolist() == [0.0] * 4
    assert bias[:, 0, 1].tolist() == bias[:, 1, 0].tolist() == [-(2.0**-power) for power in (2, 4, 6, 8)]
    assert bias[0, 0, 96].item() == -24.0


def test_packing_and_back() -> None:
    case = CASES["packed"]
    made = make(case)
    qkv = random_qkv(case, dtype=torch.float16, device=CPU, seed=0)
    packed = made.pack(qkv)
    lengths = made.cu_seqlens.diff().tolist()
    assert packed.q.shape == (sum(lengths), 4, 64)
    assert made.cu_seqlens.dtype is torch.int32
    first = lengths[0]
    assert torch.equal(packed.k[:first], qkv.k[0, :, :first].transpose(0, 1))
    padded = made.unpack(packed.q)
    assert torch.equal(padded[1, :, : lengths[1]], qkv.q[1, :, : lengths[1]])
    assert (padded[1, :, lengths[1] :] == 0).all()


def exact(case: Case, qkv: QKV, made: Conditions) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64, by torch alone; the dropout mask is made at once."""
    import sdpa_cutlass

    q, k, v = (tensor.double() for tensor in qkv)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT / 8
    if made.mask is not None and made.mask.dtype is torch.bool:
        scores = scores.masked_fill(~made.mask, -torch.inf)
    elif made.mask is not None:
        scores = scores + made.mask
    if case.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    if made.p_dropout:
        kept = sdpa_cutlass.dropout_mask(*scores.shape, made.p_dropout, conditions.PHILOX, device="cpu")
        assert 0.85 < kept.double().mean().item() < 0.95
        weights = weights * kept / (1 - made.p_dropout)
    return weights @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_reference_knows_every_kind(case: Case, dtype: torch.dtype) -> None:
    """The right answer passes; the answer of the plain problem does not."""
    qkv = random_qkv(case, dtype=dtype, device=CPU, seed=0)
    made = make(case, dtype)
    reference = make_reference(qkv, causal=case.causal, seed=0, conditions=made)
    out, lse = exact(case, qkv, made)
    plain, plain_lse = exact(case, qkv, Conditions(shape=made.shape))
    if made.is_packed:
        out, plain = (tensor.transpose(1, 2)[made.real] for tensor in (out, plain))
        lse, plain_lse = (tensor.transpose(1, 2)[made.real].T for tensor in (lse, plain_lse))
    assert reference.check(out.to(dtype), lse.float()).violation is None
    if case.mask != "lengths_full" and not case.is_plain:
        assert "max error of O" in str(reference.check(plain.to(dtype), lse.float()).violation)
        if not case.p_dropout:
            assert "max error of LSE" in str(reference.check(out.to(dtype), plain_lse.float()).violation)


def test_the_naive_chain_drops_at_random() -> None:
    case = CASES["dropout"]
    qkv = QKV(*(tensor.float() for tensor in random_qkv(case, dtype=torch.float16, device=CPU, seed=0)))
    ones = qkv._replace(v=torch.ones_like(qkv.v))
    sums = naive_attention(ones, causal=False, p_dropout=0.1)[..., 0]
    assert sums.std() > 0.01
    assert abs(sums.mean().item() - 1) < 0.02
