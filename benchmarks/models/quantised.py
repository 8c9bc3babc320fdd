"""A whole model under enable(precision=...): does the contract of docs/quantised.md hold end to end?

Two questions, answered in one row.

heads       The contract itself: each quantised call of the model against the same call in float64. The worst
            (batch, head) of all calls should be within the contract's line for every family of inputs:
            `heads_hold`.
end to end  What may such errors do to the outputs? `allowed` is measured, not assumed: the same weights in
            float32, where noise of a random direction is added to the result of exactly those calls, as long
            in each row as the contract lets the error be. `holds`: the outputs of the quantised model are no
            further from the float32 model than `allowed` and twice torch's own error together.
            `allowed_normal` is the same for the contract's line for normal inputs.

A random direction is the assumption here: errors of all heads that pointed the same way could add up to more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import sdpa_cutlass
from benchmarks.models import watch
from benchmarks.models.case import Case, Mode
from benchmarks.models.machine import Machine, wall_times
from benchmarks.models.measure import Plan, Subject, subject
from benchmarks.models.providers import served
from benchmarks.quantised_data import CONTRACTS
from sdpa_cutlass.library.registry import Precision
from tests.models.agreement import exact_attention, in_float32

NOISE_SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class QuantisedRow:
    """One case in one dtype and precision. `l2` and `one_minus_cosine` are of the outputs, against float32.

    quantised: calls in that precision, of `served`, of `calls`. torch_l2, exact_l2: of torch's default and of
    this library without a precision. head_l2, head_one_minus_cosine: of the worst head of a quantised call.
    """

    family: str
    model: str
    task: str
    configuration: str
    dtype: str
    precision: str
    min_seqlen: int
    calls: int
    served: int
    quantised: int
    fallbacks: dict[str, int]
    torch_l2: float
    exact_l2: float
    l2: float
    one_minus_cosine: float
    allowed_l2: float
    allowed_one_minus_cosine: float
    allowed_normal_l2: float
    head_l2: float
    head_one_minus_cosine: float
    contract_l2: float
    contract_one_minus_cosine: float
    holds: bool
    heads_hold: bool
    torch_ms: float | None
    exact_ms: float | None
    ms: float | None


def distance(out: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error and 1 - cosine of all outputs together."""
    out = out.double()
    cosine = (out * reference).sum() / (out.norm() * reference.norm())
    return ((out - reference).norm() / reference.norm()).item(), 1 - cosine.item()


def rows(
    case: Case, machine: Machine, plan: Plan, precision: Precision, min_seqlen: int
) -> Iterator[QuantisedRow]:
    """A row for each dtype, of the eager model. None where `enable` sees no call of it."""
    if not case.takes_sdpa or Mode.EAGER not in plan.modes:
        return
    for dtype in (name for name in case.dtypes if name in plan.dtypes):
        yield _row(subject(case, dtype, machine.device), machine, plan, precision, min_seqlen)


def _row(
    subject: Subject, machine: Machine, plan: Plan, precision: Precision, min_seqlen: int
) -> QuantisedRow:
    device = machine.device
    by_torch = distance(subject.run(subject.model), subject.reference)
    with served(device) as (_, around), around():
        exact = distance(subject.run(subject.model), subject.reference)
    numbers: set[int] = set()
    calls = 0
    with served(device, precision=precision, min_seqlen=min_seqlen) as (usage, around):

        def was_quantised() -> bool:
            nonlocal calls
            is_new = usage.quantised > len(numbers)
            if is_new:
                numbers.add(calls)
            calls += 1
            return is_new

        with around(), watch.measured_heads(was_quantised) as heads:
            found = distance(subject.run(subject.model), subject.reference)
        counts = usage.served, usage.quantised, dict(usage.fallbacks)
    contract = CONTRACTS[precision.accuracy]
    allowed = _allowed(subject, contract.every_family, numbers)
    holds = found[0] <= allowed[0] + 2 * by_torch[0]
    heads_hold = heads.l2 <= contract.every_family and heads.one_minus_cosine <= contract.cosine_every
    case = subject.case
    return QuantisedRow(
        family=case.family,
        model=case.model,
        task=case.task,
        configuration=case.configuration,
        dtype=subject.dtype,
        precision=precision.value,
        min_seqlen=min_seqlen,
        calls=calls,
        served=counts[0],
        quantised=counts[1],
        fallbacks=counts[2],
        torch_l2=by_torch[0],
        exact_l2=exact[0],
        l2=found[0],
        one_minus_cosine=found[1],
        allowed_l2=allowed[0],
        allowed_one_minus_cosine=allowed[1],
        allowed_normal_l2=_allowed(subject, contract.normal, numbers)[0],
        head_l2=heads.l2,
        head_one_minus_cosine=heads.one_minus_cosine,
        contract_l2=contract.every_family,
        contract_one_minus_cosine=contract.cosine_every,
        holds=holds,
        heads_hold=heads_hold,
        **_times(subject, machine, plan, precision, min_seqlen),
    )


def _allowed(subject: Subject, size: float, numbers: set[int]) -> tuple[float, float]:
    """The largest distance of the float32 outputs whose attention was disturbed by noise of this size."""
    if not numbers:
        return 0.0, 0.0
    exact = in_float32(subject.model)
    found = []
    for seed in NOISE_SEEDS:
        with exact_attention(), watch.disturbed(size, numbers.__contains__, seed=seed):
            found.append(distance(subject.run(exact), subject.reference))
    return max(l2 for l2, _ in found), max(angle for _, angle in found)


def _times(
    subject: Subject, machine: Machine, plan: Plan, precision: Precision, min_seqlen: int
) -> dict[str, Any]:
    names = ("torch_ms", "exact_ms", "ms")
    if not machine.claims_speed:
        return dict.fromkeys(names)
    device = [machine.device]

    def call() -> torch.Tensor:
        return subject.run(subject.model)

    contexts = (
        contextlib.nullcontext,
        functools.partial(sdpa_cutlass.enabled, devices=device),
        functools.partial(sdpa_cutlass.enabled, devices=device, precision=precision, min_seqlen=min_seqlen),
    )
    calls = {name: (call, around) for name, around in zip(names, contexts, strict=True)}
    return {name: wall.ms for name, wall in wall_times(calls, machine, rounds=plan.rounds).items()}
