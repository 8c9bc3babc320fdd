"""The fused forward kernels of Hopper: TMA and wgmma; one warpgroup loads, two or three compute."""

from generator.core.family import Family
from generator.families.fmha_fwd_sm90.config import FmhaFwdSm90
from generator.families.fmha_fwd_sm90.rules import RULES
from generator.families.fmha_fwd_sm90.tiles import release, smoke, sweep

FMHA_FWD_SM90 = Family(
    kernel=FmhaFwdSm90,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
