"""A space is a set of kernels to build: what the families list for it, as far as it is legal.

    smoke    a few kernels that touch every head_dim, dtype and variant: for a quick build
    release  what ships: every tile of the families' tables, in every dtype and variant of its table
    sweep    products of tiles, fp16, as far as the rules allow: for tuning

What a family lists must be legal. What it tries and the rules refuse is dropped: see `Space.rejected`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from generator.core.kernel import Kernel

SPACES = ("smoke", "release", "sweep")
FILTERED = "_filtered"  # ends the name of a part of a space


class IllegalTileError(ValueError):
    """A table names a tile that a rule refuses, or names one twice."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a family puts into a space."""

    kernels: Iterable[Kernel] = ()  # each must be legal, and listed once
    tried: Iterable[Sequence[Kernel]] = ()  # kernels that differ in nothing that a rule looks at


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A kernel that was tried and is not built, and why."""

    config: Kernel
    reason: str


@dataclass(frozen=True, kw_only=True)
class Space:
    """A set of kernels to build, sorted by name."""

    name: str
    kernels: tuple[Kernel, ...]
    rejected: tuple[Rejected, ...] = ()
    filter: str | None = None  # the globs that `filtered` was given

    def filtered(self, globs: str) -> Space:
        """`<name>_filtered`: the kernels, and the rejected ones, whose names match a shell-style glob.

        Several globs are separated by commas; one match is enough. Case counts.
        """
        patterns = globs.split(",")
        matches = self._where(lambda kernel: any(fnmatchcase(kernel.name, glob) for glob in patterns))
        return replace(matches, filter=globs)

    def of_families(self, names: Collection[str]) -> Space:
        """`<name>_filtered`: the kernels, and the rejected ones, of the families with these names."""
        return self._where(lambda kernel: kernel.family in names)

    def _where(self, keeps: Callable[[Kernel], bool]) -> Space:
        return replace(
            self,
            name=f"{self.name.removesuffix(FILTERED)}{FILTERED}",
            kernels=tuple(kernel for kernel in self.kernels if keeps(kernel)),
            rejected=tuple(rejected for rejected in self.rejected if keeps(rejected.config)),
        )


def space_of(name: str, listings: Iterable[Listing], refusal: Callable[[Kernel], str | None]) -> Space:
    """What is legal of the listings. Raises IllegalTileError for a listed kernel that is refused or twice."""
    kernels: list[Kernel] = []
    rejected: list[Rejected] = []
    complaints: list[str] = []
    for listing in listings:
        listed = list(listing.kernels)
        complaints += [
            f"{kernel.name}: {reason}" for kernel in listed if (reason := refusal(kernel)) is not None
        ]
        kernels += listed
        for variants in listing.tried:
            reason = refusal(variants[0])
            if reason is None:
                kernels += variants
            else:
                rejected += [Rejected(config=kernel, reason=reason) for kernel in variants]
    names = Counter(kernel.name for kernel in kernels)
    complaints += [f"{name}: listed {count} times" for name, count in names.items() if count > 1]
    if complaints:
        raise IllegalTileError("\n  ".join(["generator/families list what cannot be built:", *complaints]))
    return Space(
        name=name,
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.name)),
        rejected=tuple(sorted(rejected, key=lambda rejected: rejected.config.name)),
    )
