"""A case's rows: errors against float32, what was served, and on a GPU times and attention's share."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.models import watch
from benchmarks.models.case import DTYPES, Case, Mode, Run
from benchmarks.models.machine import Call, Machine, wall_times
from benchmarks.models.providers import INTERFACE, NAMES, OURS, TORCH, Graphs, Provider, providers
from benchmarks.models.share import attention_share
from sdpa_cutlass.cli.providers import collected_warnings, describe_failure
from tests.models.agreement import Agreement, exact_attention, in_float32

RECOMPILATIONS = 64  # of one function: every provider compiles it
NOT_CAPTURED = "not captured"
"""How the status of a provider begins whose run a graph cannot hold."""


@dataclass(kw_only=True)
class Entry:
    """One provider in one row. Errors are against the model in float32; `status` is ok or why there are none.

    calls_in_graphs: attention calls of the compiled graphs, this library's and torch's.
    """

    status: str = "ok"
    error: float | None = None
    l2: float | None = None
    ms: float | None = None
    ms_spread: float | None = None
    attention_share: float | None = None
    served: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    calls_in_graphs: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case in one dtype and mode. `error`, `served`, `fallbacks` and `ms` are this library's.

    calls: of F.scaled_dot_product_attention in one run; `problems` says which.
    agrees: None where torch's own run cannot be captured in a graph, so that there is nothing to agree with.
    """

    family: str
    model: str
    task: str
    configuration: str
    dtype: str
    mode: str
    torch_error: float | None
    error: float | None
    bound: float | None
    agrees: bool | None
    calls: int
    served: int
    fallbacks: dict[str, int]
    torch_ms: float | None
    ms: float | None
    by: str
    problems: list[dict[str, Any]]
    providers: dict[str, Entry]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured of every case."""

    dtypes: Collection[str]
    modes: Collection[Mode]
    rounds: int
    compiler: str
    providers: Collection[str] = NAMES


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case's model in one dtype on one device, its run, and the outputs of the same weights in float32."""

    case: Case
    dtype: str
    model: torch.nn.Module
    run: Run
    reference: torch.Tensor

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """The largest difference, and the relative L2 error."""
        difference = out.double() - self.reference
        return difference.abs().max().item(), (difference.norm() / self.reference.norm()).item()


def subject(case: Case, dtype: str, device: str) -> Subject:
    """The case, ready to run."""
    model = copy.deepcopy(case.build()).to(device, DTYPES[dtype])
    run = case.inputs(device)
    with exact_attention():
        reference = run(in_float32(model)).double()
    return Subject(case=case, dtype=dtype, model=model, run=run, reference=reference)


def rows(case: Case, machine: Machine, plan: Plan) -> Iterator[Row]:
    """A row for each dtype and mode that both the case and the plan have."""
    for dtype in (name for name in case.dtypes if name in plan.dtypes):
        found = subject(case, dtype, machine.device)
        with providers(case, found.model, machine.device) as contestants:
            judged = _judged_by(case)
            taking_part = [each for each in contestants if each.name in {TORCH, judged, *plan.providers}]
            with watch.counted() as problems:
                found.run(found.model)
            for mode in (mode for mode in case.modes if mode in plan.modes):
                yield _row(found, mode, taking_part, machine, plan, watch.as_records(problems))
        del found, contestants, taking_part
        if machine.claims_speed:  # a GPU's memory is what the next model needs
            gc.collect()


def _row(
    subject: Subject,
    mode: Mode,
    contestants: list[Provider],
    machine: Machine,
    plan: Plan,
    problems: list[dict[str, Any]],
) -> Row:
    entries: dict[str, Entry] = {}
    calls: dict[str, tuple[Call, Callable[[], AbstractContextManager[Any]]]] = {}
    if mode is Mode.COMPILED:
        torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says in warnings which of its backends were passed over
        for provider in contestants:
            entry, call = _entry(subject, mode, provider, machine, plan)
            entries[provider.name] = entry
            if call is not None:
                calls[provider.name] = call, provider.around
        if machine.claims_speed:
            for name, wall in wall_times(calls, machine, rounds=plan.rounds).items():
                entries[name].ms, entries[name].ms_spread = wall.ms, wall.spread
            if mode is Mode.EAGER:
                for name in (name for name in calls if name != INTERFACE):
                    call, around = calls[name]
                    with around():
                        entries[name].attention_share = attention_share(machine, call)
    if mode is Mode.COMPILED:
        torch._dynamo.reset()
    return _judged(subject, mode, problems, entries)


def _entry(
    subject: Subject, mode: Mode, provider: Provider, machine: Machine, plan: Plan
) -> tuple[Entry, Call | None]:
    """One run of one provider, and what to time; None where it cannot serve the model."""
    entry = Entry()
    graphs: Graphs | None = None
    stage = ""
    model: Any = subject.model
    if mode is Mode.COMPILED:
        graphs = Graphs(plan.compiler)
        model = torch.compile(subject.model, backend=graphs)

    def call() -> torch.Tensor:
        return subject.run(model)

    with provider.around(), collected_warnings() as warned:
        try:
            if provider.usage is not None:
                provider.usage.served = 0
                provider.usage.fallbacks.clear()
            out = call()
            if provider.usage is not None:
                entry.served, entry.fallbacks = provider.usage.served, dict(provider.usage.fallbacks)
            if mode is Mode.GRAPH:
                stage = NOT_CAPTURED
                call = machine.capture(call)  # type: ignore[assignment]
                stage = ""
                out = call()
            machine.synchronize()
            entry.error, entry.l2 = subject.errors(out)
        except Exception as error:
            status = _status(error, warned)
            entry.status = f"{stage}: {status}" if stage else status
            return entry, None
    if graphs is not None:
        entry.calls_in_graphs = {"sdpa_cutlass": graphs.ours, "torch": graphs.torchs}
    return entry, call


def _status(error: Exception, warned: list[str]) -> str:
    """Why a provider has no result; a refusal is one in compiled code, too, where dynamo wraps it."""
    for line in str(error).splitlines():
        if "No available kernel" in line or "No viable backend" in line:
            return describe_failure(RuntimeError("No available kernel"), warned)
    return describe_failure(error, warned)


def _judged_by(case: Case) -> str:
    """The provider that speaks for this library; it takes part in every run."""
    return OURS if case.takes_sdpa else INTERFACE


def _judged(subject: Subject, mode: Mode, problems: list[dict[str, Any]], entries: dict[str, Entry]) -> Row:
    """This library's word is that of `enable`, or of the interface in models that `enable` does not see.

    It agrees where every error is within the bound of tests/models/agreement.py and nothing was passed on.
    """
    case = subject.case
    by = _judged_by(case)
    ours = entries[by]
    calls = sum(problem["calls"] for problem in problems)
    nan = float("nan")
    agreement = Agreement(
        error=nan if ours.error is None else ours.error,
        torch_error=entries[TORCH].error or 0.0,
        magnitude=subject.reference.abs().max().item(),
        dtype=DTYPES[subject.dtype],
        served=ours.served or 0,
        fallbacks=ours.fallbacks,
    )
    interface = entries.get(INTERFACE)
    agrees = agreement.holds and (interface is None or (interface.error or nan) <= agreement.bound)
    if mode is Mode.COMPILED:  # calls of compiled code are not counted, those in its graphs are
        in_graphs = ours.calls_in_graphs or {"torch": 1, "sdpa_cutlass": 0}
        agrees = agrees and in_graphs["torch"] == 0 and in_graphs["sdpa_cutlass"] > 0
    else:
        expected = calls if by == OURS else agreement.served
        agrees = agrees and 0 < agreement.served == expected and not agreement.fallbacks
    judged = not entries[TORCH].status.startswith(NOT_CAPTURED)
    return Row(
        family=case.family,
        model=case.model,
        task=case.task,
        configuration=case.configuration,
        dtype=subject.dtype,
        mode=mode.value,
        torch_error=agreement.torch_error if judged else None,
        error=agreement.error if judged else None,
        bound=agreement.bound if judged else None,
        agrees=agrees if judged else None,
        calls=calls,
        served=agreement.served,
        fallbacks=agreement.fallbacks,
        torch_ms=entries[TORCH].ms,
        ms=ours.ms,
        by=by,
        problems=problems,
        providers=entries,
    )
