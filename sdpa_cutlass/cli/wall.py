"""Wall time of a call from Python, where the GPU is done sooner than Python: what a launch costs its caller.

wall_us   time that the calling thread needs until a call returns, with the work queued and not waited for
loop_us   time per call of a loop of calls with one synchronisation at its end: the larger of what Python and
          what the GPU needs, where calls do not depend on each other

Both are medians over loops of LOOP_CALLS calls, few enough for the GPU's queue never to be full; the
contestants take turns loop by loop. The spread of wall_us is half the distance between its 10th and its 90th
percentile. Only calls that the GPU finishes within SMALL_US are timed so: for longer ones Python's share is
hidden behind the GPU's.

The rows of suite `wall` are of the ways to call this library at the mission shape, next to torch's:

    plan_run       AttentionPlan.run, planned before
    attention_out  attention(q, k, v, out=out)
    sdpa           scaled_dot_product_attention(q, k, v), which allocates its result
    plan_make      plan(q, k, v, out=out), which launches nothing
    torch_default  torch.nn.functional.scaled_dot_product_attention, torch's own choice of backend
    torch_flash, torch_cudnn  the same, held to one backend
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import sdpa_cutlass
from sdpa_cutlass.cli import providers, suites
from sdpa_cutlass.cli.accuracy import Reference, make_reference
from sdpa_cutlass.cli.inputs import QKV, random_qkv, torch_dtype
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.timing import spread

if TYPE_CHECKING:
    import torch

SUITE = "wall"
LOOPS = 40
LOOP_CALLS = 50
SMALL_US = 100.0
TORCH = ("torch_default", "torch_flash", "torch_cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WallTiming:
    """Microseconds per call, as the head of this file defines them."""

    queue_us: float
    queue_us_spread: float
    loop_us: float


def time_wall(
    run: Mapping[str, Callable[[int], object]],
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    *,
    loops: int,
    failed: Callable[[str, Exception], None],
) -> dict[str, WallTiming]:
    """Times `run[name](calls)`, which makes so many calls, inside its context; the first loop warms up.

    One that raises is reported to `failed` and drops out.
    """
    import torch

    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in run}
    for number in range(loops + 1):
        for name in list(samples):
            try:
                with contexts[name]():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    run[name](LOOP_CALLS)
                    queued = time.perf_counter()
                    torch.cuda.synchronize()
                    done = time.perf_counter()
            except Exception as error:
                failed(name, error)
                del samples[name]
                continue
            if number:
                scale = 1e6 / LOOP_CALLS
                samples[name].append((scale * (queued - start), scale * (done - start)))
    return {name: _timing(found) for name, found in samples.items() if found}


def _timing(samples: list[tuple[float, float]]) -> WallTiming:
    queued = [sample[0] for sample in samples]
    return WallTiming(
        queue_us=statistics.median(queued),
        queue_us_spread=spread(queued),
        loop_us=statistics.median(sample[1] for sample in samples),
    )


@dataclasses.dataclass(frozen=True)
class _Caller:
    """A way to call: `call()` computes into, or returns, what `output()` then finds (None: nothing)."""

    call: Callable[[], object]
    out: torch.Tensor | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def run(self, calls: int) -> None:
        """Makes so many calls, with nothing else in the loop."""
        call = self.call
        for _ in range(calls):
            call()

    def output(self) -> torch.Tensor:
        """The output of one more call; a given `out` holds NaN before."""
        if self.out is not None:
            self.out.fill_(float("nan"))
        with self.context():
            result: Any = self.call()
        return self.out if self.out is not None else result


def cases() -> list[Case]:
    """The mission's problems, as suite `wall`."""
    return [dataclasses.replace(case, suite=SUITE) for case in suites.mission()]


def measure(case: Case, dtype: str, device: torch.device, *, seed: int, loops: int = LOOPS) -> list[Row]:
    """The rows of one problem in every way to call it; each is checked before and after it is timed."""
    qkv = random_qkv(case, dtype=torch_dtype(dtype), device=device, seed=seed)
    reference = make_reference(qkv, causal=case.causal, seed=seed)
    failures: dict[str, str] = {}

    def failed(name: str, error: Exception) -> None:
        failures[name] = providers.describe_failure(error)

    callers: dict[str, _Caller] = {}
    for name, make in _makers(case, qkv).items():
        try:
            callers[name] = make()
        except Exception as error:
            failed(name, error)
    errors: dict[str, float] = {}
    _check(callers, reference, failures, errors)
    able = {name: caller for name, caller in callers.items() if name not in failures}
    contexts = {name: caller.context for name, caller in able.items()}
    timings = time_wall({name: able[name].run for name in able}, contexts, loops=loops, failed=failed)
    _check(able, reference, failures, errors)
    return [
        _row(case, dtype, name, timings.get(name), errors.get(name), failures.get(name))
        for name in _makers(case, qkv)
    ]


def _makers(case: Case, qkv: QKV) -> dict[str, Callable[[], _Caller]]:
    """What makes each caller; making one may fail."""
    import torch

    causal = case.problem().causal
    out = torch.empty_like(qkv.q)

    def plan_run() -> _Caller:
        planned = sdpa_cutlass.plan(*qkv, causal=causal, out=out)
        run, (q, k, v) = planned.run, qkv
        return _Caller(lambda: run(q, k, v, out), out)

    def attention_out() -> _Caller:
        attention, (q, k, v) = sdpa_cutlass.attention, qkv
        return _Caller(lambda: attention(q, k, v, causal=causal, out=out), out)

    def sdpa() -> _Caller:
        function, (q, k, v), is_causal = sdpa_cutlass.scaled_dot_product_attention, qkv, case.causal
        return _Caller(lambda: function(q, k, v, is_causal=is_causal))

    def plan_make() -> _Caller:
        plan, (q, k, v) = sdpa_cutlass.plan, qkv
        return _Caller(lambda: plan(q, k, v, causal=causal, out=out))

    def torch_call(name: str) -> Callable[[], _Caller]:
        def make() -> _Caller:
            from torch.nn.functional import scaled_dot_product_attention

            (q, k, v), is_causal = qkv, case.causal
            known = providers.ALL.get(name)
            return _Caller(
                lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal),
                context=known.context if known else contextlib.nullcontext,
            )

        return make

    own = {"plan_run": plan_run, "attention_out": attention_out, "sdpa": sdpa, "plan_make": plan_make}
    return own | {name: torch_call(name) for name in TORCH}


def _check(
    callers: Mapping[str, _Caller], reference: Reference, failures: dict[str, str], errors: dict[str, float]
) -> None:
    """One call of each: its largest error goes to `errors`, what is wrong with it to `failures`."""
    for name, caller in callers.items():
        if name in failures or name == "plan_make":  # which computes nothing
            continue
        try:
            found = reference.check(caller.output(), None)
        except Exception as error:
            failures[name] = providers.describe_failure(error)
            continue
        errors[name] = max(found.max_err_out, errors.get(name, 0.0))
        if found.violation is not None and name not in TORCH:
            failures[name] = f"wrong: {found.violation}"


def _row(
    case: Case, dtype: str, name: str, timing: WallTiming | None, error: float | None, failure: str | None
) -> Row:
    def rounded(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return Row(
        suite=case.suite,
        batch=case.batch,
        num_heads_q=case.num_heads_q,
        num_heads_kv=case.num_heads_kv,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        head_dim=case.head_dim,
        dtype=dtype,
        causal=case.causal,
        mask=case.mask,
        p_dropout=case.p_dropout,
        visible=1.0,
        provider=name,
        wall_us=rounded(timing.queue_us) if timing else None,
        wall_us_spread=rounded(timing.queue_us_spread) if timing else None,
        loop_us=rounded(timing.loop_us) if timing else None,
        input_sets=1,
        max_err_out=rounded(error),
        status=failure or "ok",
    )
