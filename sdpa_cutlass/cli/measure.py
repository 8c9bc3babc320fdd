"""One problem, every provider: inputs, correctness, time → result rows.

The order matters. Each provider first runs once, which shows whether it can run this problem at all; this
library's families are then checked with their log-sum-exp. What passed is timed side by side, and the
outputs of the timed calls are checked again. A provider that fails keeps its row: the status says why.
The provider `plain` computes another problem, the one without mask, lengths and dropout; it has its own
reference, and takes no part where the problem is that one anyway. A peer is not held to our bounds, but one
that is off by a tenth of the largest output computes something else, and a time below the hardware's floor
(roofline.py) is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sdpa_cutlass.cli.accuracy import Errors, Reference, make_reference
from sdpa_cutlass.cli.conditions import Conditions, make_conditions
from sdpa_cutlass.cli.inputs import QKV, load_qkv, random_qkv, torch_dtype
from sdpa_cutlass.cli.providers import (
    Call,
    Operands,
    Provider,
    collected_warnings,
    describe_failure,
    kernel_name,
    with_lse,
)
from sdpa_cutlass.cli.results import INVALID, Row
from sdpa_cutlass.cli.roofline import Ceilings
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.timing import GRAPH_CALLS, Contestant, Timing, time_on_cpu, time_on_gpu
from sdpa_cutlass.cli.wall import SMALL_US, WallTiming, time_wall

if TYPE_CHECKING:
    import torch

CHECKED_SCORES = 2**30  # of a problem that is not plain: there are many of them
PLAIN_CHECKED_SCORES = 2**28
COLD_L2_SHARE = 4  # a problem whose inputs shall come from DRAM rotates over this many times the L2 cache
ANOTHER_PROBLEM = 0.1  # of the largest output: a peer with such an error computes something else


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure. `repeats`: replays on a GPU (at most; `budget_s` ends them earlier), calls on a CPU.
    `sustained_s`: seconds that each provider has a GPU for itself, instead of turns.
    """

    device: torch.device
    dtype: str
    providers: Sequence[Provider]
    seed: int
    repeats: int
    budget_s: float = 0.15
    sustained_s: float | None = None
    ceilings: Ceilings | None = None  # of the GPU; without them no time is impossible
    checked_scores: int | None = None  # of a problem's, at most; None: as many as is usual for its kind
    loops: int = 0  # of calls from Python for problems that are over quickly (wall.py); 0: timing.py's three
    keep: Callable[[str, Timing], None] | None = None  # is given each provider's timing, raw times included


@dataclasses.dataclass
class _Entry:
    """What is known so far about one provider at one problem."""

    provider: Provider
    reference: Reference | None = None
    calls: Sequence[Call] = ()
    kernel: str | None = None
    errors: Errors | None = None
    timing: Timing = dataclasses.field(default_factory=Timing)
    input_sets: int | None = None
    wall: WallTiming | None = None
    floor_us: float | None = None
    failure: str | None = None


def measure(case: Case, settings: Settings) -> list[Row]:
    """One row per provider, in their order. Whatever goes wrong ends up in a row's status."""
    entries = {
        provider.name: _Entry(provider)
        for provider in settings.providers
        if not (provider.is_plain and case.is_plain)
    }
    visible = 1.0
    try:
        inputs = input_sets(case, settings)
        visible = inputs[0].conditions.visible
        _add_references(entries, case, inputs[0], settings)
    except Exception as error:
        _release_memory(settings.device)
        for entry in entries.values():
            entry.failure = f"error: inputs: {describe_failure(error)}"
        return [_row(case, settings, entry, visible) for entry in entries.values()]
    for entry in entries.values():
        _first_run(entry, case, inputs)
    contestants = {name: _contestant(entry) for name, entry in entries.items() if entry.failure is None}

    def failed(name: str, error: Exception) -> None:
        entries[name].failure = describe_failure(error)
        _release_memory(settings.device)

    try:
        if settings.device.type == "cuda":
            timings = time_on_gpu(
                contestants,
                budget_s=settings.budget_s,
                max_replays=settings.repeats,
                failed=failed,
                sustained_s=settings.sustained_s,
            )
        else:
            timings = time_on_cpu(contestants, repeats=settings.repeats, failed=failed)
        for name, timing in timings.items():
            entries[name].timing = timing
            if settings.keep is not None:
                settings.keep(name, timing)
            _recheck(entries[name], contestants[name])
            entries[name].input_sets = contestants[name].num_sets
            _check_floor(entries[name], case, inputs[0].conditions.visible, settings)
        if settings.loops and settings.device.type == "cuda":
            _time_wall(entries, contestants, settings.loops, failed)
    except Exception as error:
        # An asynchronous CUDA error belongs to nobody in particular.
        for name in contestants:
            entries[name].failure = entries[name].failure or describe_failure(error)
    computed = inputs[0].conditions.computed
    return [
        _row(case, settings, entry, visible, 1.0 if entry.provider.is_plain else computed)
        for entry in entries.values()
    ]


def input_sets(case: Case, settings: Settings) -> list[Operands]:
    """Input sets that the calls rotate over: as many as fit into a quarter of the L2 cache.

    No call finds its own inputs where the last one left them, yet small problems read them from L2, as they
    do in a model whose last kernel has just written them. Those of a cold problem are several times as large
    as the cache, so that every call reads DRAM. At most one set for each call of a graph.
    """
    dtype, device = torch_dtype(case.dtype or settings.dtype), settings.device
    conditions = make_conditions(case, dtype=dtype, device=device, seed=settings.seed)
    if case.source is not None:
        return [Operands(load_qkv(case.source).to(device, dtype), conditions)]
    count = 1
    if device.type == "cuda":
        import torch

        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        size = case.problem().bytes
        wanted = -(-COLD_L2_SHARE * l2_bytes // size) if case.is_cold else l2_bytes // (4 * size)
        count = max(2 if case.is_cold else 1, min(GRAPH_CALLS, wanted))
    return [
        _operands(random_qkv(case, dtype=dtype, device=device, seed=settings.seed, index=index), conditions)
        for index in range(count)
    ]


def _operands(qkv: QKV, conditions: Conditions) -> Operands:
    return Operands(qkv, conditions, conditions.pack(qkv) if conditions.is_packed else None)


def _add_references(entries: dict[str, _Entry], case: Case, operands: Operands, settings: Settings) -> None:
    """Gives every entry the reference of the problem that its provider computes."""
    references: dict[bool, Reference] = {}
    for entry in entries.values():
        is_plain = entry.provider.is_plain
        if is_plain not in references:
            limit = settings.checked_scores or (None if case.is_plain else CHECKED_SCORES)
            references[is_plain] = make_reference(
                operands.qkv,
                causal=case.causal,
                seed=settings.seed,
                conditions=None if is_plain else operands.conditions,
                max_scores=PLAIN_CHECKED_SCORES if is_plain else limit,
                offset=case.problem().causal_offset,
            )
        entry.reference = references[is_plain]


def _first_run(entry: _Entry, case: Case, inputs: Sequence[Operands]) -> None:
    """Binds a provider and runs it once, unmeasured; fills in calls, kernel, errors and failure."""
    provider = entry.provider
    assert entry.reference is not None
    try:
        with collected_warnings() as warned, provider.context():
            entry.calls = [provider.bind(case, operands) for operands in inputs]
            if provider.family is None:
                out, lse = entry.calls[0](), None
            else:
                entry.kernel = kernel_name(provider, case, inputs[0])
                out, lse = with_lse(provider, case, inputs[0])
        if provider.family is not None or not case.p_dropout:
            entry.errors = entry.reference.check(out, lse, every_element=provider.every_element)
    except Exception as error:
        entry.failure = describe_failure(error, warned)
        _release_memory(inputs[0].qkv.q.device)
    else:
        if provider.family is not None and entry.errors and entry.errors.violation:
            entry.failure = f"wrong: {entry.errors.violation}"
        elif entry.errors and entry.errors.max_err_out > ANOTHER_PROBLEM * entry.reference.largest:
            entry.failure = f"wrong: max error of O {entry.errors.max_err_out:.3g}: not this problem's answer"


def _contestant(entry: _Entry) -> Contestant:
    calls = entry.calls
    return Contestant(lambda index: calls[index](), entry.provider.context, len(calls))


def _recheck(entry: _Entry, contestant: Contestant) -> None:
    """Checks what the timed calls left behind: the first set against the reference, the others for NaN."""
    errors = None
    if entry.errors is not None and entry.reference is not None:
        every_element = entry.provider.every_element
        errors = entry.reference.check(contestant.outputs[0], None, every_element=every_element)
        worst = max(entry.errors.max_err_out, errors.max_err_out)
        entry.errors = dataclasses.replace(entry.errors, max_err_out=worst)
    unwritten = sum(bool(out.isnan().any()) for out in contestant.outputs.values())
    if unwritten:
        entry.failure = f"wrong: {unwritten} of {len(contestant.outputs)} timed outputs hold NaN"
    elif entry.provider.family is not None and errors is not None and errors.violation:
        entry.failure = f"wrong: in the timed run, {errors.violation}"


def _check_floor(entry: _Entry, case: Case, visible: float, settings: Settings) -> None:
    """Fills in the floor, and makes a time below it a failure."""
    if settings.ceilings is None or entry.input_sets is None:
        return
    provider = entry.provider
    entry.floor_us = settings.ceilings.floor_us(
        case,
        entry.input_sets,
        visible=1.0 if provider.is_plain else visible,
        is_quantised=provider.is_quantised,
    )
    time_us = entry.timing.gpu_us
    if time_us is not None and time_us < entry.floor_us and entry.failure is None:
        entry.failure = f"{INVALID}: {time_us:.4g} us, below the hardware's floor of {entry.floor_us:.4g} us"


def _time_wall(
    entries: dict[str, _Entry],
    contestants: dict[str, Contestant],
    loops: int,
    failed: Callable[[str, Exception], None],
) -> None:
    """Times what is over quickly once more as Python sees it; the outputs have been checked before."""
    small = {
        name: contestant
        for name, contestant in contestants.items()
        if entries[name].failure is None and (entries[name].timing.gpu_us or math.inf) < SMALL_US
    }
    timings = time_wall(
        {name: contestant.run for name, contestant in small.items()},
        {name: contestant.context for name, contestant in small.items()},
        loops=loops,
        failed=failed,
    )
    for name, timing in timings.items():
        entries[name].wall = timing


def _row(case: Case, settings: Settings, entry: _Entry, visible: float, computed: float = 1.0) -> Row:
    """`computed`: the share of the plain problem's operations that this provider's problem needs."""
    timing, errors = entry.timing, entry.errors
    time_us = timing.gpu_us if settings.device.type == "cuda" else timing.wall_us
    note = f"ok ({timing.note})" if timing.note else "ok"
    wall = entry.wall
    return Row(
        suite=case.suite,
        batch=case.batch,
        num_heads_q=case.num_heads_q,
        num_heads_kv=case.num_heads_kv,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        head_dim=case.head_dim,
        dtype=case.dtype or settings.dtype,
        causal=case.causal,
        alignment=case.alignment.value,
        mask=case.mask,
        p_dropout=case.p_dropout,
        visible=round(visible, 4),
        provider=entry.provider.name,
        kernel=entry.kernel,
        gpu_us=_rounded(timing.gpu_us),
        gpu_us_spread=_rounded(timing.gpu_us_spread),
        wall_us=_rounded(wall.queue_us if wall else timing.wall_us),
        wall_us_spread=_rounded(wall.queue_us_spread) if wall else None,
        loop_us=_rounded(wall.loop_us) if wall else None,
        floor_us=_rounded(entry.floor_us),
        input_sets=entry.input_sets,
        tflops=_rounded(computed * case.flops / time_us / 1e6) if time_us else None,
        max_err_out=_rounded(errors.max_err_out) if errors else None,
        max_err_lse=_rounded(errors.max_err_lse) if errors else None,
        bound_out=_rounded(errors.bound_out) if errors else None,
        status=entry.failure or note,
    )


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more than any measurement here deserves."""
    return None if value is None else float(f"{value:.5g}")


def _release_memory(device: torch.device) -> None:
    """Gives cached memory back, so that what failed for lack of it does not take the others along."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
