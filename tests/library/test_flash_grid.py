"""FlashAttention's public test grid through `flash_api`, forward and backward.

The host library runs a sample of the smaller shapes, with fewer sequences and heads; `--device cuda` runs
all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from tests.conftest import devices
from tests.library.flash_grid import (
    HEAD_DIMS,
    RACES,
    SUITES,
    Case,
    Operands,
    Suite,
    broken,
    call,
    cases,
    operands,
    sample,
)
from tests.library.torch_features import HAS_ENABLE_GQA

HOST_PAIRS = 128 * 513  # of a row and a key, in the largest shape on the host
HOST_WORK = 2**14  # pairs of all heads of all sequences, where a shape allows so few


class Part(NamedTuple):
    """The cases of one suite and head_dim on one device."""

    suite: Suite
    head_dim: int
    device: str

    def __str__(self) -> str:
        return f"{self.suite.name}-d{self.head_dim}@{self.device}"

    def cases(self) -> list[Case]:
        listed = sample(self.suite, HOST_PAIRS) if self.device == "cpu" else cases(self.suite)
        return [case for case in listed if case.head_dim == self.head_dim]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "part" in metafunc.fixturenames:
        parts = [
            Part(suite, head_dim, device)
            for device in devices(metafunc.config)
            for suite in SUITES
            for head_dim in suite.head_dims
        ]
        metafunc.parametrize("part", parts, ids=str)


def test_grid(part: Part) -> None:
    """Results and gradients within twice the error of torch's math in the same dtype."""
    suite, _, device = part
    listed = part.cases()
    assert listed
    found = {}
    for case in listed:
        batch, heads = (suite.batch, suite.heads) if device == "cuda" else host_size(suite, case)
        if lines := broken(suite, case, device, batch=batch, heads=heads):
            found[case] = lines
    assert not found, "\n".join(f"{tuple(case)}: {lines}" for case, lines in found.items())


def host_size(suite: Suite, case: Case) -> tuple[int, int]:
    """How many sequences and heads: all where they are little work. Groups of heads stay what they are."""
    affordable = HOST_WORK // math.prod(case.size)
    heads = suite.heads if len(suite.heads_kv) > 1 else min(max(affordable, 1), suite.heads)
    batch = min(max(affordable // heads, 2 if suite.is_varlen else 1), suite.batch)
    return batch, heads


def results(case: Case, given: Operands, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """out and the gradients of the leaves."""
    out = call(given, case)
    dout = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out) if dout is None else dout
    return (out.detach(), *torch.autograd.grad(out, given.leaves, dout))


RACE = Suite(name="race_condition", head_dims=(), sizes=RACES, batch=60, heads=4, heads_kv=(4,))


@pytest.mark.parametrize("p_dropout", [0.0, 0.17])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeated_runs_are_equal(device: str, head_dim: int, is_causal: bool, p_dropout: float) -> None:
    """Bit for bit: 250 times on a GPU. On the host, in two other orders of warps, of a few shapes."""
    is_host = device == "cpu"
    for size in RACES if not is_host else ((3, 799), (97, 97), (239, 1)):
        case = Case(torch.float16, head_dim, size, 4, "q", is_causal, False, p_dropout)
        given = operands(RACE, case, device, *((2, 1) if is_host else (60, 4)))
        expected = results(case, given)
        with schedules(device) as next_schedule:
            for repeat in range(2 if is_host else 250):
                next_schedule(repeat)
                for one, other in zip(expected, results(case, given), strict=True):
                    assert torch.equal(one, other), (size, repeat)


@contextlib.contextmanager
def schedules(device: str) -> Iterator[Callable[[int], None]]:
    """A function that picks the host's order of warps."""
    if device != "cpu":
        yield lambda repeat: None
        return
    host = library(Target.HOST)
    try:
        yield lambda repeat: host.host_configure(schedule_seed=repeat + 1)
    finally:
        host.host_configure()


DETERMINISTIC = [suite for suite in SUITES if suite.name in ("causal", "varlen_causal")]


@pytest.mark.parametrize("suite", DETERMINISTIC, ids=lambda suite: suite.name)
@pytest.mark.parametrize("is_local", [False, True], ids=["global", "local"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.gpu
def test_deterministic(suite: Suite, is_causal: bool, is_local: bool) -> None:
    """Fifty times the same bits, of every shape."""
    for dtype, head_dim, size in product((torch.float16, torch.bfloat16), HEAD_DIMS, suite.sizes):
        case = Case(dtype, head_dim, size, 9, "q", is_causal, is_local, 0.0)
        given = operands(suite, case, "cuda", 2 if suite.is_varlen else 4, 9)
        expected = results(case, given)
        for _ in range(50):
            assert all(map(torch.equal, expected, results(case, given))), case


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("seqlen", [1, 2, 5, 17, 128])
def test_large_scores(device: str, seqlen: int, head_dim: int, is_causal: bool) -> None:
    """FlashAttention's bwd_overflow: q of size 5, k and v of size 3; 5 times torch's error and 1e-3 there.

    Torch 2.4's own error is smaller here, and dq exceeds twice of it by 1.1e-3.
    """
    suite = Suite(
        name="overflow", head_dims=(), sizes=(), batch=2, heads=5, heads_kv=(5,),
        slack=1e-3 if HAS_ENABLE_GQA else 2e-3, magnitudes=(5.0, 3.0, 3.0),
    )  # fmt: skip
    case = Case(torch.float16, head_dim, (seqlen, seqlen), 5, "q", is_causal, False, 0.0)
    assert not broken(suite, case, device, batch=2, heads=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [97, 128, 200, 256])
def test_a_gradient_of_out_with_other_strides(
    device: str, seqlen: int, head_dim: int, is_causal: bool, dtype: torch.dtype
) -> None:
    """FlashAttention's bwd_transpose: sequences first, every second example of a larger tensor."""
    suite = Suite(name="transpose", head_dims=(), sizes=(), batch=5, heads=2, heads_kv=(2,))
    case = Case(dtype, head_dim, (seqlen, seqlen), 2, "q", is_causal, False, 0.0)
    batch = 2 if device == "cpu" else 5

    def strided(dout: torch.Tensor) -> torch.Tensor:
        larger = dout.new_full((seqlen, 2 * batch, 2, head_dim), math.nan)
        larger[:, ::2] = dout.transpose(0, 1)
        return larger[:, ::2].transpose(0, 1)

    assert not broken(suite, case, device, batch=batch, heads=2, strided=strided)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_sequences_of_one_key(device: str, head_dim: int, is_causal: bool) -> None:
    """FlashAttention's bwd_varlen_overflow, which asks for no NaN. Here the rule as well; torch is exact."""
    suite = Suite(
        name="varlen_overflow", head_dims=(), sizes=(), batch=3, heads=5, heads_kv=(5,), is_varlen=True,
        magnitudes=(3.0, 3.0, 3.0), lengths=((76, 34, 146), (1, 1, 1)), slack=2e-4,
    )  # fmt: skip
    case = Case(torch.float16, head_dim, (256, 3), 5, "q", is_causal, False, 0.0)
    assert not broken(suite, case, device, batch=3, heads=5)
