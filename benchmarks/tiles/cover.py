"""Set cover: the fewest candidates that together cover everything, and among equally many the least loss.

Greedy first, the candidate that covers the most of what is left (ties: the first by name). Then, as far as
NODE_LIMIT reaches, a branch and bound: take the element that the fewest candidates cover, try each of them,
give up a branch that cannot beat the best cover known. A bound that never promises too much is the number of
elements left over the most that one candidate covers. Independent parts, which share no candidate, are solved
one by one. Last, candidates are exchanged one for one while that lowers the loss. All of it is deterministic.
Source of the method: Karp, "Reducibility among combinatorial problems" (1972) for the problem, Chvátal, "A
greedy heuristic for the set-covering problem" (1979) for the heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

NODE_LIMIT = 200_000
_Loss = TypeVar("_Loss", int, float, tuple[float, ...])


@dataclass(frozen=True)
class Cover:
    """`chosen` in the order of names; `is_proven`: no smaller set covers everything."""

    chosen: tuple[str, ...]
    is_proven: bool


def smallest_cover(covers: Mapping[str, Iterable[Hashable]], *, node_limit: int = NODE_LIMIT) -> Cover:
    """The fewest of `covers`' names that cover every element that any of them covers."""
    numbers: dict[Hashable, int] = {}
    masks: dict[str, int] = {}
    for name in sorted(covers):
        mask = 0
        for element in covers[name]:
            mask |= 1 << numbers.setdefault(element, len(numbers))
        if mask:
            masks[name] = mask
    chosen: list[str] = []
    is_proven = True
    for part in _independent_parts(masks):
        search = _Search(_without_dominated(part), node_limit)
        chosen += search.best
        is_proven = is_proven and search.is_exhausted
    return Cover(tuple(sorted(chosen)), is_proven)


def _independent_parts(masks: Mapping[str, int]) -> list[dict[str, int]]:
    parts: list[tuple[int, dict[str, int]]] = []
    for name, mask in masks.items():
        union, merged, others = mask, {name: mask}, []
        for covered, part in parts:
            if covered & mask:
                union |= covered
                merged = {**part, **merged}
            else:
                others.append((covered, part))
        parts = [*others, (union, merged)]
    return [part for _, part in parts]


def _without_dominated(masks: Mapping[str, int]) -> dict[str, int]:
    """Without candidates that cover nothing but what another covers too; of equal ones the first stays."""
    kept: dict[str, int] = {}
    for name, mask in sorted(masks.items(), key=lambda item: (-item[1].bit_count(), item[0])):
        if not any(mask | other == other for other in kept.values()):
            kept[name] = mask
    return dict(sorted(kept.items()))


class _Search:
    def __init__(self, masks: Mapping[str, int], node_limit: int) -> None:
        self._masks = masks
        self._all = 0
        for mask in masks.values():
            self._all |= mask
        self._nodes = node_limit
        self.best = self._greedy()
        self._descend(self._all, [])
        self.is_exhausted = self._nodes > 0

    def _greedy(self) -> list[str]:
        left = self._all
        chosen: list[str] = []
        while left:
            name = self._by_gain(self._masks, left)[0]
            chosen.append(name)
            left &= ~self._masks[name]
        return chosen

    def _descend(self, left: int, chosen: list[str]) -> None:
        if not left:
            if len(chosen) < len(self.best):
                self.best = list(chosen)
            return
        self._nodes -= 1
        most = max((mask & left).bit_count() for mask in self._masks.values())
        if self._nodes <= 0 or len(chosen) - (-left.bit_count() // most) >= len(self.best):
            return
        for name in self._rarest(left):
            self._descend(left & ~self._masks[name], [*chosen, name])

    def _rarest(self, left: int) -> list[str]:
        """The candidates of the element that the fewest cover, the most useful first."""
        rarest: list[str] = []
        remaining = left
        while remaining:
            bit = remaining & -remaining
            remaining ^= bit
            names = [name for name, mask in self._masks.items() if mask & bit]
            if not rarest or len(names) < len(rarest):
                rarest = names
        return self._by_gain(rarest, left)

    def _by_gain(self, names: Iterable[str], left: int) -> list[str]:
        """Those that cover the most of `left` first, of equal ones by name."""
        return sorted(names, key=lambda name: (-(self._masks[name] & left).bit_count(), name))


def improved(
    chosen: Iterable[str],
    covers: Mapping[str, frozenset[Hashable]],
    loss: Callable[[tuple[str, ...]], _Loss],
) -> tuple[str, ...]:
    """`chosen`, with candidates exchanged one for one as long as all stays covered and `loss` falls."""
    current = tuple(sorted(chosen))
    everything = frozenset[Hashable]().union(*covers.values())
    best = loss(current)
    while True:
        better: tuple[_Loss, tuple[str, ...]] | None = None
        for old in current:
            rest: list[str] = [name for name in current if name != old]
            missing = everything.difference(*(covers[name] for name in rest))
            for new in sorted(covers):
                if new in current or not missing <= covers[new]:
                    continue
                trial = tuple(sorted([*rest, new]))
                value = loss(trial)
                if value < best and (better is None or (value, trial) < better):
                    better = value, trial
        if better is None:
            return current
        best, current = better
