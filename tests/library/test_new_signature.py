"""What a call of an unknown signature costs, in calls of Python functions: a growing key cache pays it with
every token. Times differ from machine to machine, these numbers do not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from sdpa_cutlass import Causal, DType, Family, Problem, attention, attention_varlen
from sdpa_cutlass.choice import select
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from tests.library.reference import rand

ALLOWED, ALLOWED_FOR_A_MASK = 118, 131
"""Calls of Python functions when prices are known. Before they were counted: 163."""
ALLOWED_FOR_SIZES, ALLOWED_FOR_A_TOKEN, ALLOWED_FOR_LENGTHS, ALLOWED_FOR_SEQUENCES = 54, 47, 60, 77
"""The same where only sizes are new, or only the number of keys."""

K = rand(1, 4, 320, 64)


def python_calls(body: Callable[[], Any]) -> list[str]:
    """The Python functions that `body` calls, in order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}")

    known = sys.getprofile()
    gc.disable()  # a collection in between would call what others have in gc.callbacks
    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(known)
        gc.enable()
    return found


@pytest.fixture(autouse=True)
def _unknown(forget: Callable[[], None]) -> None:
    forget()


@pytest.mark.parametrize("heads_q", [4, 8], ids=["heads", "grouped"])
@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT], ids=str)
def test_a_token_of_a_growing_key_cache(causal: Causal | None, heads_q: int) -> None:
    q = rand(1, heads_q, 1, 64, seed=1)

    def token(keys: int) -> None:
        attention(q, K[:, :, :keys], K[:, :, :keys], causal=causal)

    token(257)  # the first of its blocks for every kernel
    found = python_calls(lambda: token(258))
    assert len(found) <= ALLOWED_FOR_A_TOKEN, "\n".join(found)


def test_other_lengths_are_priced_with_one_call_a_kernel() -> None:
    problem = Problem(
        dtype=DType.F16, batch=1, num_heads_q=4, num_heads_kv=4, seqlen_q=200, seqlen_k=200, head_dim=64
    )
    kernels = select.offer(library(Target.HOST), problem, Family.FMHA_FWD, HOST).models

    def call(rows: int) -> None:
        attention(K[:, :, :rows], K[:, :, :rows], K[:, :, :rows])

    call(200)
    found = python_calls(lambda: call(300))
    assert sum(name.endswith(":cost") for name in found) <= len(kernels)
    assert len(found) <= ALLOWED_FOR_SIZES + len(kernels) + 3 * sum(
        kernel.is_split for kernel, _ in kernels
    ), "\n".join(found)


@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT], ids=str)
def test_lengths_next_to_each_other_are_not_priced_again(causal: Causal | None) -> None:
    def call(rows: int) -> None:
        attention(K[:, :, :rows], K[:, :, :rows], K[:, :, :rows], causal=causal)

    call(289)
    found = python_calls(lambda: call(290))
    assert not any(name.endswith(":cost") for name in found)
    assert len(found) <= ALLOWED_FOR_SIZES, "\n".join(found)


OTHERS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "an option": (
        ALLOWED,
        lambda size: attention(K[:, :, :1], K[:, :, :290], K[:, :, :290], scale=1 / size),
    ),
    "seqlens_k": (
        ALLOWED_FOR_LENGTHS,
        lambda size: attention(K[:, :, :1], K[:, :, :size], K[:, :, :size], seqlens_k=torch.ones(1).int()),
    ),
    "a mask": (
        ALLOWED_FOR_A_MASK,
        lambda size: attention(
            K[:, :, :1], K[:, :, :size], K[:, :, :size], attn_mask=torch.ones(1, 1, 1, size).bool()
        ),
    ),
    "packed sequences": (
        ALLOWED_FOR_SEQUENCES,
        lambda size: attention_varlen(*3 * [K[0].transpose(0, 1)[:size]], *2 * [_ENDS], size, size),
    ),
}
_ENDS = torch.tensor([0, 7, 9], dtype=torch.int32)


@pytest.mark.parametrize("name", OTHERS)
def test_other_unknown_calls(name: str) -> None:
    allowed, call = OTHERS[name]
    call(289)
    found = python_calls(lambda: call(290))
    assert len(found) <= allowed, "\n".join(found)


def test_a_known_call_calls_next_to_nothing() -> None:
    q = rand(1, 4, 1, 64, seed=1)
    for _ in range(3):
        attention(q, K, K)
    assert len(python_calls(lambda: attention(q, K, K))) <= 12


def test_python_calls_are_counted() -> None:
    def once() -> torch.Tensor:
        return torch.Tensor()

    assert [name.rpartition(":")[2] for name in python_calls(lambda: [once(), once()])] == [
        "<lambda>",
        "once",
        "once",
    ]
