"""Kernels that merge partial results: attention of the same queries over disjoint sets of keys."""

from generator.core.family import Family
from generator.families.combine.config import Combine
from generator.families.combine.rules import RULES
from generator.families.combine.tiles import release, smoke, sweep

COMBINE = Family(
    kernel=Combine,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
