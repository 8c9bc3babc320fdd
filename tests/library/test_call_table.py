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

from sdpa_cutlass.dropout import PhiloxState
from tests.library.launchers import SHAPE, Recorder, Subclass, qkv
from tests.library.reference import rand

pytestmark = pytest.mark.usefixtures("_compiled_only")


class Table:
    """A CallTable of one known call, `make_out` as given, that launches nothing."""

    UNDRAWN = PhiloxState(0, 0)
    OPTIONS = ("family", None, 0.5, True, None, False, 0.25, "bhsd", (3, 1))

    def __init__(
        self, module: ModuleType, make_out: Callable[..., Any] = torch.empty_like, draw: Any = None
    ) -> None:
        self.recorder = Recorder()
        self.table = module.CallTable()
        self.tensors = qkv("cpu")
        self.spans = (2 * 2 * 9 * 64,) * 4 + (16,) * 6
        self.options: tuple[Any, ...] = self.OPTIONS
        self.draw = draw
        self._made = self.recorder.launcher(module)
        self.add(self.tensors, make_out=make_out)

    def add(self, tensors: list[torch.Tensor], out: Any = None, *extras: Any, make_out: Any = None) -> bool:
        arguments = (*self.options, *tensors, out, *extras, *(None,) * (8 - len(extras)))
        return self.table.add(self._made, arguments, make_out, None, self.draw, self.UNDRAWN, self.spans)

    def call(
        self,
        options: tuple[Any, ...] = OPTIONS,
        out: Any = None,
        tensors: list[Any] | None = None,
        extras: tuple[Any, ...] = (),
    ) -> Any:
        return self.table.call(*options, *(self.tensors if tensors is None else tensors), out, *extras)


def test_options_are_told_apart(module: ModuleType) -> None:
    table = Table(module)
    out, lse, philox = table.call()
    assert out.shape == SHAPE
    assert lse is None
    assert philox is Table.UNDRAWN
    equal = (
        "".join(("fam", "ily")),
        None,
        float("0.5"),
        True,
        None,
        False,
        float("0.25"),
        "".join(("bh", "sd")),
        (int("3"), 1),
    )
    assert table.call(equal) is not None  # other objects
    for place, others in enumerate(
        (
            ("other", None, 1),
            ("top_left", 0.5),
            (0.25, None, "0.5"),
            (False, 1),
            ("kernel", False),
            (True, 0),
            (0.5, None, 0),
            ("bshd", None),
            ((3, 2), (1, 3), (3,), None, [3, 1], 3),
        )
    ):
        for other in others:
            options = list(Table.OPTIONS)
            options[place] = other
            assert table.call(tuple(options)) is None
    assert len(table.recorder.seen) == 2
    whole = Table(module)
    whole.options = ("family", None, 1, True, None, False, 0.25, "bhsd", None)
    whole.add(whole.tensors, make_out=torch.empty_like)
    assert whole.call(whole.options) is not None
    for value in (1.0, True):
        assert whole.call(("family", None, value, True, None, False, 0.25, "bhsd", None)) is None


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


def test_extras_are_told_apart_and_have_words_of_their_own(module: ModuleType) -> None:
    table = Table(module)
    mask, others = torch.zeros(9, dtype=torch.bool), [torch.zeros(2, dtype=torch.int32) for _ in range(4)]
    bounds = (1000, 2000)
    sinks = torch.zeros(2, dtype=torch.float16)
    given = (mask, *others, sinks, *bounds)
    names = ("mask", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "sinks")
    for count in (1, 3, 5, 6, 8):
        assert table.call(extras=given[:count]) is None
        assert table.add(table.tensors, None, *given[:count], make_out=torch.empty_like)
        assert table.call(extras=(*given[:6], int("1000"), int("2000"))[:count]) is not None
        sent = table.recorder.seen[-1][1]
        addresses = [t.data_ptr() for t in given[:count] if isinstance(t, torch.Tensor)]
        assert [getattr(sent, name) or 0 for name in names] == addresses + [0] * (6 - len(addresses))
        assert (sent.philox_seed, sent.philox_offset, sent.philox_state) == (0, 0, None)
    seen = len(table.recorder.seen)
    for place, other in enumerate((mask[:8], *(other[:1] for other in others), sinks[:1], 1001, 2001.0)):
        changed = (*given[:place], other, *given[place + 1 :])
        assert table.call(extras=changed) is None
        assert table.call(extras=(*given[:place], None, *given[place + 1 :])) is None
    bias = torch.zeros(9, dtype=torch.float16)
    assert table.add(table.tensors, None, bias, make_out=torch.empty_like)
    assert table.call(extras=(bias,)) is not None
    assert table.call(extras=(bias.clone().requires_grad_(),)) is None
    assert table.call(extras=(*given[:5], sinks.clone().requires_grad_(), *bounds)) is None
    assert len(table.recorder.seen) == seen + 1
    for count in (12, 22):
        with pytest.raises(TypeError, match=f"call takes 13 to 21 arguments; {count} were given"):
            table.table.call(*range(count))


def test_out_may_overlap_no_mask_and_no_lengths(module: ModuleType) -> None:
    table = Table(module)
    out = rand(*SHAPE, device="cpu")
    words = out.flatten()[-16:].view(torch.int32)
    others = [torch.zeros(2, dtype=torch.int32) for _ in range(5)]
    table.add(table.tensors, out, *others)
    assert table.call(out=out, extras=tuple(others)) is not None
    for place in range(5):
        extras = (*others[:place], words[:2], *others[place + 1 :])
        assert table.call(out=out, extras=extras) is None
        words_behind = torch.zeros(1152 + 16, dtype=torch.float16)
        behind = words_behind[1152 : 1152 + 4].view(torch.int32)
        extras = (*others[:place], behind, *others[place + 1 :])
        assert table.call(out=words_behind[:1152].view(SHAPE), extras=extras) is not None
    assert len(table.recorder.seen) == 6


def test_random_bits_are_drawn_for_each_call(module: ModuleType) -> None:
    state = torch.tensor([3, 4])
    drawn: list[Any] = [PhiloxState(2**64 - 1, 2**63), state, (1, "text"), "text", state.to("meta")]
    table = Table(module, draw=lambda: drawn.pop(0))
    assert table.call()[2] == (2**64 - 1, 2**63)
    assert table.call()[2] is state
    with pytest.raises(TypeError):
        table.call()
    assert table.call() is None
    assert table.call() is None
    with pytest.raises(IndexError, match="pop from empty list"):
        table.call()
    first, second = (addresses for _, addresses, _ in table.recorder.seen)
    assert (first.philox_seed, first.philox_offset, first.philox_state) == (2**64 - 1, 2**63, None)
    assert (second.philox_seed, second.philox_offset, second.philox_state) == (0, 0, state.data_ptr())


def test_a_known_signature_is_not_added_twice(module: ModuleType) -> None:
    table = Table(module)
    for rows in range(1, 32):
        assert table.add([rand(1, 1, rows, 8, device="cpu")] * 3, make_out=torch.empty_like)
    for _ in range(40):
        assert table.add(table.tensors)  # would have no make_out
    assert table.call() is not None
    assert table.call(tensors=[rand(1, 1, 1, 8, device="cpu")] * 3) is not None


def test_what_add_is_given_has_to_be_whole(module: ModuleType) -> None:
    table = Table(module)
    made, arguments = table.recorder.launcher(module), (*Table.OPTIONS, *qkv("cpu"), *[None] * 9)
    rest = (torch.empty_like, None, None, Table.UNDRAWN)
    for given, spans in (
        (arguments[:-1], table.spans),
        (arguments, table.spans[:-1]),
        (arguments, ("text",) * 10),
    ):
        table.options = ("another", *Table.OPTIONS[1:])
        with pytest.raises((IndexError, TypeError)):
            module.CallTable().add(made, given, *rest, spans)


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
    rooms = [kept]
    del kept
    made = Recorder().launcher(module, make_workspace=lambda out, stream: (rooms.pop(), 16))
    assert made.run(q, q, q, q, None)
    assert alive() is None
    drawing = Table(module, draw=lambda: kept_state)
    kept_state = PhiloxState(1, 2)
    counted = [
        q,
        torch.Tensor,
        torch.empty_like,
        Table.OPTIONS[0],
        0.5,
        kept_state,
        drawing.draw,
        Table.UNDRAWN,
    ]
    before = [sys.getrefcount(item) for item in counted]
    for _ in range(500):
        table.call()
        drawing.call()
        table.call(tensors=[q[:, :, :3], q, q])
        table.add([q, q, q], make_out=torch.empty_like)
    for rows in range(1, 240):  # all others are dropped
        table.add([rand(1, 1, rows, 8, device="cpu")] * 3)
        drawing.add([rand(1, 1, rows, 8, device="cpu")] * 3)
    after = [sys.getrefcount(item) for item in counted]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
