"""head_dims without a kernel of their own, values with another one, and layout="bshd"."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import attention, scaled_dot_product_attention, unfused_attention
from sdpa_cutlass.call import planning
from tests.library.reference import expect_close, rand, softmax_lse, torchs_attention

HEAD_DIMS = [
    (72, 72), (8, 8), (120, 120), (136, 136), (256, 256), (33, 33), (1, 1), (63, 63), (100, 100), (251, 251),
    (64, 32), (32, 64), (64, 128), (72, 40), (33, 64), (64, 33), (40, 256), (63, 64),
]  # fmt: skip


def qkv(head_dim: int, head_dim_v: int, device: str, heads_kv: int = 4) -> list[torch.Tensor]:
    sizes = ((4, 33, head_dim), (heads_kv, 50, head_dim), (heads_kv, 50, head_dim_v))
    return [rand(2, *size, device=device, seed=seed) for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_head_dims(head_dims: tuple[int, int], is_causal: bool, device: str) -> None:
    q, k, v = qkv(*head_dims, device)
    causal = "top_left" if is_causal else None
    expected = torchs_attention(q, k, v, is_causal=is_causal)
    written = torch.empty(expected.shape, dtype=q.dtype, device=device)
    for _ in range(2):
        out = attention(q, k, v, causal=causal)
        expect_close(out, expected)
        assert out.is_contiguous()
        assert attention(q, k, v, causal=causal, out=written) is written
        assert torch.equal(written, out)
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=is_causal), out)
    if not is_causal:
        lse = attention(q, k, v, return_lse=True)[1]
        torch.testing.assert_close(lse, softmax_lse(q, k), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("head_dims", [(72, 72), (64, 32), (32, 64)], ids=str)
def test_head_dims_that_are_read_in_place_have_plans(
    head_dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    forget: Callable[[], None],
    device: str,
) -> None:
    forget()
    q, k, v = qkv(*head_dims, device)
    expected = attention(q, k, v)
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    assert torch.equal(attention(q, k, v), expected)


def test_no_head_dim_at_all(device: str) -> None:
    """Scores of 0 where q and k have no elements; nothing to write where v has none."""
    q, k, v = qkv(0, 64, device)
    expect_close(attention(q, k, v, scale=1), v.float().mean(2, keepdim=True).expand(2, 4, 33, 64))
    q, k, v = qkv(64, 0, device)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 33, 0)
    torch.testing.assert_close(lse, softmax_lse(q, k), atol=1e-4, rtol=1e-5)


def test_padding_is_not_read_from_the_caller(device: str) -> None:
    q, k, v = (torch.nn.functional.pad(x, (0, 7), value=torch.nan)[..., :33] for x in qkv(33, 33, device))
    expect_close(attention(q, k, v), torchs_attention(q, k, v))


def test_the_scale_is_that_of_the_callers_head_dim(device: str) -> None:
    q, k, v = qkv(33, 64, device)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=33**-0.5))


def test_a_head_dim_that_rounds_to_a_plain_kernels_runs_it(device: str) -> None:
    q, k, v = qkv(63, 63, device)
    assert not sdpa_cutlass.explain(q, k, v).choice.kernel.is_general
    expect_close(unfused_attention(q, k, v), torchs_attention(q, k, v))
    assert sdpa_cutlass.explain(*qkv(72, 72, device)).choice.kernel.is_general


def test_plain_problems_run_plain_kernels_unless_asked(device: str) -> None:
    q, k, v = qkv(64, 64, device)
    found = sdpa_cutlass.explain(q, k, v)
    assert not found.choice.kernel.is_general
    general = [c.kernel for c in found.candidates if c.refusal is None and c.kernel.is_general]
    assert general
    expected = attention(q, k, v)
    for kernel in general:
        assert sdpa_cutlass.explain(q, k, v, kernel=kernel.name).choice.kernel is kernel
        expect_close(attention(q, k, v, kernel=kernel.name), expected)


def test_the_output_of_another_head_dim_has_querys_order(device: str) -> None:
    q, k, v = qkv(64, 32, device)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert attention(*swapped).stride() == (33 * 4 * 32, 32, 4 * 32, 1)
    assert torch.equal(attention(*swapped), attention(q, k, v))


BSHD = {
    "4-D": ((2, 9, 4, 64), (2, 11, 4, 64), (2, 11, 4, 64)),
    "grouped heads": ((2, 9, 4, 64), (2, 11, 2, 64), (2, 11, 2, 64)),
    "3-D": ((9, 4, 64), (11, 4, 64), (11, 4, 64)),
    "5-D": ((2, 3, 9, 4, 64), (2, 3, 11, 4, 64), (2, 3, 11, 4, 64)),
    "batch broadcast": ((2, 9, 4, 64), (1, 11, 4, 64), (11, 4, 64)),
    "value's head_dim": ((2, 9, 4, 64), (2, 11, 4, 64), (2, 11, 4, 32)),
    "padded head_dim": ((2, 9, 4, 33), (2, 11, 4, 33), (2, 11, 4, 33)),
    "no keys": ((2, 9, 4, 64), (2, 0, 4, 64), (2, 0, 4, 64)),
}


@pytest.mark.parametrize("case", BSHD)
@pytest.mark.parametrize("with_mask", [False, True])
def test_bshd(case: str, with_mask: bool, device: str) -> None:
    q, k, v = (rand(*shape, device=device, seed=seed) for seed, shape in enumerate(BSHD[case]))
    options = {"causal": "top_left", "return_lse": True}
    if with_mask:
        options["attn_mask"] = rand(4, 9, k.shape[-3], device=device) > -0.5
    swapped = [x.transpose(-3, -2) for x in (q, k, v)]
    expected, expected_lse = attention(*swapped, **options)
    for _ in range(2):
        out, lse = attention(q, k, v, layout="bshd", **options)
        assert torch.equal(out, expected.transpose(-3, -2))
        assert torch.equal(lse, expected_lse)
        assert out.is_contiguous()
        written = torch.empty_like(out)
        assert attention(q, k, v, layout="bshd", out=written, **options)[0] is written
        assert torch.equal(written, out)


def test_bshd_slices_of_a_fused_qkv(device: str) -> None:
    qkv = rand(2, 9, 3, 4, 64, device=device)
    q, k, v = qkv.unbind(2)
    out = attention(q, k, v, layout=sdpa_cutlass.Layout.BSHD)
    assert out.is_contiguous()
    assert torch.equal(out, attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))
    assert attention(q.mT.contiguous().mT, k, v, layout="bshd").is_contiguous()


def test_layout_is_checked(device: str) -> None:
    q, k, v = qkv(64, 64, device)
    with pytest.raises(ValueError, match="layout='sbhd'; allowed are 'bhsd'"):
        attention(q, k, v, layout="sbhd")
    with pytest.raises(ValueError, match=r"query has shape \(33, 64\); allowed are .*layout='bshd'"):
        attention(q[0, 0], k[0, 0], v[0, 0], layout="bshd")
    with pytest.raises(ValueError, match=r"value has seqlen 50 \(dimension -3\); key has 49"):
        attention(*(x.transpose(1, 2) for x in (q, k[:, :, 1:], v)), layout="bshd")
    with pytest.raises(ValueError, match=r"3 heads \(dimension -2\)"):
        attention(*(x.transpose(1, 2) for x in (q, k[:, :3], v[:, :3])), layout="bshd")
