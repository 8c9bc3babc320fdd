"""What a kernel takes beside its price: factors that choices on Hopper were found to lack.

A price adds up what the units of an SM are known to do. What is left differs from kernel to kernel and is no
more than some percent, but so is the lead of one kernel over the next. corrections.json has up to seven
factors for a kernel, the same for both dtypes: everywhere, where it has no more tiles than there are SMs,
where more than an eighth of its columns are padding, up to FEW_KEYS keys, again up to FEWEST_KEYS and up to
HARDLY_ANY_KEYS, and where rows fill half a tile at most. Plain kernels of mma.sync have one of these alone,
up to HARDLY_ANY_KEYS. `python -m benchmarks.tiles corrections` finds them: those with which the choice loses
least at problems that were measured on H200s and H100s. Other cards' prices stay as they are, for nobody has
measured what they lack.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

FILE = Path(__file__).with_name("corrections.json")
OF_SIZES = ("few_tiles", "few_keys", "few_rows", "fewest_keys", "hardly_any_keys")
TRAITS = ("always", "padded", *OF_SIZES)
FEW_KEYS, FEWEST_KEYS, HARDLY_ANY_KEYS = 256, 64, 32  # what a CTA does once weighs there
_MEASURED = (9, 0)
_LEFT_OUT = frozenset({"f16", "bf16"})  # of names: they share their factors


def factors(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> tuple[float, ...]:
    """Of one kernel on one card, for the problems of one kind: by number, whose bit n says whether a
    problem has OF_SIZES[n].
    """
    known = _table().get(name_of(kernel)) if device.compute_capability == _MEASURED else None
    if known is None:
        return (1.0,) * 2 ** len(OF_SIZES)
    everywhere = known.get("always", 1.0) * (known.get("padded", 1.0) if is_padded(kernel, problem) else 1.0)
    found = [everywhere]
    for trait in OF_SIZES:
        found += [factor * known.get(trait, 1.0) for factor in found]
    return tuple(found)


def name_of(kernel: KernelInfo) -> str:
    """What the table calls it. Hopper's split kernels, which pack no heads, have the factors of their twins
    that never split, which they are where they do not either.
    """
    left_out = _LEFT_OUT if kernel.packs_heads else _LEFT_OUT | {"split"}
    return "_".join(part for part in kernel.name.split("_") if part not in left_out)


def is_padded(kernel: KernelInfo, problem: Problem) -> bool:
    """Whether more than an eighth of the kernel's columns are padding."""
    return 8 * max(problem.head_dim, problem.head_dim_v) < 7 * kernel.head_dim


@functools.cache
def _table() -> Mapping[str, Mapping[str, float]]:
    known: Mapping[str, Mapping[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))["factors"]
    return known
