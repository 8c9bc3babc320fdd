"""How benchmarks/models measures: turns, contexts, compiled graphs, shares; a GPU is replaced by a fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.models import command, measure, quantised, report, share
from benchmarks.models.case import Case, Mode
from benchmarks.models.families import ENCODER, FAMILIES, NAMES, cases
from benchmarks.models.machine import Machine, Wall, wall_times
from benchmarks.models.providers import BACKENDS, served
from benchmarks.models.providers import NAMES as PROVIDERS
from sdpa_cutlass.library.registry import Precision


class FakeGpu(Machine):
    """A CPU that claims to be fast and to have graphs; a replay computes again."""

    claims_speed = True
    has_graphs = True
    compiler = "eager"

    def capture(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        call()
        return call


class Attention(torch.nn.Module):
    """One layer whose query, key and value are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 32)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))


def inputs(_: str) -> Callable[[Any], torch.Tensor]:
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(0)).half()
    return lambda model: model(x.to(next(iter(model.parameters())).dtype))[0]


def build() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attention()


CASE = Case(
    family="made up",
    model="one layer",
    task="70 tokens",
    configuration="2 heads of 32",
    build=build,
    inputs=inputs,
    own_attention=None,
)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def rows(*modes: Mode, **options: Any) -> list[measure.Row]:
    plan = measure.Plan(dtypes=("f16",), modes=modes, rounds=3, compiler="eager", **options)
    return list(measure.rows(CASE, FakeGpu(), plan))


def test_every_mode_has_times_and_agrees() -> None:
    found = {row.mode: row for row in rows(*Mode)}
    assert list(found) == ["eager", "compiled", "graph"]
    for row in found.values():
        assert row.agrees, row
        assert row.torch_ms is not None
        assert row.ms is not None
        assert set(row.providers) == {"torch", *BACKENDS, "sdpa_cutlass"}
        assert row.providers["math"].status == "ok"
        assert row.providers["cudnn"].status.startswith("refused: ")
        assert row.providers["cudnn"].ms is None
        assert row.calls == 1
        assert row.problems[0]["query"] == (1, 2, 70, 32)
        assert "WRONG" not in report.line(row)
    eager = found["eager"].providers
    assert 0 < (eager["torch"].attention_share or 0) < 1
    assert 0 < (eager["sdpa_cutlass"].attention_share or 0) < 1
    assert found["compiled"].providers["torch"].attention_share is None


def test_torch_and_this_library_take_part_whoever_is_named() -> None:
    (row,) = rows(Mode.EAGER, providers=("math",))
    assert list(row.providers) == ["torch", "math", "sdpa_cutlass"]
    assert row.agrees


def test_each_provider_has_its_own_compiled_code() -> None:
    """Else the second one would run what the first had compiled, and every time would be the first one's."""
    (row,) = rows(Mode.COMPILED)
    graphs = {name: entry.calls_in_graphs for name, entry in row.providers.items() if entry.status == "ok"}
    assert graphs == {
        "torch": {"sdpa_cutlass": 0, "torch": 1},
        "flash": {"sdpa_cutlass": 0, "torch": 1},
        "math": {"sdpa_cutlass": 0, "torch": 1},
        "sdpa_cutlass": {"sdpa_cutlass": 1, "torch": 0},
    }


def test_rounds_compile_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    lookup = measure.Graphs.__call__

    def counting(self: Any, graph: Any, given: Any) -> Any:
        compiled.append(1)
        return lookup(self, graph, given)

    monkeypatch.setattr(measure.Graphs, "__call__", counting)
    rows(Mode.COMPILED, providers=("torch", "sdpa_cutlass"))
    assert len(compiled) == 2


def test_what_compiled_code_left_to_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdpa_cutlass.integrations.torch_refusals._has_kernel", lambda *_, **__: False)
    (row,) = rows(Mode.COMPILED, providers=("torch", "sdpa_cutlass"))
    assert not row.agrees


def refuse(*_: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_graph_of_this_library_that_cannot_be_captured_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, right = F.scaled_dot_product_attention, FakeGpu.capture

    def capture(self: FakeGpu, call: Any) -> Any:
        return right(self, call) if F.scaled_dot_product_attention is torchs else refuse()

    monkeypatch.setattr(FakeGpu, "capture", capture)
    (row,) = rows(Mode.GRAPH, providers=())
    assert row.agrees is False
    assert row.torch_ms is not None
    assert row.ms is None
    assert row.providers["sdpa_cutlass"].status.startswith("not captured: ")
    assert "WRONG" in report.line(row)
    assert "not permitted" in report.line(row)


def test_what_torch_cannot_capture_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with gpt-oss, whose experts read sizes on the host: no verdict, and the command does not fail."""
    monkeypatch.setattr(FakeGpu, "capture", refuse)
    monkeypatch.setattr(command, "cases", lambda *_, **__: [CASE])
    arguments = ["--mode", "eager", "graph", "--dtype", "f16", "--provider", "sdpa_cutlass"]
    options = command.parser().parse_args([*arguments, "--rounds", "1", "--encoder", "none"])
    assert command.run(options, FakeGpu()) == 0
    out = capsys.readouterr().out
    assert "1 of 1 agree, 1 could not be captured" in out
    assert "WRONG" not in out
    (row,) = rows(Mode.GRAPH, providers=())
    assert (row.agrees, row.torch_error, row.error, row.bound, row.ms) == (None, None, None, None, None)
    assert "not captured: " in report.line(row)


def test_a_run_that_fails_before_its_capture_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory left")

    monkeypatch.setattr("sdpa_cutlass.public.api.scaled_dot_product_attention", fail)
    (row,) = rows(Mode.GRAPH, providers=())
    assert row.agrees is False
    assert row.providers["sdpa_cutlass"].status.startswith("error: RuntimeError: no memory")


def test_calls_take_turns_in_their_contexts() -> None:
    """Three rounds of two, each beginning with another; the context is entered before the clock is read."""
    log: list[str] = []
    now = iter(range(100))

    def contestant(name: str) -> tuple[Callable[[], torch.Tensor], Any]:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            log.append(f"enter {name}")
            yield

        def call() -> torch.Tensor:
            log.append(name)
            return torch.zeros(0)

        return call, around

    def clock() -> float:
        log.append("clock")
        return float(next(now))

    found = wall_times({name: contestant(name) for name in "ab"}, Machine(), rounds=3, clock=clock)
    one = {name: [f"enter {name}", "clock", name, "clock"] for name in "ab"}
    assert log == one["a"] + one["b"] + one["b"] + one["a"] + one["a"] + one["b"]
    assert found == {name: Wall(1000.0, 0.0) for name in "ab"}


def test_torchs_function_stands_outside_of_the_context() -> None:
    before = F.scaled_dot_product_attention
    q = torch.randn(1, 1, 9, 32).half()
    with served("cpu") as (usage, around):
        assert F.scaled_dot_product_attention is before
        for _ in range(2):
            with around():
                inside = F.scaled_dot_product_attention
                inside(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
        assert inside is not before
        assert usage.served == 2
    assert F.scaled_dot_product_attention is before


def span(name: str, start: float, length: float, *, thread: int = 1, **more: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": length, "tid": thread}
    return event | more


def launched(number: int, moment: float, length: float, *, thread: int = 1, by: str) -> list[dict[str, Any]]:
    args = {"correlation": number}
    return [
        span("cuLaunchKernel", moment, 1, thread=thread, cat=by, args=args),
        span("some kernel", 500 + moment, length, thread=7, cat="kernel", args=args),
    ]


def test_the_share_is_that_of_kernels_launched_within_calls() -> None:
    events = [
        span(share.RUN, 0, 100),
        span(share.ATTENTION, 10, 10),
        span(share.ATTENTION, 50, 10),
        span(share.ATTENTION, 510, 300, cat="gpu_user_annotation"),  # the same, as the device saw it
        *launched(1, 5, 40, by="cuda_runtime"),
        *launched(2, 12, 30, by="cuda_driver"),  # this library launches through the driver
        *launched(3, 55, 20, by="cuda_runtime"),
        *launched(4, 15, 5, thread=2, by="cuda_runtime"),  # another thread, at that time
        span("memcpy", 600, 5, cat="gpu_memcpy", args={"correlation": 9}),
    ]
    assert share.share(events) == 0.5  # 30 + 20 of 40 + 30 + 20 + 5 + 5


def test_without_kernels_the_share_is_that_of_the_calls() -> None:
    assert share.share([span(share.RUN, 0, 200), span(share.ATTENTION, 10, 50)]) == 0.25
    assert share.share([span(share.RUN, 0, 200)]) is None


def test_quantised_rows_are_timed_on_a_gpu() -> None:
    plan = measure.Plan(dtypes=("f16",), modes=(Mode.EAGER,), rounds=2, compiler="eager")
    (row,) = quantised.rows(CASE, FakeGpu(), plan, Precision.INT8_QK, 1)
    assert row.quantised == row.calls == 1
    assert None not in (row.torch_ms, row.exact_ms, row.ms)


def test_a_gpu_runs_every_mode_by_default() -> None:
    options = command.parser().parse_args([])
    assert command._modes(options, FakeGpu()) == list(Mode)
    assert command._modes(options, Machine()) == [Mode.EAGER]
    assert tuple(options.provider) == PROVIDERS


@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
def test_every_family_says_what_it_is_made_of(small: bool) -> None:
    """Nothing is built: sizes in words, and a name of its own for every case."""
    found = list(cases(NAMES, "cpu", small=small))
    assert {case.family for case in found} == set(FAMILIES)
    assert len({(case.model, case.task) for case in found}) == len(found)
    assert all(case.configuration for case in found)
    assert ENCODER not in FAMILIES
