"""The way of known signatures: what they leave unchecked, what a launch writes, and what threads share."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import launch_path
from sdpa_cutlass import (
    ArgumentError,
    PhiloxState,
    UnsupportedError,
    attention,
    attention_varlen,
    plan,
    scaled_dot_product_attention,
)
from sdpa_cutlass.call import calls, launch, planning
from sdpa_cutlass.call.extras import Extras
from sdpa_cutlass.errors import ArgumentTypeError
from sdpa_cutlass.library.structs import Addresses, Params
from tests.library.reference import rand

pytestmark = pytest.mark.usefixtures("_call_path")

SHAPE = (1, 2, 9, 64)


def qkv(device: str, seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [rand(*SHAPE, device=device, dtype=dtype, seed=3 * seed + i) for i in range(3)]


class Recorder:
    """Stands in for sdpa_plan_launch: keeps what it was given and succeeds."""

    def __init__(self) -> None:
        self.addresses: list[Addresses] = []
        self.streams: list[int | None] = []

    def __call__(self, native: ctypes.c_void_p, addresses: bytes, stream: ctypes.c_void_p | None) -> int:
        assert len(addresses) == ctypes.sizeof(Addresses)
        self.addresses.append(Addresses.from_buffer_copy(addresses))
        self.streams.append(None if stream is None else stream.value)
        return 0


def recorded(planned: launch.Plan, current_stream: Callable[[int], int] | None = None) -> Recorder:
    """`planned`, made to launch nothing."""
    recorder = Recorder()
    _, native, _, *others = planned._ready
    planned._ready = (recorder, native, current_stream, *others)
    return recorder


def words(struct: Addresses | Params) -> dict[str, Any]:
    """What a launch may change, without the workspace."""
    names = (name for name, *_ in Addresses._fields_[2:] if not name.startswith("workspace"))
    return {name: getattr(struct, name) for name in names}


def test_a_launch_writes_addresses_and_nothing_else(device: str) -> None:
    planned = plan(*qkv(device), return_lse=True)._plan
    recorder = recorded(planned)
    q, k, v = qkv(device, seed=1)
    out, lse = torch.empty_like(q), torch.empty(SHAPE[:3], device=device)
    expected = words(launch.make_params(planned.problem, 0.125, q, k, v, out, lse))
    for _ in range(2):
        planned.launch(q, k, v, out, lse)
        sent = recorder.addresses.pop()
        assert (sent.struct_size, sent.workspace, sent.workspace_bytes) == (len(bytes(sent)), None, 0)
        assert words(sent) == expected


@pytest.mark.parametrize("state", [PhiloxState(2**64 - 1, 2**63), "tensor"], ids=str)
def test_a_launch_writes_every_extra(state: Any, device: str) -> None:
    def extras(seed: int) -> Extras:
        mask = torch.ones(1, 2, 9, 9, dtype=torch.bool, device=device)
        lengths = [torch.tensor([seed], dtype=torch.int32, device=device) for _ in range(4)]
        philox = torch.tensor([seed, seed], device=device) if state == "tensor" else state
        return Extras(mask, 0.5, philox, *lengths)

    q, k, v = qkv(device)
    given = Extras(extras(0).mask, seqlens_q=extras(0).seqlens_q, seqlens_k=extras(0).seqlens_k)
    planned = plan(q, k, v, attn_mask=given.mask, seqlens_q=given.seqlens_q, seqlens_k=given.seqlens_k)._plan
    recorder = recorded(planned)
    planned.launch(q, k, v, q, None)
    again = words(recorder.addresses.pop())
    assert (again["mask"], again["seqlens_k"]) == (given.mask.data_ptr(), given.seqlens_k.data_ptr())
    fresh = extras(1)
    planned.launch(q, k, v, q, None, fresh)
    sent = words(recorder.addresses.pop())
    assert sent == words(launch.make_params(planned.problem, 0.125, q, k, v, q, None, fresh))


def test_the_stream_is_the_current_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_streams", {})
    monkeypatch.setattr(launch, "_MAX_STREAMS", 3)
    handles = [0, 2**47 + 8, 0, 2**47 + 16, 2**47 + 24, 2**47 + 32, 0, 2**47 + 8]
    waiting = iter(handles)
    planned = plan(*qkv(device))._plan
    recorder = recorded(planned, lambda index: next(waiting))
    q, k, v = qkv(device)
    for _ in handles:
        planned.launch(q, k, v, q, None)
        assert 1 <= len(launch._streams) <= 3
    assert [stream or 0 for stream in recorder.streams] == handles


@pytest.mark.parametrize("options", [{}, {"attn_mask": True}], ids=["plain", "general"])
def test_a_known_out_is_still_checked(options: dict[str, Any], device: str) -> None:
    size = 2 * 9 * 64
    memory = torch.zeros(5 * size, dtype=torch.float16, device=device)

    def at(start: int) -> torch.Tensor:
        return memory[start : start + size].view(SHAPE)

    if options:
        options = {"attn_mask": torch.ones(9, 9, dtype=torch.bool, device=device)}
    q, k, v = at(0), at(size), at(2 * size)
    fresh = qkv(device)
    expected = attention(*fresh, **options)
    for _ in range(3):
        for tensor, value in zip((q, k, v), fresh, strict=True):
            tensor.copy_(value)
        for neighbour in ((v, q, k), (q, v, k), (q, k, v)):  # out begins where v ends: no overlap
            attention(*neighbour, out=at(3 * size), **options)
        assert torch.equal(at(3 * size), expected)
        attention(at(size), at(2 * size), at(3 * size), out=at(0), **options)
        attention(at(2 * size), at(size), at(3 * size), out=at(0), **options)
        attention(at(2 * size), at(3 * size), at(size), out=at(0), **options)
        for tensor, value in zip((q, k, v), fresh, strict=True):
            tensor.copy_(value)
        for name, start in (("query", 8), ("key", size), ("value", 3 * size - 8)):
            others = {"query": q, "key": k, "value": v}
            apart = {other: tensor.clone() for other, tensor in others.items() if other != name}
            with pytest.raises(ArgumentError, match=f"out overlaps {name} in memory"):
                attention(**others | apart, out=at(start), **options)
        with pytest.raises(ArgumentError, match="out starts at address"):
            attention(q, k, v, out=at(3 * size + 4), **options)
        out = at(3 * size).clone().requires_grad_()
        with pytest.raises(UnsupportedError, match="out requires grad"):
            attention(q, k, v, out=out, **options)
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, out=out, **options), expected)


def test_a_known_out_needs_no_planning(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None], device: str
) -> None:
    forget()
    out = torch.empty(SHAPE, dtype=torch.float16, device=device)
    attention(*qkv(device), out=out)
    expected = attention(*qkv(device, seed=1))
    assert len(calls._plain) == 2
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    for other in (out, torch.empty_like(out), out):
        assert attention(*qkv(device, seed=1), out=other) is other
        assert torch.equal(other, expected)


def _changed(device: str) -> dict[str, tuple[list[torch.Tensor], dict[str, Any]]]:
    q, k, v = qkv(device)
    strided = torch.zeros(1, 9, 2, 64, dtype=torch.float16, device=device).transpose(1, 2)
    return {
        "same": ([q, k, v], {}),
        "query strides": ([strided.copy_(q), k, v], {}),
        "key strides": ([q, strided.clone(memory_format=torch.preserve_format).copy_(k), v], {}),
        "value strides": ([q, k, strided.clone(memory_format=torch.preserve_format).copy_(v)], {}),
        "shorter keys": ([q, k[:, :, :8], v[:, :, :8]], {}),
        "fewer queries": ([q[:, :, :8], k, v], {}),
        "dtype": (qkv(device, dtype=torch.bfloat16), {}),
        "misaligned": ([q, torch.cat([k.flatten()[:4], k.flatten()])[4:].view(SHAPE), v], {}),
        "scale": ([q, k, v], {"scale": 0.5}),
        "causal": ([q, k, v], {"causal": "top_left"}),
        "lse": ([q, k, v], {"return_lse": True}),
        "out": ([q, k, v], {"out": torch.empty_like(q)}),
        "strided out": ([q, k, v], {"out": strided.clone(memory_format=torch.preserve_format)}),
    }


@pytest.mark.parametrize("change", sorted(_changed("cpu")))
def test_another_signature_is_told_from_the_latest(
    change: str, forget: Callable[[], None], device: str
) -> None:
    def answer(name: str) -> list[torch.Tensor]:
        tensors, options = _changed(device)[name]
        result = attention(*tensors, **options)
        return [part.clone() for part in (result if isinstance(result, tuple) else (result,))]

    alone = {}
    for name in ("same", change):
        forget()
        alone[name] = answer(name)
    forget()
    for name in ("same", "same", "same", change, "same", change, change, "same", change):
        got = answer(name)
        assert len(got) == len(alone[name])
        assert all(torch.equal(a, b) for a, b in zip(got, alone[name], strict=True)), name
    tensors, _ = _changed(device)[change]
    with pytest.raises(ArgumentTypeError, match="key has dtype"):
        attention(tensors[0], tensors[1].double(), tensors[2])


def test_grad_is_recorded_behind_the_latest_signature(device: str) -> None:
    q, k, v = qkv(device)
    for _ in range(3):
        expected = scaled_dot_product_attention(q, k, v)
    for name in ("query", "key", "value"):
        tensors = {"query": q, "key": k, "value": v}
        tensors[name] = tensors[name].clone().requires_grad_()
        recorded = scaled_dot_product_attention(**tensors)
        assert torch.equal(recorded, expected)
        recorded.sum().backward()
        assert tensors[name].grad is not None
        with torch.no_grad():
            assert torch.equal(scaled_dot_product_attention(**tensors), expected)


@pytest.mark.parametrize(
    ("good", "bad"), [(0.5, torch.tensor(0.5)), (1.0, True), (0.5, [0.5])], ids=["tensor", "bool", "list"]
)
def test_a_scale_that_only_equals_the_latest_is_refused(good: float, bad: Any, device: str) -> None:
    tensors = qkv(device)
    for _ in range(3):
        attention(*tensors, scale=good)
    with pytest.raises(ArgumentTypeError, match="scale="):
        attention(*tensors, scale=bad)


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Runs work(0), ..., work(count - 1) at once; raises what one of them raised."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_may_share_a_plan(device: str) -> None:
    planned = plan(*qkv(device), return_lse=True)
    inputs = [qkv(device, seed) for seed in range(8)]
    expected = [attention(*tensors, return_lse=True, kernel=planned.kernel.name) for tensors in inputs]

    def work(index: int) -> None:
        for _ in range(5):
            out = torch.full_like(inputs[index][0], float("nan"))
            lse = torch.full(SHAPE[:3], float("nan"), device=device)
            planned.run(*inputs[index], out, lse)
            assert torch.equal(out, expected[index][0])
            assert torch.equal(lse, expected[index][1])

    in_threads(work)


def test_a_launch_keeps_its_addresses_while_others_launch(device: str) -> None:
    """The struct of a call is its own: what it points to stays as it was while the library reads it."""
    planned = plan(*qkv(device))._plan
    inside = threading.Barrier(4)
    wrong = []

    def slow(native: ctypes.c_void_p, addresses: bytes, stream: Any) -> int:
        before = Addresses.from_buffer_copy(addresses).q
        inside.wait()  # every thread is in the library with its own call
        if Addresses.from_buffer_copy(addresses).q != before:
            wrong.append(before)
        inside.wait()
        return 0

    planned._ready = (slow, *planned._ready[1:])
    out = torch.empty(SHAPE, dtype=torch.float16, device=device)
    seen = [16 * (index + 1) for index in range(4)]
    in_threads(lambda index: planned.launch_at(seen[index], 16, 16, out, None), count=4)
    assert not wrong


def test_threads_may_call_with_different_signatures(device: str) -> None:
    inputs = [[tensor[:, :, : 5 + index % 4] for tensor in qkv(device, index)] for index in range(8)]
    expected = [attention(*tensors) for tensors in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            assert torch.equal(attention(*inputs[index]), expected[index])

    in_threads(work)


@pytest.mark.gpu
def test_threads_with_streams_of_their_own() -> None:
    planned = plan(*qkv("cuda"))
    inputs = [qkv("cuda", seed) for seed in range(8)]
    expected = [attention(*tensors, kernel=planned.kernel.name) for tensors in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = [torch.zeros_like(tensor) for tensor in inputs[index]]
            out = torch.empty_like(late[0])
            torch.cuda._sleep(5_000_000)  # only work behind this on the same stream sees the values
            for tensor, value in zip(late, inputs[index], strict=True):
                tensor.copy_(value)
            for _ in range(50):
                planned.run(*late, out)
        stream.synchronize()
        assert torch.equal(out, expected[index])

    in_threads(work)


@pytest.mark.gpu
def test_graphs_capture_plans_and_a_given_out() -> None:
    tensors = qkv("cuda")
    planned, out, written = plan(*tensors), *(torch.empty_like(tensors[0]) for _ in range(2))
    attention(*tensors, out=written)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.run(*tensors, out)
        attention(*tensors, out=written)
    for tensor, value in zip(tensors, qkv("cuda", seed=1), strict=True):
        tensor.copy_(value)
    graph.replay()
    expected = attention(*tensors)
    assert torch.equal(out, expected)
    assert torch.equal(written, expected)


def test_the_benchmark_measures_and_launches_nothing_dry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "cpu.json"
    monkeypatch.setattr("sys.argv", ["launch_path", "--device", "cpu", "--rounds", "2", "--json", str(path)])
    native = launch.library_for(torch.empty(0))[0]
    real = native.launch_plan
    assert launch_path.main() == 0
    assert native.launch_plan is real
    record = json.loads(path.read_text())
    assert (record["format"], record["shape"], record["rounds"]) == (1, [1, 8, 512, 64], 2)
    steps = [*launch_path.PARTS, *launch_path.DRY]
    assert [row["name"] for row in record["rows"]] == [step.name for step in steps]
    assert all(0 < row["us_min"] <= row["us"] for row in record["rows"])
    printed = capsys.readouterr().out
    assert all(step.name in printed for step in steps)
    q, k, v = qkv("cpu")
    launch_path.measure(torch.device("cpu"), shape=SHAPE, rounds=1)
    torch.testing.assert_close(
        attention(q, k, v).float(),
        torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float()),
        atol=2e-3,
        rtol=2e-3,
    )


def test_what_only_equals_a_known_option_is_refused(device: str) -> None:
    q, k, v = (rand(1, 2, 9, 64, device=device, seed=seed) for seed in range(3))
    mask = torch.ones(9, dtype=torch.bool, device=device)
    packed = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    for _ in range(3):
        attention(q, k, v, attn_mask=mask, scale=1.0)
        attention_varlen(*packed, starts, starts, 1, 1, scale=1.0)
    with pytest.raises(ArgumentTypeError, match="scale"):
        attention(q, k, v, attn_mask=mask, scale=True)
    with pytest.raises(ArgumentTypeError, match="scale"):
        attention_varlen(*packed, starts, starts, 1, 1, scale=True)
    with pytest.raises(ArgumentTypeError, match="max_seqlen_k"):
        attention_varlen(*packed, starts, starts, 1, True, scale=1.0)
