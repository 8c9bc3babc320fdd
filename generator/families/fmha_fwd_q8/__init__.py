"""The quantised forward kernels: products of bytes inside, 16-bit tensors outside; opt-in."""

from generator.core.family import Family
from generator.families.fmha_fwd_q8.config import FmhaFwdQ8
from generator.families.fmha_fwd_q8.rules import RULES
from generator.families.fmha_fwd_q8.tiles import release, smoke, sweep

FMHA_FWD_Q8 = Family(
    kernel=FmhaFwdQ8,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
