"""Every mutant, in the order in which the headers are read."""

from __future__ import annotations

from tests.mutation.defects_backward import BACKWARDS
from tests.mutation.defects_backward_bias import BIAS_GRADIENTS
from tests.mutation.defects_backward_fused import FUSED_BACKWARDS
from tests.mutation.defects_combine import COMBINES
from tests.mutation.defects_engine import ENGINE
from tests.mutation.defects_general import GENERAL
from tests.mutation.defects_math import MATHS
from tests.mutation.defects_memory import MEMORY
from tests.mutation.defects_pipeline import PIPELINE
from tests.mutation.defects_quantized import QUANTIZED
from tests.mutation.defects_quantized_bytes import QUANTIZED_BYTES
from tests.mutation.defects_quantized_sm90 import QUANTIZED_HOPPER
from tests.mutation.defects_quantized_split import QUANTIZED_SPLIT
from tests.mutation.defects_sm90 import HOPPER
from tests.mutation.defects_sm90_pairs import HOPPER_PAIRS
from tests.mutation.defects_sm90_split import HOPPER_SPLITS
from tests.mutation.defects_sm90_turns import HOPPER_TURNS
from tests.mutation.defects_split import SPLITS
from tests.mutation.defects_window import WINDOWS
from tests.mutation.model import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *PIPELINE,
    *MEMORY,
    *MATHS,
    *GENERAL,
    *SPLITS,
    *WINDOWS,
    *HOPPER,
    *HOPPER_PAIRS,
    *HOPPER_TURNS,
    *HOPPER_SPLITS,
    *COMBINES,
    *QUANTIZED_BYTES,
    *QUANTIZED,
    *QUANTIZED_SPLIT,
    *QUANTIZED_HOPPER,
    *BACKWARDS,
    *BIAS_GRADIENTS,
    *FUSED_BACKWARDS,
    *ENGINE,
)
