"""Under enabled(): every kind of call that is served gives what torch gives, modules and models included."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sdpa_cutlass
from tests.library.torch_calls import ORIGINAL, close, half

pytestmark = pytest.mark.usefixtures("_torch_is_left_as_found")

KEPT = torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(3)) > 0.4
KEPT[0, 0, 5] = False  # a row that sees no key
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "nothing asked for": {"dropout_p": 0.0, "attn_mask": None},
    "mask": {"attn_mask": KEPT},
    "mask of keys": {"attn_mask": KEPT[:, :, :1]},
    "mask of a head": {"attn_mask": KEPT[0, 0], "scale": 0.3},
    "bias": {"attn_mask": half(4, 9, 11, seed=5)},
    "float32 bias": {"attn_mask": half(2, 4, 1, 11, seed=5).float()},
    "transposed bias": {"attn_mask": half(11, 9, seed=5).T},
    "-inf": {"attn_mask": torch.zeros(KEPT.shape).half().masked_fill(~KEPT, -torch.inf)},
    "upper left": {"attn_mask": causal_upper_left(9, 11)},
    "lower right": {"attn_mask": causal_lower_right(9, 11)},
}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with its mask on `device`; a CausalBias has no data to move."""
    mask = options.get("attn_mask")
    return options if type(mask) is not torch.Tensor else {**options, "attn_mask": mask.to(device)}


def torchs_math(device: str) -> contextlib.AbstractContextManager[None]:
    """On CUDA only torch's backend that gives 0 for a row without keys; cuDNN gives something else."""
    return sdpa_kernel(SDPBackend.MATH) if device == "cuda" else contextlib.nullcontext()


def by_torchs_math(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's answer, with 0 where old ones give NaN because a row sees no key."""
    with torchs_math(tensors[0].device.type):
        return ORIGINAL(*tensors, **options).nan_to_num(0)


@pytest.mark.parametrize("case", SERVED)
def test_served_calls(case: str, device: str) -> None:
    q, k, v = (half(2, 4, n, 64, device=device, seed=seed) for seed, n in enumerate((9, 11, 11)))
    options = on(device, SERVED[case])
    expected = by_torchs_math(q, k, v, **options)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        close(F.scaled_dot_product_attention(q, k, v, **options), expected)
        close(F.scaled_dot_product_attention(query=q, key=k, value=v, **options), expected)
    assert (usage.served, usage.fallbacks) == (2, {})


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(24, 24), (36, 36), (72, 72), (64, 40), (8, 256), (5, 3)]
)
def test_every_head_dim_is_served(head_dim: int, head_dim_v: int, case: str, device: str) -> None:
    q, k = half(2, 4, 9, head_dim, device=device), half(2, 4, 11, head_dim, device=device, seed=1)
    v, options = half(2, 4, 11, head_dim_v, device=device, seed=2), on(device, SERVED[case])
    expected = by_torchs_math(q, k, v, **options)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        close(F.scaled_dot_product_attention(q, k, v, **options), expected)
    assert (usage.served, usage.fallbacks) == (1, {})


def test_one_causal_query_sees_the_first_key_only(device: str) -> None:
    """Decoding with is_causal=True means in torch, whose alignment is top_left, the first key's value."""
    q, k, v = (half(2, 4, n, 64, device=device, seed=seed) for seed, n in enumerate((1, 11, 11)))
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert usage.served == 1
    assert torch.equal(out, v[:, :, :1])
    assert torch.equal(ORIGINAL(q, k, v, is_causal=True), out)


@pytest.mark.parametrize("compiled", [False, True])
def test_everything_dropped_is_zero(compiled: bool, device: str) -> None:
    q = half(2, 4, 9, 64, device=device)

    def function(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)

    with sdpa_cutlass.enabled(devices=[device]) as usage:
        run = torch.compile(function, fullgraph=True, backend="eager") if compiled else function
        assert torch.equal(run(q), torch.zeros_like(q))
    assert (usage.served, usage.fallbacks) == (0 if compiled else 1, {})


def test_dropout_is_drawn_from_torchs_generator(device: str) -> None:
    """The seed decides; `attention` under the same seed says which mask it was."""
    q = half(2, 4, 9, 64, device=device)
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(F.scaled_dot_product_attention(q, q, q, dropout_p=0.3))
        following = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    assert (usage.served, usage.fallbacks) == (4, {})
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[2], following)
    torch.manual_seed(1)
    out, philox = sdpa_cutlass.attention(q, q, q, p_dropout=0.3, return_philox=True)
    assert torch.equal(out, drawn[0])
    kept = sdpa_cutlass.dropout_mask(2, 4, 9, 9, 0.3, philox, device=device)
    weights = torch.softmax(q.double() @ q.double().mT / 8, -1) * kept / 0.7
    close(out, (weights @ q.double()).to(torch.float16))


def test_grouped_heads_are_served(device: str) -> None:
    q, k = half(2, 4, 9, 64, device=device), half(2, 2, 11, 64, device=device)
    for mask in (None, half(2, 4, 9, 11, device=device)):
        repeated = k.repeat_interleave(2, 1)  # torch 2.4 has no enable_gqa
        expected = ORIGINAL(q, repeated, repeated, mask)
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            close(F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True), expected)
        assert usage.served == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(dtype: torch.dtype, device: str) -> None:
    q, bias = half(1, 2, 9, 64, device=device), half(9, 9, device=device, seed=1)
    for tensors in (
        (q.float(), q.float(), q.float()),
        (q, q.float(), q),
        (q, q, q),
        (q.float(), q, q, bias.float()),
        (
            q,
            q,
            q,
            torch.full_like(bias, torch.finfo(torch.float32).min, dtype=torch.float32),
        ),  # -inf once cast
        (q, q, q, bias.bfloat16()),
        (q, q, q, bias > 0.5),
        (q.float(), q.float(), q.float(), causal_upper_left(9, 9)),
    ):
        with torch.autocast(device, dtype=dtype):
            expected = by_torchs_math(*tensors)
            with sdpa_cutlass.enabled(devices=[device]) as usage:
                out = F.scaled_dot_product_attention(*tensors)
        assert (usage.served, usage.fallbacks) == (1, {})
        assert out.dtype is expected.dtype is dtype
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("case", ["mask", "bias", "lower right"])
def test_compiled_calls_are_served(case: str, device: str) -> None:
    q, k = half(2, 4, 9, 64, device=device), half(2, 4, 11, 64, device=device)
    options = on(device, SERVED[case])
    code: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        code.append(graph.code)
        return graph

    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, **options) * 2

    with torchs_math(device):
        expected = function(q, k).nan_to_num(0)
    with sdpa_cutlass.enabled(devices=[device]):
        close(torch.compile(function, fullgraph=True, backend=backend)(q, k), expected)
    assert ["sdpa_cutlass" in text for text in code] == [True]


class Block(nn.Module):
    """A GPT block: causal self-attention over fused QKV projections, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seqlen, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seqlen, width))
        return x + self.mlp(self.norm_2(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpt_gives_the_same(compiled: bool, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 128), Block(128, 2), Block(128, 2), nn.Linear(128, 50))
    model = model.to(device, torch.float16).eval()
    tokens = torch.randint(50, (2, 21), device=device)
    with torch.no_grad():
        expected = model(tokens)
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            close(run(tokens), expected)
    assert (usage.served, usage.fallbacks) == (0 if compiled else 2, {})


def test_multihead_attention_gives_the_same(device: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(128, 2).to(device, torch.float16).eval()
    x, memory = half(9, 2, 128, device=device), half(13, 2, 128, device=device)
    padding = torch.zeros(2, 13, dtype=torch.bool, device=device)
    padding[1, 7:] = True
    calls = {"plain": {}, "padded": {"key_padding_mask": padding}}
    with torch.no_grad():
        expected = {name: module(x, memory, memory, need_weights=False, **o)[0] for name, o in calls.items()}
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            for name, options in calls.items():
                close(module(x, memory, memory, need_weights=False, **options)[0], expected[name])
    assert (usage.served, usage.fallbacks) == (2, {})
