"""Hopper's quantised forward kernels: TMA and wgmma of bytes; opt-in, as those of fmha_fwd_q8."""

from generator.core.family import Family
from generator.families.fmha_fwd_q8_sm90.config import FmhaFwdQ8Sm90
from generator.families.fmha_fwd_q8_sm90.rules import RULES
from generator.families.fmha_fwd_q8_sm90.tiles import release, smoke, sweep

FMHA_FWD_Q8_SM90 = Family(
    kernel=FmhaFwdQ8Sm90,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
