"""Gradients of attention in one go over the scores: dQ is added up by CTAs of keys, one after the other."""

from generator.core.family import Family
from generator.families.fmha_bwd_fused.config import FmhaBwdFused
from generator.families.fmha_bwd_fused.rules import RULES
from generator.families.fmha_bwd_fused.tiles import release, smoke, sweep

FMHA_BWD_FUSED = Family(
    kernel=FmhaBwdFused,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
