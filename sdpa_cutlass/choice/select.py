"""Problem → kernel: which are legal, then a measured row for this GPU (tuned_table.py), then the cost model.

A kernel is legal when its code runs on the device, its registry row takes the problem (legal.py), and the
library has nothing against strides and alignment. `SDPA_CUTLASS_FORCE_KERNEL=<glob>` narrows the choice to
the kernels whose names match. It is read once, at the first choice of the process, and leaves a family alone
when only names of others match. Of all kernels that compete (`KernelInfo.serves`), the cheapest is taken.
General kernels come behind their family's plain ones that can run a problem: they are slower, and are only
needed by problems with a mask, dropout, lengths or a rare head_dim. Split kernels compete with the plain ones
where they have something to gain: query heads to pack, keys to share out, or rows so few that the tile of any
plain kernel would be nearly empty; so do general ones that leave rows out which plain ones compute (`order`).

A key cache that grows asks for a choice with every token. So what depends on `Problem.kind` alone is found
once (`Offer`), and a choice prices the few kernels that may win. Nothing is kept for a single problem.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ArgumentError, ArgumentTypeError, NoKernelError
from ..library.device import DeviceInfo
from ..library.registry import Asked, Family, KernelInfo, read_kernels
from ..library.structs import Params
from ..problem import MASK_ALIGNMENT, Kind, Problem
from . import tuned_lookup
from .cost import Estimate, Model, model_of
from .legal import competing, mismatches, unsupported
from .mask_reads import copies_unaligned

if TYPE_CHECKING:
    from ..library.abi import Library

FORCE_VARIABLE = "SDPA_CUTLASS_FORCE_KERNEL"
_NEAREST = 5  # refused kernels that an error lists
_MAX_OFFERS = 1024
_MAX_PRICES = 256  # of an offer


class Choice(NamedTuple):
    """The kernel that runs, the CTAs that share the keys of a tile (0: it cannot split), and why it."""

    kernel: KernelInfo
    num_splits: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel beside one problem: `refusal` says why it is not legal, `estimate` what it should cost.

    Without an `estimate`, its row is what speaks against it.
    """

    kernel: KernelInfo
    refusal: str | None
    estimate: Estimate | None


class Offer:
    """The legal kernels that compete on one device for the problems of one kind, and their models."""

    def __init__(self, library: Library, problem: Problem, family: Asked, device: DeviceInfo) -> None:
        legal = [
            (kernel, model_of(kernel, problem, device))
            for kernel in sorted(competing(library, family, device), key=operator.attrgetter("name"))
            if not mismatches(kernel, problem)
        ]
        self.plain = families_with_plain(kernel for kernel, _ in legal)
        self.models: tuple[tuple[KernelInfo, Model], ...] = tuple(legal)
        # Behind the plain ones of its family, unless it has something to gain by splitting.
        lags = [kernel.is_general and kernel.family in self.plain for kernel, _ in legal]
        first = [model for (_, model), lag in zip(legal, lags, strict=True) if not lag]
        self._outclassed = [
            (model.kernel, model) for model in first if any(other.outclasses(model) for other in first)
        ]
        self._may_win = [
            (*pair, lag, _close_rows(pair[0], self.plain))
            for pair, lag in zip(legal, lags, strict=True)
            if (not lag or _may_gain(*pair)) and pair not in self._outclassed
        ]
        self._behind = [pair for pair, lag in zip(legal, lags, strict=True) if lag and not _may_gain(*pair)]
        self._keys_of_a_price = math.gcd(*(model.keys_of_a_price for _, model in legal)) or 1
        self._rows_of_a_price = math.gcd(*(model.rows_of_a_price for _, model in legal)) or 1
        self._most_rows = max((model.rows_of_a_price for _, model in legal), default=1)
        self._latest: _Prices = (), [], [], []
        self._known: dict[_Sizes, _Prices] = {}

    def ranked(self, problem: Problem) -> Iterator[tuple[KernelInfo, int]]:
        """Every kernel with its num_splits, sorted by `order`. Those that cannot win are priced last."""
        _, first, then, unpriced = self._priced(problem)
        if first:
            _, _, kernel, num_splits = first[0]
            yield kernel, num_splits
        for cheaper, dearer in ((first[1:], self._outclassed), (then, unpriced + self._behind)):
            prices = [(model.cost(problem), kernel) for kernel, model in dearer]
            priced = [(cycles, kernel.name, kernel, splits) for (cycles, splits), kernel in prices]
            for _, _, kernel, num_splits in sorted(cheaper + priced, key=_price):
                yield kernel, num_splits

    def _priced(self, problem: Problem) -> _Prices:
        """What the prices are of, those that may win, sorted, those that will not after all, and of these
        the ones whose price nobody asked for.

        Whole tiles cost the same: prices are known for most tokens of a growing key cache, and for most
        lengths next to each other.
        """
        sizes = self._sizes(problem)
        if self._latest[0] == sizes:
            return self._latest
        known = self._known.get(sizes)
        if known is not None:
            self._latest = known
            return known
        packs = problem.num_heads_q > problem.num_heads_kv
        packed_rows = problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv
        key_heads = problem.batch * problem.num_heads_kv
        found: _Prices = sizes, [], [], []
        _, first, then, unpriced = found
        for kernel, model, lags_behind, close_rows in self._may_win:
            if kernel.packs_heads:
                is_behind = lags_behind and not packs and problem.seqlen_q > close_rows
            else:
                is_behind = lags_behind and not model.leaves_rows_out(problem.seqlen_q)
            if is_behind and not model.may_split(packed_rows, key_heads):
                unpriced.append((kernel, model))
                continue
            cycles, num_splits = model.cost(problem)
            is_first = not is_behind or num_splits > 1
            (first if is_first else then).append((cycles, kernel.name, kernel, num_splits))
        first.sort(key=_cycles)  # those of one price stay sorted by name
        if len(self._known) >= _MAX_PRICES:
            self._known.clear()
        self._latest = self._known[sizes] = found
        return found

    def _sizes(self, problem: Problem) -> _Sizes:
        """What the prices of all kernels follow from."""
        rows, heads, heads_kv = problem.seqlen_q, problem.num_heads_q, problem.num_heads_kv
        keys, offset, window = problem.seqlen_k, problem.causal_offset, problem.window
        copied = 0  # elements of a mask that some kernel reads a copy of
        scores = problem.batch * heads * rows * keys
        if problem.mask_alignment < MASK_ALIGNMENT and copies_unaligned(scores, keys):
            copied = problem.mask_elements
        if window is not None:  # its ends lie within blocks
            return problem.batch, heads, heads_kv, rows, keys, offset, window, copied
        tiles_of_keys = -(-keys // self._keys_of_a_price)
        last: int | None = None
        if problem.causal is None or offset >= keys - 1:  # all see every key
            offset = -1
        else:
            last = -(-(rows + offset) // self._keys_of_a_price)
        packed = rows * heads // heads_kv
        few = packed < self._most_rows  # a tile has room for more, and the rows themselves count
        tiles_of_rows = -packed if few else -(-packed // self._rows_of_a_price)
        return problem.batch, heads, heads_kv, tiles_of_rows, tiles_of_keys, offset, last, copied


_Priced = tuple[float, str, KernelInfo, int]  # cycles, name, kernel, num_splits
_Sizes = tuple[int | tuple[int, int] | None, ...]
_Prices = tuple[_Sizes, list[_Priced], list[_Priced], list[tuple[KernelInfo, Model]]]
_cycles, _price = operator.itemgetter(0), operator.itemgetter(0, 1)


def families_with_plain(kernels: Iterable[KernelInfo]) -> dict[Family, int]:
    """Those whose general kernels have plain ones before them, with the most rows that a split kernel's tile
    may have to compete with these: as many as the smallest plain one's.
    """
    found: dict[Family, int] = {}
    for kernel in kernels:
        if not kernel.is_general:
            found[kernel.family] = min(kernel.block_m, found.get(kernel.family, kernel.block_m))
    return found


def _may_gain(kernel: KernelInfo, model: Model) -> bool:
    """Whether there are sizes at which a general kernel is not behind its family's plain ones."""
    return kernel.is_split or model.leaves_rows_out(1)


def _close_rows(kernel: KernelInfo, plain: Mapping[Family, int]) -> int:
    """The most rows of a head with which a split kernel competes with plain ones; 0 for large tiles."""
    block_m = kernel.block_m
    return block_m if kernel.packs_heads and block_m <= plain.get(kernel.family, 0) else 0


_offers: dict[tuple[Library, Asked, DeviceInfo, Kind], Offer] = {}


def offer(library: Library, problem: Problem, family: Asked, device: DeviceInfo) -> Offer:
    """What competes for `family` and problems of the kind of `problem`. May be empty."""
    key = (library, family, device, problem.kind)
    found = _offers.get(key)
    if found is None:
        found = Offer(library, problem, family, device)
        if len(_offers) >= _MAX_OFFERS:
            _offers.clear()
        _offers[key] = found
    return found


def ranking(
    library: Library, problem: Problem, family: Asked, device: DeviceInfo
) -> tuple[tuple[KernelInfo, Estimate], ...]:
    """The legal kernels as far as their rows tell, sorted by `order`. May be empty."""
    found = offer(library, problem, family, device)
    legal = [(kernel, model.estimate(problem)) for kernel, model in found.models]
    return tuple(sorted(legal, key=lambda pair: order(pair[0], pair[1], problem, found.plain)))


def order(
    kernel: KernelInfo, cost: Estimate, problem: Problem, plain: Mapping[Family, int]
) -> tuple[bool, float, str]:
    """Sorts a ranking by price; the general kernels of families in `plain` are behind.

    Those have plain kernels in the ranking. What gains from splitting or from the rows it leaves out is not.
    """
    gains = cost.num_splits > 1 or (kernel.packs_heads and problem.num_heads_q > problem.num_heads_kv)
    gains = gains or cost.leaves_rows_out or problem.seqlen_q <= _close_rows(kernel, plain)
    return kernel.is_general and kernel.family in plain and not gains, cost.cycles, kernel.name


def choose(
    library: Library,
    problem: Problem,
    family: Asked,
    device: DeviceInfo,
    params: Params,
    *,
    name: str | None = None,
    has_workspace: bool = True,
) -> Choice:
    """The kernel of `family` for `problem` with the strides and addresses of `params`. Writes nothing.

    With `name`, that very kernel. Without a workspace, no CTAs share a tile, and what is fast only if they do
    comes last. Raises ArgumentError for an unknown name, NoKernelError when none is legal.
    """
    if name is not None:
        kernel, num_splits = _named(library, problem, family, device, params, name)
        return Choice(kernel, num_splits if has_workspace else min(num_splits, 1), "named by the caller")
    pattern = forced_pattern()
    forced = None if pattern is None else _forced(library, family, pattern)
    ranked: Iterable[tuple[KernelInfo, int]] = offer(library, problem, family, device).ranked(problem)
    if forced is not None:
        ranked = (pair for pair in ranked if pair[0].name in forced)
    tuned = None
    if forced is None and family is Family.FMHA_FWD:
        tuned = tuned_lookup.tuned_kernel(library, problem, device)
    fastest = tuned.row.kernel if tuned is not None else None
    if fastest is not None or not has_workspace:
        ranked = _placed(ranked, fastest, has_workspace=has_workspace)
    for kernel, num_splits in ranked:
        num_splits = num_splits if has_workspace else min(num_splits, 1)
        if _library_refusal(library, kernel, params, num_splits) is None:
            if forced is not None:
                return Choice(kernel, num_splits, f"{FORCE_VARIABLE}={pattern}")
            return Choice(kernel, num_splits, str(tuned) if kernel.name == fastest else "cost model")
    pool = [kernel for kernel in read_kernels(library) if kernel.serves(family)]
    what = f"no {family.value} kernel can run {problem}"
    if forced is not None:
        pool = [kernel for kernel in pool if kernel.name in forced]
        what = f"{FORCE_VARIABLE}={pattern}: none of the {len(pool)} kernels that match can run {problem}"
    raise NoKernelError(f"{what}.\n{_nearest(library, pool, problem, device, params)}")


def _placed(
    ranked: Iterable[tuple[KernelInfo, int]], fastest: str | None, *, has_workspace: bool
) -> list[tuple[KernelInfo, int]]:
    """`ranked`, the fastest kernel first; last what is fast only with a workspace, if there is none."""

    def place(pair: tuple[KernelInfo, int]) -> tuple[bool, bool]:
        return not has_workspace and pair[1] > 1, pair[0].name != fastest

    return sorted(ranked, key=place)


def choose_first(library: Library, problem: Problem, device: DeviceInfo) -> str | None:
    """The name that `choose` would take for well-aligned tensors: what was tuned, else the cheapest."""
    tuned = tuned_lookup.tuned_kernel(library, problem, device)
    if tuned is not None:
        return tuned.row.kernel
    ranked = offer(library, problem, Family.FMHA_FWD, device).ranked(problem)
    return next((kernel.name for kernel, _ in ranked), None)


def candidates(
    library: Library, problem: Problem, family: Asked, device: DeviceInfo, params: Params
) -> list[Candidate]:
    """All that compete for `family`: legal kernels in the order of `ranking`, then the others by distance."""
    ranked = ranking(library, problem, family, device)
    estimates = {kernel.index: cost for kernel, cost in ranked}
    plain = families_with_plain(kernel for kernel, _ in ranked)
    found = []
    for kernel in read_kernels(library):
        if kernel.serves(family):
            reason, cost = refusal(library, kernel, problem, device, params), estimates.get(kernel.index)
            if reason is None and cost is None:
                reason = f"is for sm_{kernel.arch}, and {device.name} runs it when it is named"
            found.append(Candidate(kernel, reason, cost))

    def placed(candidate: Candidate) -> tuple[bool, int, tuple[bool, float, str]]:
        kernel = candidate.kernel
        if candidate.refusal is not None or candidate.estimate is None:
            return True, _distance(kernel, problem), (False, 0.0, "")
        return False, 0, order(kernel, candidate.estimate, problem, plain)

    return sorted(found, key=placed)


def refusal(
    library: Library, kernel: KernelInfo, problem: Problem, device: DeviceInfo, params: Params
) -> str | None:
    """Why `kernel` cannot run this problem, or None."""
    runs_elsewhere = unsupported(kernel, library, device)
    found = mismatches(kernel, problem) + ([runs_elsewhere] if runs_elsewhere else [])
    if found:
        return "; ".join(found)
    _, num_splits = model_of(kernel, problem, device).cost(problem)
    return _library_refusal(library, kernel, params, num_splits)


def _library_refusal(library: Library, kernel: KernelInfo, params: Params, num_splits: int) -> str | None:
    """What the library has against `kernel`, launched with `params` and `num_splits`."""
    if params.num_splits != num_splits:
        params = Params.from_buffer_copy(params)
        params.num_splits = num_splits
    return library.refusal(kernel.index, params)


@functools.lru_cache(maxsize=1)
def forced_pattern() -> str | None:
    """The glob of the environment variable, as it was at the first choice of this process."""
    return os.environ.get(FORCE_VARIABLE) or None


def _forced(library: Library, family: Asked, pattern: str) -> set[str] | None:
    """Names of `family` that match; None when only another family's do. Raises when none does."""
    kernels = read_kernels(library)
    matching = [kernel for kernel in kernels if fnmatch.fnmatchcase(kernel.name, pattern)]
    if not matching:
        near = _close_names(pattern, kernels)
        raise NoKernelError(f"{FORCE_VARIABLE}={pattern} matches none of the {len(kernels)} kernels.{near}")
    return {kernel.name for kernel in matching if kernel.serves(family)} or None


def _named(
    library: Library, problem: Problem, family: Asked, device: DeviceInfo, params: Params, name: str
) -> tuple[KernelInfo, int]:
    """The kernel with this name, and its num_splits. Raises the errors of `choose`."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"kernel={name!r} is a {type(name).__name__}; allowed is a kernel's name")
    pool = [kernel for kernel in read_kernels(library) if kernel.serves(family)]
    for kernel in pool:
        if kernel.name == name:
            reason = refusal(library, kernel, problem, device, params)
            if reason is not None:
                raise NoKernelError(f"kernel={name!r} cannot run {problem}: {reason}")
            return kernel, model_of(kernel, problem, device).cost(problem)[1]
    raise ArgumentError(
        f"kernel={name!r} is not one of the {len(pool)} {family.value} kernels.{_close_names(name, pool)}"
    )


def _close_names(name: str, kernels: Iterable[KernelInfo]) -> str:
    near = difflib.get_close_matches(name, [kernel.name for kernel in kernels], n=_NEAREST, cutoff=0.3)
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
    lines = [f"Its kernels serve head_dim {served.strip()}. Nearest:"]
    for kernel in sorted(pool, key=lambda kernel: _distance(kernel, problem))[:_NEAREST]:
        lines.append(f"  {kernel.name}: {refusal(library, kernel, problem, device, params)}")
    return "\n".join(lines)


def _distance(kernel: KernelInfo, problem: Problem) -> int:
    """How far a row is from fitting: first by the number of mismatches, then by head_dim."""
    return 1000 * len(mismatches(kernel, problem)) + abs(kernel.head_dim - problem.head_dim)
