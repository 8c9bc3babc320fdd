"""The public functions on CPU tensors: torch's meaning, layouts, copies, empty sizes, caches, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import sdpa_cutlass
from sdpa_cutlass import Causal, Family, attention, scaled_dot_product_attention, unfused_attention
from sdpa_cutlass.call import calls, planning
from sdpa_cutlass.choice import select
from sdpa_cutlass.errors import NoKernelError
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo
from tests.library.reference import torchs_attention

Rand = Callable[..., torch.Tensor]


@pytest.fixture
def rand(device: str) -> Rand:
    """Seeded normal values in float16, on the device under test."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + len(shape))
        return torch.randn(shape, generator=generator).to(device, torch.float16)

    return make


def rows_for(tensor: torch.Tensor) -> tuple[KernelInfo, ...]:
    """Every kernel of the library that serves the tensor's device."""
    return sdpa_cutlass.kernels(Target.CUDA if tensor.is_cuda else Target.HOST)


def expect(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> None:
    """`out` is what torch computes in float32, in query's dtype."""
    reference = torchs_attention(q, k, v, **options)
    assert out.shape == reference.shape
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.float(), reference, atol=2e-3, rtol=2e-3)


SHAPES = {
    "4-D": ((2, 3, 5, 64), (2, 3, 7, 64)),
    "3-D": ((3, 5, 64), (3, 7, 64)),
    "2-D": ((5, 64), (7, 64)),
    "5-D": ((2, 2, 3, 5, 64), (2, 2, 3, 7, 64)),
    "batch broadcast": ((2, 3, 5, 64), (1, 3, 7, 64)),
    "query broadcast": ((1, 1, 5, 64), (2, 3, 7, 64)),
    "heads broadcast": ((2, 3, 5, 64), (2, 1, 7, 64)),
    "ranks broadcast": ((2, 3, 5, 64), (3, 7, 64)),
    "5-D broadcast": ((2, 1, 3, 5, 64), (1, 2, 3, 7, 64)),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_that_torch_takes(shapes: str, is_causal: bool, rand: Rand) -> None:
    shape_q, shape_k = SHAPES[shapes]
    q, k, v = rand(*shape_q), rand(*shape_k, seed=1), rand(*shape_k, seed=2)
    expect(scaled_dot_product_attention(q, k, v, is_causal=is_causal), q, k, v, is_causal=is_causal)


def test_positional_arguments_are_torchs(rand: Rand) -> None:
    q, k, v = rand(1, 4, 9, 64), rand(1, 2, 9, 64, seed=1), rand(1, 2, 9, 64, seed=2)
    out = scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3, enable_gqa=True)
    expect(out, q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_grouped_query_heads(heads_kv: int, rand: Rand) -> None:
    q, k, v = rand(2, 4, 9, 64), rand(2, heads_kv, 11, 64, seed=1), rand(2, heads_kv, 11, 64, seed=2)
    expect(attention(q, k, v), q, k, v, enable_gqa=True)
    expect(unfused_attention(q, k, v), q, k, v, enable_gqa=True)


@pytest.mark.parametrize("function", [attention, unfused_attention])
@pytest.mark.parametrize("causal", ["bottom_right", Causal.BOTTOM_RIGHT, "top_left"])
def test_causal_alignments_and_lse(function: object, causal: str, rand: Rand) -> None:
    q, k, v = rand(1, 2, 9, 64), rand(1, 2, 6, 64, seed=1), rand(1, 2, 6, 64, seed=2)
    out, lse = function(q, k, v, causal=causal, return_lse=True)
    hidden = ~torch.ones(9, 6, dtype=torch.bool, device=q.device).tril(
        6 - 9 if causal == "bottom_right" else 0
    )
    scores = (q.float() @ k.float().mT / 8).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        out.float(), scores.softmax(-1).nan_to_num(0) @ v.float(), atol=2e-3, rtol=2e-3
    )
    assert lse.dtype is torch.float32


def test_lse_has_the_callers_dimensions(rand: Rand) -> None:
    q = rand(2, 2, 3, 5, 64)
    assert attention(q, q, q, return_lse=True)[1].shape == (2, 2, 3, 5)
    assert attention(q[0, 0], q[0, 0], q[0, 0], return_lse=True)[1].shape == (3, 5)
    assert attention(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0], return_lse=True)[1].shape == (5,)


def _misaligned_address(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return buffer.copy_(x)


def _misaligned_rows(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 3))[..., :-3]


def _strided_last_dimension(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("spoil", [_misaligned_address, _misaligned_rows, _strided_last_dimension])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_tensors_that_kernels_cannot_load_are_copied(spoil: object, which: int, rand: Rand) -> None:
    tensors = [rand(2, 2, 9, 64, seed=seed) for seed in range(3)]
    expected = attention(*tensors)
    spoiled = list(tensors)
    spoiled[which] = spoil(tensors[which])
    assert torch.equal(spoiled[which], tensors[which])
    for _ in range(2):
        assert torch.equal(attention(*spoiled), expected)


def test_a_misaligned_address_behind_a_known_signature_is_copied(rand: Rand) -> None:
    q = rand(2, 2, 9, 64)
    expected = attention(q, q, q)
    assert torch.equal(attention(_misaligned_address(q), q, q), expected)


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [
        ((2, 3, 5, 64), (2, 3, 0, 64)),
        ((2, 3, 0, 64), (2, 3, 7, 64)),
        ((0, 3, 5, 64), (0, 3, 7, 64)),
        ((2, 0, 5, 64), (2, 0, 7, 64)),
        ((2, 3, 0, 64), (2, 3, 0, 64)),
        ((3, 5, 64), (3, 0, 64)),
    ],
)
def test_empty_sizes(shape_q: tuple[int, ...], shape_k: tuple[int, ...], rand: Rand) -> None:
    q, k = rand(*shape_q), rand(*shape_k)
    for out, lse in (attention(q, k, k, return_lse=True), unfused_attention(q, k, k, return_lse=True)):
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    out = torch.ones_like(q)
    assert attention(q, k, k, out=out) is out
    assert (out == 0).all()


def test_the_output_has_querys_layout(rand: Rand) -> None:
    q = rand(2, 5, 3, 64).transpose(1, 2)
    assert attention(q, q, q).stride() == q.stride()
    sliced = rand(2, 6, 5, 64)[:, ::2]
    assert attention(sliced, sliced, sliced).is_contiguous()


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_out_is_filled_and_returned(rank: int, rand: Rand) -> None:
    q = rand(2, 2, 3, 5, 64)[(0,) * (5 - rank)]
    expected = attention(q, q, q)
    buffer = torch.full((2, 2, 5, 3, 128), torch.nan, dtype=q.dtype, device=q.device)
    out = buffer.transpose(-3, -2)[..., 64:][(0,) * (5 - rank)]
    for _ in range(2):
        assert attention(q, q, q, out=out) is out
        assert torch.equal(out, expected)
        assert buffer[..., :64].isnan().all()


def test_scales(rand: Rand) -> None:
    q, k, v = (rand(1, 1, 9, 64, seed=seed) for seed in range(3))
    for scale in (0, -0.1, 1, 0.5):
        expect(attention(q, k, v, scale=scale), q, k, v, scale=float(scale))


def test_a_known_signature_reuses_its_plan(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None], rand: Rand
) -> None:
    forget()
    q, k = rand(1, 2, 9, 64), rand(1, 2, 9, 64, seed=1)
    first = attention(q, k, k)
    assert len(calls._plain) == 1
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    assert torch.equal(attention(q, k, k), first)
    swapped = attention(k, q, q)
    expect(swapped, k, q, q)
    assert len(calls._plain) == 1


def test_threads_do_not_share_parameters(rand: Rand) -> None:
    """The same plan from many threads, each with tensors of its own."""
    inputs = [[rand(1, 2, 33, 64, seed=3 * thread + i) for i in range(3)] for thread in range(8)]
    expected = [attention(*tensors) for tensors in inputs]
    wrong = []

    def work(index: int) -> None:
        for _ in range(5):
            if not torch.equal(attention(*inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kernel_can_be_named(rand: Rand) -> None:
    q = rand(1, 2, 9, 64)
    expected = attention(q, q, q)
    names = [row.name for row in rows_for(q) if row.name.endswith("_f16") and row.head_dim == 64]
    fused = [name for name in names if name.startswith("fmha_fwd")]
    assert len(fused) >= 2
    for name in fused:
        assert sdpa_cutlass.explain(q, q, q, kernel=name).choice.kernel.name == name
        torch.testing.assert_close(attention(q, q, q, kernel=name), expected, atol=2e-3, rtol=2e-3)


def test_a_kernel_can_be_forced(monkeypatch: pytest.MonkeyPatch, rand: Rand) -> None:
    q = rand(1, 2, 9, 64)
    legal = [c.kernel for c in sdpa_cutlass.explain(q, q, q).candidates if c.refusal is None]
    worst = [kernel.name for kernel in legal if not kernel.is_general][-1]
    monkeypatch.setattr(select, "forced_pattern", lambda: worst[:-3] + "?16")
    found = sdpa_cutlass.explain(q, q, q)
    assert found.choice.kernel.name == worst
    assert "SDPA_CUTLASS_FORCE_KERNEL" in found.choice.reason
    sdpa_cutlass.explain(q, q, q, family=Family.UNFUSED)  # untouched by a glob of the other family
    with pytest.raises(
        NoKernelError, match=r"none of the \d+ kernels that match can run(.|\n)*head_dim is 64"
    ):
        sdpa_cutlass.explain(q[..., :32], q[..., :32], q[..., :32])
    monkeypatch.setattr(select, "forced_pattern", lambda: "fmha_fwd_sm89_d64_m7*")
    with pytest.raises(NoKernelError, match=r"matches none of the \d+ kernels. Nearest: fmha_fwd_sm89_d64"):
        sdpa_cutlass.explain(q, q, q)


def test_the_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    select.forced_pattern.cache_clear()
    monkeypatch.setenv("SDPA_CUTLASS_FORCE_KERNEL", "fmha*")
    assert select.forced_pattern() == "fmha*"
    select.forced_pattern.cache_clear()
    monkeypatch.delenv("SDPA_CUTLASS_FORCE_KERNEL")
    assert select.forced_pattern() is None


@pytest.mark.parametrize("family", [Family.FMHA_FWD, Family.UNFUSED])
def test_explain_prints_every_kernel(family: Family, rand: Rand) -> None:
    q = rand(1, 2, 9, 64)
    found = sdpa_cutlass.explain(q, q, q, causal="top_left", family=family)
    rows = [row for row in rows_for(q) if row.serves(family)]
    assert {candidate.kernel.name for candidate in found.candidates} == {row.name for row in rows}
    text = str(found)
    assert f"chosen   {found.choice.kernel.name} (" in text
    accuracy = "rounded logits" if family is Family.UNFUSED else "exact"
    assert f"it is    {accuracy}, code for 89\n" in text
    assert f"model    {found.predicted_us:.4g} us on host (modelled as NVIDIA L4), a prediction" in text
    chosen = next(one for one in found.candidates if one.kernel is found.choice.kernel)
    assert chosen.estimate is not None
    assert found.predicted_us == chosen.estimate.microseconds
    listed = sum(f" {row.name} " in text.split("\n\n")[1] for row in rows)
    refused = sum(int(line.split()[0]) for line in text.splitlines() if " refused: " in line)
    assert listed + refused == len(rows)
    for candidate in found.candidates:
        assert (candidate.refusal is None) == (candidate.estimate is not None)
