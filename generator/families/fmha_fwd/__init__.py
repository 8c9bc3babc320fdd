"""The fused forward kernels: scores and probabilities never leave the SM."""

from generator.core.family import Family
from generator.families.fmha_fwd.config import FmhaFwd
from generator.families.fmha_fwd.rules import RULES
from generator.families.fmha_fwd.tiles import release, smoke, sweep

FMHA_FWD = Family(
    kernel=FmhaFwd,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
