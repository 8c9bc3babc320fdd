"""Random problems against float64 on the device, for as long as there is time: tests/kernels/test_fuzz.py's
recipes for general kernels, and for plain and piped ones problems of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Causal
from tests.gpu_report.context import Context, check
from tests.kernels.general import Case
from tests.kernels.general_numerics import case_violations, check_case, expected
from tests.kernels.harness import HOST_THREADS, TestedKernel, random_inputs, run_kernel
from tests.kernels.numerics import half_ulp
from tests.kernels.test_fuzz import Recipe, recipes

_BATCH = 100


@dataclass(frozen=True, kw_only=True)
class PlainRecipe:
    """A problem for a kernel without masks and lengths."""

    kernel: KernelInfo
    batch: int
    heads_kv: int
    heads_per_group: int
    rows: int
    keys: int
    causal: Causal | None
    scale: float | None
    bshd: bool
    with_lse: bool
    seed: int


@st.composite
def plain_recipes(draw: st.DrawFn, rows_of_registry: list[KernelInfo]) -> PlainRecipe:
    kernel = draw(st.sampled_from(rows_of_registry))
    alignments = TestedKernel("cpu", kernel).alignments
    return PlainRecipe(
        kernel=kernel,
        batch=draw(st.integers(1, 3)),
        heads_kv=draw(st.integers(1, 2)),
        heads_per_group=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 20) | st.integers(1, 2 * kernel.block_m + 20)),
        keys=draw(st.integers(1, 20) | st.integers(1, 4 * kernel.block_n + 20)),
        causal=draw(st.sampled_from(alignments)),
        scale=draw(st.none() | st.sampled_from([0.0, -0.3, 0.5])),
        bshd=draw(st.booleans()),
        with_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def half_logits_violations(case: Case, out: torch.Tensor) -> str:
    """The rule for the piped baseline without softmax_lse, whose logits are fp16; empty when it holds.

    Rounding a score S costs it 2^-11 |S|, and a weight twice that with its sum; rounding P costs 2^-11 of it,
    and rounding O half a unit in the last place.
    """
    ref = expected(case)
    relative = 2.0**-11 * (1 + 2 * ref.largest_score) + 2.0**-20
    bound = half_ulp(torch.maximum(ref.out.abs(), out.double().abs()), out.dtype) + relative * ref.weight
    bad = ~((out.double() - ref.out).abs() <= bound + 1e-5)
    return f"{int(bad.sum())} of {bad.numel()} elements beyond what fp16 logits cost" if bad.any() else ""


def run_recipe(device: str, recipe: Recipe | PlainRecipe) -> None:
    """Raises AssertionError when the numerics rule is broken."""
    kernel = TestedKernel(device, recipe.kernel, getattr(recipe, "num_splits", 0))
    if device == "cpu":
        kernel.library.host_configure(schedule_seed=recipe.seed, num_threads=HOST_THREADS)
    if isinstance(recipe, Recipe):
        check_case(
            kernel,
            recipe.case(kernel),
            with_lse=recipe.with_lse,
            bshd=recipe.bshd,
            spare_columns=recipe.spare_columns,
        )
        return
    inputs = random_inputs(
        kernel,
        recipe.rows,
        recipe.keys,
        batch=recipe.batch,
        heads=recipe.heads_kv * recipe.heads_per_group,
        heads_kv=recipe.heads_kv,
        bshd=recipe.bshd,
        seed=recipe.seed,
    )
    out, lse = run_kernel(
        kernel,
        inputs,
        causal=recipe.causal,
        scale=recipe.scale,
        with_lse=recipe.with_lse,
        bshd=recipe.bshd,
    )
    case = Case(q=inputs.q, k=inputs.k, v=inputs.v, causal=recipe.causal, scale=recipe.scale)
    has_half_logits = kernel.info.family is Family.UNFUSED and lse is None
    broken = half_logits_violations(case, out) if has_half_logits else case_violations(case, out, lse)
    assert not broken, f"{kernel.info.name}, {case}: {broken}"


@check
def soak(context: Context) -> None:
    """Exact kernels of attention."""
    rows = context.rows()
    general = [row for row in rows if row.is_general]
    plain = [row for row in rows if not row.is_general]
    drawn = st.one_of([recipes(general)] * 2 * bool(general) + [plain_recipes(plain)] * bool(plain))
    try_problems(context, drawn, lambda recipe: run_recipe(context.device, recipe))


def try_problems(context: Context, drawn: st.SearchStrategy[Any], run: Callable[[Any], None]) -> None:
    """`examples` random problems, each with a `kernel`; a failure names the simplest one that still fails.

    They are drawn in batches, the first from `seed`, each next one from a seed that is 1000 higher.
    """
    kernels: set[str] = set()

    def one(recipe: Any) -> None:
        if context.time_is_up:
            return
        run(recipe)
        kernels.add(recipe.kernel.name)
        context.numbers["problems"] += 1

    batch = 0
    while context.numbers["problems"] < context.examples and not context.time_is_up:
        count = min(_BATCH, context.examples - context.numbers["problems"])
        _draw(one, drawn, count, context.seed + 1000 * batch)
        batch += 1
    context.numbers["batches"] += batch
    context.keep_largest("kernels met by one process", len(kernels))
    done = context.numbers["problems"]
    if done < context.examples:
        context.fail(f"only {done} of {context.examples} problems were tried before the time was up")


def _draw(test: Callable[[Any], None], recipe: st.SearchStrategy[Any], count: int, first: int) -> None:
    chosen = settings(
        max_examples=count,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    chosen(seed(first)(given(recipe=recipe)(test)))()
