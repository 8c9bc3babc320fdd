"""A call whose signature is not known yet: canonical form (binding.py) → kernel → plan → launch.

`execute` runs it; `prepare` keeps what the next call of the same signature can use (see calls.py).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choice.select import choose
from ..dropout import PhiloxState
from ..problem import MASK_ALIGNMENT
from . import extras, outputs, rng
from .arguments import Inputs, Options
from .binding import Bound
from .launch import Plan, library_for, make_params
from .operands import is_virtual, loadable

if TYPE_CHECKING:
    import torch


class Executed(NamedTuple):
    """Canonical outputs. `plan` is None when nothing was launched, or on copies of operands or of out.

    copies_mask: `plan` takes masks as `extras.dense_copy` makes them.
    """

    out: torch.Tensor
    softmax_lse: torch.Tensor | None
    philox: PhiloxState | torch.Tensor
    plan: Plan | None
    copies_mask: bool = False


class Prepared(NamedTuple):
    """A plan, and how its results look to the caller.

    Without `out_stride`, out is laid out as query is. `make_lse` has a tensor without elements, which has no
    memory: plans outlive calls, and what outlives a call must not lie in the memory pool of a CUDA graph.
    """

    plan: Plan
    empty_like: Callable[..., torch.Tensor]  # torch's; finding it by name would cost 0.1 µs more
    make_lse: Callable[[], torch.Tensor] | None
    out_stride: tuple[int, ...] | None
    out_shape: tuple[int, ...]
    p_dropout: float
    casts_mask: bool  # under torch.autocast
    spans: tuple[int, int, int, int]  # of query, key, value and out, in bytes; 0 unless the caller gave out
    copied_mask: tuple[int, ...] | None  # [B, Hq, Sq, Sk] of a mask of which each call makes a dense copy


def execute(bound: Bound, options: Options, out: torch.Tensor | None, philox: Any) -> Executed:
    """Chooses a kernel and runs it. `out`, if given, is the caller's and was checked; `philox` was not."""
    operands, problem, _, given, drops_everything = bound
    query = operands.query
    result = outputs.empty_out(operands) if out is None else operands.canonical_out(out)
    lse = outputs.empty_lse(operands) if options.return_lse else None
    if problem.is_empty:  # no keys, or no rows
        if out is None or given.cu_seqlens_q is None:  # else rows of no sequence, which stay as they are
            result.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
            if given.sinks is not None:
                lse.copy_(given.sinks[:, None])
        return Executed(result, lse, random_bits(philox, 0.0, query), None)
    q, k, v = map(loadable, operands[:3])
    written = result
    if problem.head_dim_v != operands.head_dim_v:
        written = result.new_empty((*result.shape[:3], problem.head_dim_v))
    plan, mask, copies_mask = None, given.mask, False
    if mask is not None and extras.needs_dense_copy(mask):
        copies_mask = True
        if mask.stride(3) == 1:  # it may suit the kernel that takes it
            plan = make_plan(bound, options, q, k, v, written, lse)
            copies_mask = extras.needs_dense_copy(mask, plan.kernel.family)
        if copies_mask:
            given, plan = given._replace(mask=extras.dense_copy(mask)), None
            bound = bound._replace(given=given)
    plan = plan or make_plan(bound, options, q, k, v, written, lse)
    state = random_bits(philox, given.p_dropout, query)
    plan.launch(q, k, v, written, lse, given._replace(philox=state) if given.p_dropout else None)
    if written is not result:
        result.copy_(written[..., : operands.head_dim_v])
    if drops_everything:
        result.zero_()
    is_in_place = q is query and k is operands.key and v is operands.value and written is result
    return Executed(result, lse, state, plan if is_in_place and not drops_everything else None, copies_mask)


def make_plan(
    bound: Bound,
    options: Options,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Plan:
    """The chosen kernel, bound to tensors like these. They are canonical and loadable."""
    problem, given = bound.problem, bound.given
    native, device = library_for(query)
    params = make_params(problem, bound.scale, query, key, value, out, lse, given)
    choice = choose(native, problem, options.family, device, params, name=options.kernel)
    params.num_splits = choice.num_splits
    return Plan(native, choice.kernel, problem, params, device)


def prepare(
    executed: Executed, inputs: Inputs, bound: Bound, out: torch.Tensor, lse: torch.Tensor | None
) -> Prepared | None:
    """What serves the next call of the same signature; `out` and `lse` are as the caller sees them.

    None where copies were made, so that a plan would have to make them too, but for those of masks.
    """
    operands, mask = bound.operands, bound.given.mask
    copied_mask = None
    if executed.copies_mask:
        assert mask is not None
        if operands.rank > 4 or mask.data_ptr() % MASK_ALIGNMENT:  # else strides alone ask for the copy
            return None
        copied_mask = tuple(mask.shape)
    if executed.plan is None:
        return None
    if lse is not None and is_virtual(lse):  # made in a mode of torch's, such as FakeTensorMode
        return None
    if (
        _is_apart(inputs.query, operands.query)
        or _is_apart(inputs.key, operands.key)
        or _is_apart(inputs.value, operands.value)
        or _is_apart(inputs.attn_mask, mask)
    ):
        return None
    empty_like = sys.modules["torch"].empty_like
    is_like_query = out.shape == inputs.query.shape and (
        # New memory has no gaps: with query's strides, it is as empty_like makes it.
        (inputs.out is None and out.stride() == inputs.query.stride())
        or out.stride() == empty_like(inputs.query).stride()
    )
    return Prepared(
        plan=executed.plan,
        empty_like=empty_like,
        make_lse=None if lse is None else _maker_of(lse),
        out_stride=None if is_like_query else out.stride(),
        out_shape=tuple(out.shape),
        p_dropout=bound.given.p_dropout,
        casts_mask=mask is not None and mask.is_floating_point() and mask.dtype != inputs.query.dtype,
        spans=(0, 0, 0, 0)
        if inputs.out is None
        else (
            outputs.span(inputs.query),
            outputs.span(inputs.key),
            outputs.span(inputs.value),
            outputs.span(out),
        ),
        copied_mask=copied_mask,
    )


def _is_apart(given: Any, canonical: Any) -> bool:
    """Whether the canonical form of a given tensor is in other memory."""
    return given is not canonical and given.data_ptr() != canonical.data_ptr()


def _maker_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors like `tensor`, as fast as torch can: without a dtype to read."""
    without_memory = tensor.new_empty(0)
    return functools.partial(without_memory.new_empty_strided, tuple(tensor.shape), tensor.stride())


def random_bits(philox: Any, p_dropout: float, query: torch.Tensor) -> PhiloxState | torch.Tensor:
    """What dropout takes its random bits from: as given, else drawn, else (0, 0) because none are needed."""
    if philox is not None:
        return rng.checked(philox, query)
    return rng.draw(query.device) if p_dropout else rng.NO_PHILOX
