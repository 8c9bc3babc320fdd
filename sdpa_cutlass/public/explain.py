"""Which kernel would run, and why: every kernel with its refusal or its cost, and the one that is chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..call import binding, extras, operands, shard
from ..call.arguments import Inputs, Options
from ..call.launch import library_for, make_params
from ..call.operands import Layout, is_loadable, loadable
from ..call.precision import asked_of
from ..choice.break_even import SEQLENS, break_even
from ..choice.select import Candidate, Choice, candidates, choose, ranking
from ..errors import ArgumentError
from ..library.device import L4, RTX_4090, DeviceInfo
from ..library.registry import Family, Precision
from ..problem import Causal, Problem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. `str()` is a table: legal kernels cheapest first, then the refused ones.

    `copies`: the arguments that a call copies before the kernel runs, with the reason. Where a precision was
    asked for, `exact_us` is predicted for the call without it, NaN where no kernel takes that; `pays_from`
    says for this device, an L4 and an RTX 4090 from how many queries and keys on the precision should be
    faster: a prediction, None where it never is.
    """

    problem: Problem
    device: DeviceInfo
    library: Path
    choice: Choice
    candidates: tuple[Candidate, ...]
    copies: tuple[str, ...] = ()
    exact_us: float = math.nan
    pays_from: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def predicted_us(self) -> float:
        """Microseconds of the chosen kernel by its family's cost model, at the clock that models count with.

        NaN where it is none of the legal candidates (named by the caller for another GPU).
        """
        chosen = self.choice.kernel
        costs = (one.estimate for one in self.candidates if one.kernel.index == chosen.index)
        return next((cost.microseconds for cost in costs if cost is not None), math.nan)

    def __str__(self) -> str:
        lines = [
            f"{self.problem}",
            f"device   {self.device.name}, {self.device.sms} SMs",
            f"library  {self.library}",
            f"chosen   {self.choice.kernel.name} ({self.choice.reason})",
            f"it is    {self.choice.kernel.accuracy}, code for {self.choice.kernel.code}",
            *(f"copied   {text}" for text in self.copies),
            f"model    {self.predicted_us:.4g} us on {self.device.name}, a prediction of its cost model",
            *self._next_to_exact(),
            "",
        ]
        width = max(len(candidate.kernel.name) for candidate in self.candidates)
        lines.append(f"  {'kernel':{width}}  {'CTAs':>7} {'waves':>7} {'useful':>7} {'model us':>9}  verdict")
        others: Counter[str] = Counter()
        for candidate in self.candidates:
            kernel = candidate.kernel
            cost, verdict = candidate.estimate, candidate.refusal or "legal"
            if cost is None:
                others[verdict.split("; ")[0]] += 1
                continue
            mark = "*" if kernel is self.choice.kernel else " "
            numbers = f"{cost.ctas:7} {cost.waves:7.2f} {cost.useful:7.0%} {cost.microseconds:9.2f}"
            lines.append(f"{mark} {kernel.name:{width}}  {numbers}  {verdict}")
        lines += [
            f"  {count} {'kernel' if count == 1 else 'kernels'} refused: {reason}"
            for reason, count in others.items()
        ]
        return "\n".join(lines)

    def _next_to_exact(self) -> list[str]:
        if not self.pays_from:
            return []
        lines = [f"exact    {self.exact_us:.4g} us without a precision, a prediction"]
        for card, length in self.pays_from.items():
            where = f"at no length up to {SEQLENS[-1]}" if length is None else f"from {length} on"
            lines.append(f"faster   {where}, with as many queries as keys, on {card}: a prediction")
        return lines


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: Causal | str | None = None,
    scale: float | None = None,
    p_dropout: float = 0.0,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    layout: Layout | str = "bhsd",
    enable_gqa: bool = True,
    kernel: str | None = None,
    family: Family = Family.FMHA_FWD,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    precision: Precision | str | None = None,
    row_offset: int | None = None,
    key_offset: int | None = None,
) -> Explanation:
    """The choice that `attention` (or, for Family.UNFUSED, `unfused_attention`) would make. Launches nothing.

    Takes their arguments and raises their errors; shapes as there. Not for problems without any score to
    compute.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    print(sdpa_cutlass.explain(q, k, v, causal="top_left"))
    ```
    """
    if row_offset is not None or key_offset is not None:
        causal = shard.word(causal, row_offset, key_offset)
    asked = asked_of(precision, family)
    options = Options(asked, causal, scale, enable_gqa, kernel, False, p_dropout, layout, window)
    inputs = Inputs(query, key, value, None, attn_mask, seqlens_q, seqlens_k, sinks=sinks)
    operands, problem, softmax_scale, given, _ = binding.bind(options, inputs)
    if problem.is_empty:
        raise ArgumentError(f"{problem} runs no kernel: its result is empty or zero")
    native, device = library_for(operands.query)
    q, k, v = (loadable(tensor) for tensor in (operands.query, operands.key, operands.value))
    out = v if problem.head_dim_v != problem.head_dim else q
    params = make_params(problem, softmax_scale, q, k, v, out, None, given)
    choice = choose(native, problem, asked, device, params, name=kernel)
    found = candidates(native, problem, asked, device, params)
    copies = _copies(operands, given.mask, choice.kernel.family)
    exact_us, pays_from = math.nan, {}
    if isinstance(asked, Precision):
        exact = ranking(native, problem, Family.FMHA_FWD, device)
        exact_us = exact[0][1].microseconds if exact else math.nan
        cards = {card.name: card for card in (device, L4, RTX_4090)}
        pays_from = {name: break_even(native, problem, asked, card) for name, card in cards.items()}
    return Explanation(problem, device, native.path, choice, tuple(found), copies, exact_us, pays_from)


def _copies(operands: operands.Operands, mask: torch.Tensor | None, family: Family) -> tuple[str, ...]:
    """What kernels of `family` do not take, or not take well, as it lies in memory."""
    found = [
        f"{name}, with strides {tensor.stride()}: kernels load 16 bytes of a row at a time"
        for name, tensor in zip(("query", "key", "value"), operands[:3], strict=True)
        if not is_loadable(tensor)
    ]
    if mask is not None and extras.needs_dense_copy(mask, family):
        why = "neighbouring keys are no neighbours in memory"
        if mask.stride(3) == 1:
            why = "rows do not begin where kernels can read several keys at once"
        found.append(
            f"attn_mask, with strides {mask.stride()}: {why}; what it broadcasts over is not written out"
        )
    return tuple(found)
