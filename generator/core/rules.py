"""What a rule is, and those that hold for every family. A family's own are in its `rules.py`.

A rule restates what the C++ asserts, so that an illegal kernel is refused here, by name and with a reason,
and not by the compiler in the middle of a build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from generator.core.kernel import Kernel

# Registers that a thread needs with any tile, next to its accumulators; with fewer the compiler has to spill.
# The split kernels of head_dim 256 live with these.
MIN_OTHER_REGISTERS = 55

K = TypeVar("K", bound=Kernel)


@dataclass(frozen=True)
class Rule(Generic[K]):
    """What is legal, and a check: `condition or reason`, True for a kernel that keeps to the rule."""

    name: str
    statement: str
    check: Callable[[K], bool | str]

    def why_not(self, kernel: K) -> str | None:
        """None for a kernel that keeps to the rule, else the reason."""
        verdict = self.check(kernel)
        return None if verdict is True else str(verdict)


def head_dim_rule(largest: int) -> Rule[Any]:
    """The MMA goes through head_dim in steps of 16."""
    return Rule(
        "head_dim",
        f"head_dim is a multiple of 16 up to {largest}",
        lambda c: (
            (c.head_dim % 16 == 0 and c.head_dim <= largest)
            or f"head_dim {c.head_dim} is not a multiple of 16 up to {largest}"
        ),
    )


RESOURCES: tuple[Rule[Any], ...] = (
    Rule(
        "smem",
        "shared memory fits one CTA",
        lambda c: (
            c.smem_bytes <= (limit := c.arch.limits.smem_per_cta)
            or f"{c.smem_bytes} bytes of shared memory, {c.arch.value} gives a CTA {limit}"
        ),
    ),
    Rule(
        "registers",
        "the accumulators leave a thread enough registers",
        lambda c: (
            (least := c.accumulator_registers + MIN_OTHER_REGISTERS)
            <= (limit := c.arch.limits.registers_for(c.tile.threads))
            or f"at least {least} registers a thread ({c.accumulator_registers} accumulators), "
            f"the limit is {limit}"
        ),
    ),
)
