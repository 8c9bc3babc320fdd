"""The families of kernels. A new one is a folder here, and a word in this list."""

from generator.core.family import Families
from generator.families.combine import COMBINE
from generator.families.fmha_bwd import FMHA_BWD
from generator.families.fmha_bwd_fused import FMHA_BWD_FUSED
from generator.families.fmha_fwd import FMHA_FWD
from generator.families.fmha_fwd_q8 import FMHA_FWD_Q8
from generator.families.fmha_fwd_q8_sm90 import FMHA_FWD_Q8_SM90
from generator.families.fmha_fwd_sm90 import FMHA_FWD_SM90
from generator.families.unfused import UNFUSED

FAMILIES = Families(
    FMHA_FWD, FMHA_FWD_SM90, FMHA_FWD_Q8, FMHA_FWD_Q8_SM90, UNFUSED, COMBINE, FMHA_BWD, FMHA_BWD_FUSED
)
