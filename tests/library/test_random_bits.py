"""Dropout through the public functions: its mask, where seed and offset come from, and p_dropout's ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sdpa_cutlass import PhiloxState, attention, dropout_mask, scaled_dot_product_attention
from sdpa_cutlass.call import rng
from tests.library.reference import expect_close, rand, softmax_lse

STATE = PhiloxState(0x0123456789ABCDEF, 2**64 - 4)


def qkv(device: str) -> list[torch.Tensor]:
    sizes = ((4, 33), (4, 50), (4, 50))
    return [rand(2, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes)]


def with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, philox: Any) -> torch.Tensor:
    """Attention whose weights are dropped by the mask that is made outside the kernels."""
    keep = dropout_mask(2, 4, q.shape[2], k.shape[2], p, philox, device=q.device)
    weights = (q.float() @ k.float().mT * q.shape[3] ** -0.5).softmax(-1)
    return weights * keep / (1 - p) @ v.float()


@pytest.mark.parametrize("p_dropout", [0.1, 0.5, 0.9])
def test_given_seed_and_offset(p_dropout: float, device: str) -> None:
    q, k, v = qkv(device)
    options = {"p_dropout": p_dropout, "return_lse": True, "return_philox": True}
    for _ in range(2):
        out, lse, philox = attention(q, k, v, philox=STATE, **options)
        assert philox == STATE
        expect_close(out, with_mask(q, k, v, p_dropout, STATE))
        torch.testing.assert_close(lse, softmax_lse(q, k), atol=1e-4, rtol=1e-5)
    assert torch.equal(attention(q, k, v, philox=tuple(STATE), p_dropout=p_dropout), out)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_seed_and_offset_in_a_tensor(dtype: torch.dtype, device: str) -> None:
    q, k, v = qkv(device)
    bits = torch.tensor([value - 2**64 if value >= 2**63 else value for value in STATE], device=device)
    state = bits.view(dtype)
    expected = attention(q, k, v, p_dropout=0.3, philox=STATE)
    for _ in range(2):
        out, philox = attention(q, k, v, p_dropout=0.3, philox=state, return_philox=True)
        assert philox is state
        assert torch.equal(out, expected)
    assert not torch.equal(attention(q, k, v, p_dropout=0.3, philox=torch.zeros_like(bits)), expected)
    assert torch.equal(attention(q, k, v, p_dropout=0.3, philox=STATE), expected)


def test_drawn_seed_and_offset(device: str) -> None:
    q, k, v = qkv(device)
    results = []
    for _ in range(3):
        torch.manual_seed(5)
        first = attention(q, k, v, p_dropout=0.3, return_philox=True)
        second = attention(q, k, v, p_dropout=0.3, return_philox=True)
        third = scaled_dot_product_attention(q, k, v, None, 0.3)
        assert not torch.equal(first[0], second[0])
        assert not torch.equal(second[0], third)
        assert isinstance(first[1], PhiloxState)
        expect_close(first[0], with_mask(q, k, v, 0.3, first[1]))
        results.append((*first, *second, third))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    torch.manual_seed(6)
    assert attention(q, k, v, p_dropout=0.3, return_philox=True)[1] != results[0][1]


def test_with_everything_else(device: str) -> None:
    q, k, v = qkv(device)
    mask = rand(33, 50, device=device) > -0.5
    lengths = torch.tensor([50, 20], dtype=torch.int32, device=device)
    visible = mask & (torch.arange(50, device=device) < lengths[:, None])[:, None, None]
    visible = visible & torch.ones(33, 50, dtype=torch.bool, device=device).tril(50 - 33)
    visible[1] = mask & torch.ones(33, 50, dtype=torch.bool, device=device).tril(20 - 33)
    keep = dropout_mask(2, 4, 33, 50, 0.3, STATE, device=device)
    scores = (q.float() @ k.float().mT * 0.2).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0) * keep / 0.7 @ v.float()
    out = attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask, seqlens_k=lengths, causal="bottom_right", scale=0.2, p_dropout=0.3, philox=STATE,
        layout="bshd",
    )  # fmt: skip
    expect_close(out.transpose(1, 2), expected)


def test_nothing_is_dropped_at_0(device: str) -> None:
    q, k, v = qkv(device)
    expected = attention(q, k, v)
    before = torch.get_rng_state()
    for p_dropout in (0, 0.0, 1e-60):  # the last is 0 in float32
        out, philox = attention(q, k, v, p_dropout=p_dropout, return_philox=True)
        assert torch.equal(out, expected)
        assert philox == PhiloxState(0, 0)
    assert attention(q, k, v, philox=STATE, return_philox=True)[1] == STATE
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_is_dropped_at_1(device: str) -> None:
    q, k, v = qkv(device)
    before = torch.get_rng_state()
    written = torch.full_like(q, 7)
    for p_dropout in (1, 1.0, 1 - 1e-12):
        for out in (None, written):
            found, lse, philox = attention(
                q, k, v, p_dropout=p_dropout, return_lse=True, return_philox=True, out=out
            )
            assert out is None or found is out
            assert (found == 0).all()
            torch.testing.assert_close(lse, softmax_lse(q, k), atol=1e-4, rtol=1e-5)
            assert philox == PhiloxState(0, 0)
    assert (scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("missing", ["batch", "rows", "keys"])
def test_empty_sizes(missing: str, device: str) -> None:
    q, k, v = qkv(device)
    if missing == "batch":
        q, k, v = q[:0], k[:0], v[:0]
    elif missing == "rows":
        q = q[:, :, :0]
    else:
        k, v = k[:, :, :0], v[:, :, :0]
    out, lse, philox = attention(q, k, v, p_dropout=0.5, return_lse=True, return_philox=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert philox == PhiloxState(0, 0)


class FakeGenerator:
    """A CUDA generator as far as drawing needs it."""

    def __init__(self) -> None:
        self.offset = 8

    def initial_seed(self) -> int:
        return 42

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class FakeCuda:
    """torch.cuda's current device, and on which devices a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = threading.local()
        self.capturing: set[int] = set()
        self.generators = [FakeGenerator(), FakeGenerator()]
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(self.generators))
        monkeypatch.setattr(torch._C, "_cuda_getDevice", self.current_device, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", self.is_current_stream_capturing)
        monkeypatch.setattr(rng, "draw_on_device", lambda device: f"drawn on {device}")

    def current_device(self) -> int:
        return getattr(self.current, "index", 0)

    def is_current_stream_capturing(self) -> bool:
        return self.current_device() in self.capturing

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current.index = self.current_device(), device.index
        try:
            yield
        finally:
            self.current.index = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Without a GPU: torch's side is replaced."""
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("index", [0, 1])
def test_a_cuda_generator_moves_on_by_four(index: int, cuda: FakeCuda) -> None:
    """Threads never draw the same numbers."""
    device = torch.device("cuda", index)
    assert rng.draw(device) == (42, 8)
    assert rng.draw(device) == (42, 12)
    drawn: list[int] = []

    def work() -> None:
        drawn.extend(rng.draw(device).offset for _ in range(500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(16, 16 + 4 * 2000, 4))
    assert cuda.generators[1 - index].offset == 8


@pytest.mark.parametrize("capturing", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_draw_stays_on_the_device_where_that_device_captures(
    index: int, capturing: int, cuda: FakeCuda
) -> None:
    """The current device is 0, and what it captures is another's business."""
    cuda.capturing = {capturing}
    drawn = rng.draw(torch.device("cuda", index))
    assert drawn == (f"drawn on cuda:{index}" if index == capturing else (42, 8))
    assert cuda.generators[index].offset == (8 if index == capturing else 12)
    assert cuda.current_device() == 0


Q, K = rand(2, 4, 8, 64), rand(2, 4, 10, 64)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "three numbers": ((1, 2, 3), TypeError, "philox="),
    "text": ("12", TypeError, "philox='12'; allowed are a PhiloxState, a pair"),
    "fractions": ((1.5, 2), TypeError, "philox has seed 1.5"),
    "negative": ((1, -2), ValueError, r"philox has offset -2; allowed are 0 to 2\^64 - 1"),
    "too large": ((2**64, 0), ValueError, "philox has seed 18446744073709551616"),
    "dtype": (torch.zeros(2), TypeError, r"philox has dtype torch\.float32; allowed are torch\.int64"),
    "shape": (torch.zeros(3, dtype=torch.int64), ValueError, r"philox has shape \(3,\); allowed is \(2,\)"),
    "stride": (torch.zeros(4, dtype=torch.int64)[::2], ValueError, "philox has stride 2; it must be cont"),
    "device": (torch.zeros(2, dtype=torch.int64, device="meta"), TypeError, "philox is on meta; query is"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("p_dropout", [0.0, 0.3, 1.0])
def test_philox_is_checked(case: str, p_dropout: float) -> None:
    philox, kind, message = REFUSED[case]
    attention(Q, K, K, p_dropout=p_dropout, philox=STATE)
    with pytest.raises(kind, match=message):
        attention(Q, K, K, p_dropout=p_dropout, philox=philox)
