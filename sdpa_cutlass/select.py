"""Problem → kernel: which are legal, then a measured row for this GPU (tuned_table.py), then the cost model.

`SDPA_CUTLASS_FORCE_KERNEL=<glob>` narrows the choice to the kernels whose names match. It is read once, at
the first choice of the process, and leaves a family alone when only names of the other one match. General
kernels come behind the plain ones that can run a problem: they are slower, and are only needed by problems
with a mask, dropout, lengths or a head_dim of their own. Split kernels compete with the plain ones where they
have something to gain: query heads to pack or keys to share out. Rankings and measured rows are cached for
each problem and device; whether the library accepts the strides at hand is asked anew for every signature.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._c_api import Library, Params
from .cost_model import Estimate, estimate
from .device import DeviceInfo
from .errors import ArgumentError, NoKernelError
from .problem import Problem
from .registry import Family, KernelInfo, read_kernels

if TYPE_CHECKING:
    from .tuned_table import TunedRow

FORCE_VARIABLE = "SDPA_CUTLASS_FORCE_KERNEL"
_NEAREST = 5  # refused kernels that an error lists


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that runs, and why it."""

    kernel: KernelInfo
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel beside one problem: `refusal` says why it is not legal, `estimate` what it should cost."""

    kernel: KernelInfo
    refusal: str | None
    estimate: Estimate | None


def mismatches(kernel: KernelInfo, problem: Problem) -> list[str]:
    """What the registry row alone says against running `problem`; empty when nothing does."""
    found = []
    if not kernel.is_general and kernel.head_dim != problem.head_dim:
        found.append(f"head_dim is {kernel.head_dim}, not {problem.head_dim}")
    if kernel.head_dim < max(problem.head_dim, problem.head_dim_v) and kernel.is_general:
        found.append(f"head_dim is at most {kernel.head_dim}")
    if kernel.dtype is not problem.dtype:
        found.append(f"dtype is {kernel.dtype.value}, not {problem.dtype.value}")
    if not kernel.is_general:
        if kernel.is_causal != problem.is_causal:
            found.append("is causal" if kernel.is_causal else "is not causal")
        if problem.head_dim_v != problem.head_dim:
            found.append("value's head_dim is query's")
        if problem.has_lengths:
            found.append("takes no lengths")
    if problem.mask is not None and problem.mask not in kernel.mask_types:
        found.append("takes no bias" if kernel.mask_types else "takes no mask")
    if kernel.has_dropout != problem.has_dropout:
        found.append("applies dropout" if kernel.has_dropout else "applies no dropout")
    return found


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured choice: its row, the name of the table, and how many octaves away it was measured."""

    row: TunedRow
    table: str
    distance: float

    def __str__(self) -> str:
        text = f"tuned table {self.table}: {self.row.gpu_ns / 1e3:.2f} µs at {self.row.bucket}"
        return text + (f", {self.distance:.2f} octaves from here" if self.distance else "")


_tuned: dict[tuple[Library, Problem, DeviceInfo], Tuned | None] = {}


def tuned_kernel(library: Library, problem: Problem, device: DeviceInfo) -> Tuned | None:
    """The fused kernel that was measured to be the fastest nearby; None without a table or a row near enough.

    The first call reads the tuned table, and warns when there is one that cannot be used.
    """
    key = (library, problem, device)
    try:
        return _tuned[key]
    except KeyError:
        pass
    from .tuned_lookup import tables_for  # nothing of it is needed before the first choice
    from .tuned_table import bucket_of

    found = None
    tables = tables_for(library, device)
    if tables is not None:
        bucket = bucket_of(problem, tables.head_dims)
        nearest = tables.nearest(bucket) if bucket is not None else None
        if nearest is not None:
            found = Tuned(nearest[0], tables.path.name, nearest[1])
    if len(_tuned) >= _MAX_RANKINGS:
        _tuned.clear()
    _tuned[key] = found
    return found


_rankings: dict[tuple[Library, Problem, Family, DeviceInfo], tuple[tuple[KernelInfo, Estimate], ...]] = {}
_MAX_RANKINGS = 4096


def ranking(
    library: Library, problem: Problem, family: Family, device: DeviceInfo
) -> tuple[tuple[KernelInfo, Estimate], ...]:
    """The kernels whose rows fit `problem`, the cheapest by the cost model first, plain ones before general.

    May be empty.
    """
    key = (library, problem, family, device)
    found = _rankings.get(key)
    if found is None:
        legal = [
            (kernel, estimate(kernel, problem, device))
            for kernel in read_kernels(library)
            if kernel.family is family and not mismatches(kernel, problem)
        ]
        has_plain = any(not kernel.is_general for kernel, _ in legal)
        found = tuple(sorted(legal, key=lambda pair: order(pair[0], pair[1], problem, has_plain=has_plain)))
        if len(_rankings) >= _MAX_RANKINGS:
            _rankings.clear()
        _rankings[key] = found
    return found


def order(
    kernel: KernelInfo, cost: Estimate, problem: Problem, *, has_plain: bool
) -> tuple[bool, float, str]:
    """Sorts a ranking. With plain kernels in it, general ones are behind, unless splitting has a gain."""
    gains = cost.num_splits > 1 or (kernel.is_split and problem.num_heads_q > problem.num_heads_kv)
    return has_plain and kernel.is_general and not gains, cost.cycles, kernel.name


def choose(
    library: Library,
    problem: Problem,
    family: Family,
    device: DeviceInfo,
    params: Params,
    *,
    name: str | None = None,
    has_workspace: bool = True,
) -> Choice:
    """The kernel of `family` for `problem` with the strides and addresses of `params`.

    Writes num_splits of `params`, as the kernel needs it. With `name`, that very kernel. Without a workspace,
    no CTAs share a tile, and what is fast only if they do comes last. Raises ArgumentError for an unknown
    name, NoKernelError when none is legal.
    """
    if name is not None:
        kernel = _named(library, problem, family, device, params, name)
        if not has_workspace:
            params.num_splits = min(params.num_splits, 1)
        return Choice(kernel, "named by the caller")
    pattern = forced_pattern()
    forced = _forced(library, family, pattern) if pattern else None
    legal = ranking(library, problem, family, device)
    if forced is not None:
        legal = tuple(pair for pair in legal if pair[0].name in forced)
    tuned = None
    if forced is None and family is Family.FMHA_FWD:
        tuned = tuned_kernel(library, problem, device)
    fastest = tuned.row.kernel if tuned is not None else None

    def place(pair: tuple[KernelInfo, Estimate]) -> tuple[bool, bool]:
        return not has_workspace and pair[1].num_splits > 1, pair[0].name != fastest

    for kernel, cost in sorted(legal, key=place):
        params.num_splits = cost.num_splits if has_workspace else min(cost.num_splits, 1)
        if library.refusal(kernel.index, params) is None:
            if forced is not None:
                return Choice(kernel, f"{FORCE_VARIABLE}={pattern}")
            return Choice(kernel, str(tuned) if kernel.name == fastest else "cost model")
    pool = [kernel for kernel in read_kernels(library) if kernel.family is family]
    what = f"no {family.value} kernel can run {problem}"
    if forced is not None:
        pool = [kernel for kernel in pool if kernel.name in forced]
        what = f"{FORCE_VARIABLE}={pattern}: none of the {len(pool)} kernels that match can run {problem}"
    raise NoKernelError(f"{what}.\n{_nearest(library, pool, problem, device, params)}")


def candidates(
    library: Library, problem: Problem, family: Family, device: DeviceInfo, params: Params
) -> list[Candidate]:
    """Every kernel of `family`: the legal ones in the order of `ranking`, then the others, nearest first."""
    ranked = ranking(library, problem, family, device)
    estimates = {kernel.index: cost for kernel, cost in ranked}
    has_plain = any(not kernel.is_general for kernel, _ in ranked)
    found = [
        Candidate(kernel, refusal(library, kernel, problem, device, params), estimates.get(kernel.index))
        for kernel in read_kernels(library)
        if kernel.family is family
    ]

    def placed(candidate: Candidate) -> tuple[bool, int, tuple[bool, float, str]]:
        kernel = candidate.kernel
        if candidate.refusal is not None or candidate.estimate is None:
            return True, _distance(kernel, problem), (False, 0.0, "")
        return False, 0, order(kernel, candidate.estimate, problem, has_plain=has_plain)

    return sorted(found, key=placed)


def refusal(
    library: Library, kernel: KernelInfo, problem: Problem, device: DeviceInfo, params: Params
) -> str | None:
    """Why `kernel` cannot run this problem, or None. Writes num_splits of `params`."""
    found = mismatches(kernel, problem)
    if found:
        return "; ".join(found)
    params.num_splits = estimate(kernel, problem, device).num_splits
    return library.refusal(kernel.index, params)


@functools.lru_cache(maxsize=1)
def forced_pattern() -> str | None:
    """The glob of the environment variable, as it was at the first choice of this process."""
    return os.environ.get(FORCE_VARIABLE) or None


def _forced(library: Library, family: Family, pattern: str) -> set[str] | None:
    """Names of `family` that match; None when only another family's do. Raises when none does."""
    kernels = read_kernels(library)
    matching = [kernel for kernel in kernels if fnmatch.fnmatchcase(kernel.name, pattern)]
    if not matching:
        near = _close_names(pattern, kernels)
        raise NoKernelError(f"{FORCE_VARIABLE}={pattern} matches none of the {len(kernels)} kernels.{near}")
    return {kernel.name for kernel in matching if kernel.family is family} or None


def _named(
    library: Library, problem: Problem, family: Family, device: DeviceInfo, params: Params, name: str
) -> KernelInfo:
    pool = [kernel for kernel in read_kernels(library) if kernel.family is family]
    for kernel in pool:
        if kernel.name == name:
            reason = refusal(library, kernel, problem, device, params)
            if reason is not None:
                raise NoKernelError(f"kernel={name!r} cannot run {problem}: {reason}")
            return kernel
    raise ArgumentError(
        f"kernel={name!r} is not one of the {len(pool)} {family.value} kernels.{_close_names(name, pool)}"
    )


def _close_names(name: str, kernels: Iterable[KernelInfo]) -> str:
    near = difflib.get_close_matches(str(name), [kernel.name for kernel in kernels], n=_NEAREST, cutoff=0.3)
    return " Nearest: " + ", ".join(near) if near else ""


def _nearest(
    library: Library, pool: list[KernelInfo], problem: Problem, device: DeviceInfo, params: Params
) -> str:
    if not pool:
        return "The library has no kernel of this family."
    served = ", ".join(str(size) for size in sorted({row.head_dim for row in pool if not row.is_general}))
    general = [row.head_dim for row in pool if row.is_general]
    if general:
        served += f"{', and' if served else ''} up to {max(general)} with general kernels"
    lines = [f"Its kernels serve head_dim {served}. Nearest:"]
    for kernel in sorted(pool, key=lambda kernel: _distance(kernel, problem))[:_NEAREST]:
        lines.append(f"  {kernel.name}: {refusal(library, kernel, problem, device, params)}")
    return "\n".join(lines)


def _distance(kernel: KernelInfo, problem: Problem) -> int:
    """How far a row is from fitting: first by the number of mismatches, then by head_dim."""
    return 1000 * len(mismatches(kernel, problem)) + abs(kernel.head_dim - problem.head_dim)
