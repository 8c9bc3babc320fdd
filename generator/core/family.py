"""A family as a value, and the list of all of them: who may be in it, and what is asked of it.

`Families` refuses what would otherwise go wrong later and silently: names that two families could have, a
class that leaves a question open, a family without rules, spaces, units or templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from generator.core.kernel import Kernel
from generator.core.rules import Rule
from generator.core.space import SPACES, Listing, Space, space_of
from generator.core.tags import InvalidNameError

TEMPLATES = Path(__file__).parents[2] / "templates"


class FamilyError(ValueError):
    """A family that cannot be in the list."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How attention is computed: one class of kernels, what is legal among them, and which are built."""

    kernel: type[Kernel]
    rules: tuple[Rule[Any], ...]
    spaces: Mapping[str, Callable[[], Listing]]  # for each of SPACES

    @property
    def name(self) -> str:
        """What its kernels' names begin with."""
        return self.kernel.family

    @property
    def heads(self) -> tuple[str, ...]:
        """What the names of its kernels and units begin with, one an arch."""
        return tuple(f"{self.kernel.lead()}_{arch.value}_" for arch in self.kernel.archs)

    @property
    def sample(self) -> Kernel:
        """The first kernel of `smoke`."""
        return next(iter(self.spaces["smoke"]().kernels))

    def refusal(self, kernel: Kernel) -> str | None:
        """None when the kernel is legal, else the first reason, as `rule: reason`."""
        return next((f"{rule.name}: {why}" for rule in self.rules if (why := rule.why_not(kernel))), None)

    def check(self, templates: Path) -> None:
        """Raises FamilyError, and TagError for a field that has no place in names."""
        missing = [word for word in ("family", "op", "archs") if not hasattr(self.kernel, word)]
        missing += sorted(getattr(self.kernel, "__abstractmethods__", ()))
        if missing:
            raise FamilyError(f"{self.kernel.__name__} does not say its {', '.join(missing)}")
        self.kernel.grammar()
        names = [rule.name for rule in self.rules]
        expected = {
            "must have archs": len(self.kernel.archs) > 0,
            "must have rules, each with a name of its own": names and len(names) == len(set(names)),
            f"must list the spaces {', '.join(SPACES)}": set(self.spaces) == set(SPACES),
            f"needs templates/{self.name}.cu.j2": (templates / f"{self.name}.cu.j2").is_file(),
            f"needs templates/include/sdpa/{self.name}": (templates / "include/sdpa" / self.name).is_dir(),
        }
        for complaint, is_met in expected.items():
            if not is_met:
                raise FamilyError(f"family {self.name} {complaint}")
        for name in (self.sample.name, self.sample.group):
            if not name.startswith(self.heads):
                raise FamilyError(f"family {self.name} has the name {name!r}, which must begin with its arch")


class Families:
    """The families of a library, in order. Raises FamilyError when they cannot be together."""

    def __init__(self, *families: Family, templates: Path = TEMPLATES) -> None:
        for family in families:
            family.check(templates)
        for one, other in permutations(families, 2):
            for head in other.heads:
                if head.startswith(one.heads):
                    raise FamilyError(f"names with {head} could be of family {one.name} or {other.name}")
        self._families = {family.name: family for family in families}

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the families, in order."""
        return tuple(self._families)

    def of(self, kernel: Kernel) -> Family:
        """The kernel's family."""
        return self._families[kernel.family]

    def refusal(self, kernel: Kernel) -> str | None:
        """None when the kernel is legal, else the first reason, as `rule: reason`."""
        return self.of(kernel).refusal(kernel)

    def parse(self, name: str) -> Any:
        """The kernel of that name, so that `parse(kernel.name) == kernel`. Raises InvalidNameError.

        The name need not be in any space, nor legal.
        """
        for family in self:
            kernel = family.kernel.read(name)
            if kernel is not None:
                return kernel
        meant = [family for family in self if name.startswith(f"{family.name}_")] or list(self)
        grammars = ", or ".join(family.kernel.grammar() for family in meant)
        raise InvalidNameError(
            f"{name!r} is not a kernel name; the grammar is {grammars}, for example {meant[0].sample.name}"
        )

    def build(self, name: str) -> Space:
        """The space of that name. Raises KeyError without one, IllegalTileError if a table breaks a rule."""
        return space_of(name, (family.spaces[name]() for family in self), self.refusal)
