"""The table of known signatures: what it tells apart, what it leaves to the caller, what it holds on to."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.library.launchers import SHAPE, Recorder, Subclass, qkv
from tests.library.reference import rand

pytestmark = pytest.mark.usefixtures("_compiled_only")


class Table:
    """A CallTable of one known call, `make_out` as given, that launches nothing."""

    OPTIONS = ("family", None, 0.5, True, None, False)

    def __init__(self, module: ModuleType, make_out: Callable[..., Any] = torch.empty_like) -> None:
        self.recorder = Recorder()
        self.table = module.CallTable()
        self.tensors = qkv("cpu")
        self.spans = (2 * 2 * 9 * 64,) * 4
        self.options: tuple[Any, ...] = self.OPTIONS
        self._made = self.recorder.launcher(module)
        self.add(self.tensors, make_out=make_out)

    def add(
        self, tensors: list[torch.Tensor], out: torch.Tensor | None = None, *, make_out: Any = None
    ) -> bool:
        return self.table.add(self._made, self.options, (*tensors, out), make_out, None, self.spans)

    def call(
        self, options: tuple[Any, ...] = OPTIONS, out: Any = None, tensors: list[Any] | None = None
    ) -> Any:
        return self.table.call(*options, *(self.tensors if tensors is None else tensors), out)


def test_options_are_told_apart(module: ModuleType) -> None:
    table = Table(module)
    out, lse = table.call()
    assert out.shape == SHAPE
    assert lse is None
    assert table.call(("family", None, float("0.5"), True, None, False)) is not None  # another object
    for place, other in enumerate(("other", "top_left", 0.25, False, "kernel", True)):
        options = list(Table.OPTIONS)
        options[place] = other
        assert table.call(tuple(options)) is None
    assert len(table.recorder.seen) == 2
    whole = Table(module)
    whole.options = ("family", None, 1, True, None, False)
    whole.add(whole.tensors, make_out=torch.empty_like)
    assert whole.call(whole.options) is not None
    for value in (1.0, True):
        assert whole.call(("family", None, value, True, None, False)) is None


def test_tensors_are_told_apart(module: ModuleType) -> None:
    table = Table(module)
    q, k, v = table.tensors
    aside = torch.cat([k.flatten(), k.flatten()])
    assert table.call(tensors=[k, v, q]) is not None
    for other in (
        k[:, :, :8],
        k[0],
        k[..., 0],  # the first three dimensions are the same
        k.transpose(1, 2).contiguous().transpose(1, 2),
        k.bfloat16(),
        k.float(),
        k.to("meta"),
        k.clone().requires_grad_(),
        k.as_subclass(Subclass),
        aside[4 : 4 + k.numel()].view(SHAPE),  # not aligned
        None,
    ):
        for place in range(3):
            tensors: list[Any] = [q, k, v]
            tensors[place] = other
            assert table.call(tensors=tensors) is None
    assert len(table.recorder.seen) == 1


def test_a_given_out_is_another_signature_and_may_overlap_nothing(module: ModuleType) -> None:
    table = Table(module)
    memory = torch.zeros(4 * 1152 + 8, dtype=torch.float16)

    def at(start: int) -> torch.Tensor:
        return memory[start : start + 1152].view(SHAPE)

    assert table.call(out=at(0)) is None
    assert table.add(table.tensors, at(0))
    tensors = [at(1152), at(2 * 1152), at(3 * 1152)]
    out = at(0)
    assert table.call(out=out, tensors=tensors)[0] is out
    assert table.recorder.seen[-1][1].out == out.data_ptr()
    assert table.call(tensors=tensors) is not None
    for overlapping in (at(8), at(1152), at(2 * 1152 - 8), at(3 * 1152 + 8)):
        assert table.call(out=overlapping, tensors=tensors) is None
    assert table.call(out=at(4), tensors=qkv("cpu")) is None  # not aligned
    assert table.call(out=at(0).clone().requires_grad_(), tensors=tensors) is None
    assert table.call(out=at(0)[0], tensors=tensors) is None
    assert len(table.recorder.seen) == 2


def test_results_that_cannot_be_made(module: ModuleType) -> None:
    def exhausted(query: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no result")

    table = Table(module, make_out=exhausted)
    with pytest.raises(MemoryError, match="no result"):
        table.call()
    for other in (None, rand(*SHAPE, device="cpu").as_subclass(Subclass), torch.empty(3, device="meta")):
        assert Table(module, make_out=lambda query, other=other: other).call() is None
    assert table.recorder.seen == []


def test_a_call_outlives_its_place_in_the_table(module: ModuleType) -> None:
    """Whatever runs while it makes its result may drop it from the table, which keeps 32."""

    def crowd(query: torch.Tensor) -> torch.Tensor:
        for rows in range(1, 40):
            shapes = [rand(1, 1, rows, 8, device="cpu") for _ in range(3)]
            assert table.add(shapes, make_out=torch.empty_like)
        gc.collect()
        return torch.empty_like(query)

    table = Table(module, make_out=crowd)
    assert table.call() is not None
    assert len(table.recorder.seen) == 1
    assert table.call() is None  # its place is another's
    kept = [rows for rows in range(1, 40) if table.call(tensors=[rand(1, 1, rows, 8, device="cpu")] * 3)]
    assert kept == list(range(8, 40))


def test_nothing_is_leaked(module: ModuleType) -> None:
    table = Table(module)
    q = table.tensors[0]
    alive = weakref.ref(table.call()[0])
    assert alive() is None
    kept = torch.empty(3)
    alive = weakref.ref(kept)
    meeting = [kept]
    del kept
    made = Recorder().launcher(module, meet=lambda out, stream: (meeting.pop(), 16, 0))
    assert made.run(q, q, q, q, None)
    assert alive() is None
    counted = [q, torch.Tensor, torch.empty_like, Table.OPTIONS[0], 0.5]
    before = [sys.getrefcount(item) for item in counted]
    for _ in range(500):
        table.call()
        table.call(tensors=[q[:, :, :3], q, q])
        table.add([q, q, q], make_out=torch.empty_like)
    for rows in range(1, 40):  # all others are dropped
        table.add([rand(1, 1, rows, 8, device="cpu")] * 3)
    after = [sys.getrefcount(item) for item in counted]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
