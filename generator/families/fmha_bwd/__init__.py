"""Gradients of attention: two roles that recompute S and dP, without atomics."""

from generator.core.family import Family
from generator.families.fmha_bwd.config import FmhaBwd
from generator.families.fmha_bwd.rules import RULES
from generator.families.fmha_bwd.tiles import release, smoke, sweep

FMHA_BWD = Family(
    kernel=FmhaBwd,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
