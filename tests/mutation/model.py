"""What a mutant is, which kernels it is built into, and the checks that can catch it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMT_TESTS = ROOT / "tests" / "library" / "simt"
INCLUDE = ROOT / "templates" / "include"
HEADERS = INCLUDE / "sdpa"


class Kernels(Enum):
    """The kernels that a mutant is built into: one small tile for each way through the headers."""

    RING = ("fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal",)
    """One stage: a buffer each for K and V, Q in shared memory."""
    STAGES = ("fmha_fwd_sm89_d32_m64n64_s3_w4_f16_causal",)
    """Three stages of K and V."""
    Q_IN_REGS = ("fmha_fwd_sm89_d32_m64n64_s2_w4_qreg_f16_causal",)
    """Two stages; Q passes through the room of V."""
    GROUPS = ("fmha_fwd_sm89_d32_m32n64_s1_w4_g2_f16_causal",)
    """Two KV groups with rings of three tiles, and the merge at the end."""
    WARP_GROUPS = ("fmha_fwd_sm89_d32_m16n32_s1_w4_g4_f16_causal",)
    """Four KV groups of one warp; Q passes through their rings."""
    GENERAL = ("fmha_fwd_sm89_d32_m64n64_s2_w4_f16_general",)
    """Masks, lengths and smaller head_dims."""
    DROPOUT = ("fmha_fwd_sm89_d32_m64n64_s2_w4_f16_general_dropout",)
    SPLIT = ("fmha_fwd_sm89_d32_m16n32_s1_w4_g4_f16_general_split",)
    """Several CTAs share the keys of a tile."""
    SPLIT_ALONE = ("fmha_fwd_sm89_d32_m64n64_s1_w4_f16_general_split",)
    """The same without KV groups; Q goes to shared memory."""
    HOPPER = ("fmha_fwd_sm90_d64_m128n128_s3_w12_f16", "fmha_fwd_sm90_d64_m128n128_s3_w12_f16_causal")
    """Two consumers; full attention has several tiles a CTA, causal blocks that one consumer passes on."""
    HOPPER_ONE_Q = ("fmha_fwd_sm90_d128_m192n80_s3_w16_f16_causal",)
    """Three consumers; the next tile's Q waits for this one's."""
    HOPPER_PAIR = ("fmha_fwd_sm90_d128_m128n128_s2_w12_c2_f16_causal",)
    """Two CTAs that load K and V together."""
    HOPPER_GENERAL = ("fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general",)
    """Lengths, packed sequences, windows and sinks by ragged tensor maps; masks."""
    HOPPER_SPLIT = ("fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general_split",)
    """The same where several CTAs share the keys of a tile."""
    HOPPER_DROPOUT = ("fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general_dropout",)
    COMBINE = ("combine_sm89_d256_s4_w4_bf16", "combine_sm89_d256_s4_w4_f16", "combine_sm89_d256_s4_w4_f32")
    """Those that merge partial results."""
    BACKWARD = ("fmha_bwd_sm89_d32_m32n64_s2_w4_q64k32_f16",)
    """Both roles of the gradients, and that of a bias."""
    BACKWARD_DROPOUT = ("fmha_bwd_sm89_d32_m32n64_s2_w4_q64k32_f16_dropout",)
    BACKWARD_TURNS = (
        "fmha_bwd_sm89_d32_m32n64_s1_w4_q64k32_f16",
        "fmha_bwd_sm89_d32_m32n64_s1_w4_q64k32_f16_dropout",
    )
    """Three roles of the gradients, a gradient each."""
    BACKWARD_FUSED = ("fmha_bwd_fused_sm89_d32_m32n64_s2_w4_f16",)
    """One role for all gradients."""
    QUANTIZED = ("fmha_fwd_q8_sm89_d64_m128n64_s2_w4_f16_int8",)
    """Products of bytes, and the pass that makes them."""
    QUANTIZED_BF16 = ("fmha_fwd_q8_sm89_d64_m128n64_s2_w4_bf16_int8",)
    """The same for values of float's range."""
    QUANTIZED_SPLIT = ("fmha_fwd_q8_sm89_d64_m16n64_s1_w4_g4_f16_int8_split",)
    """The same where CTAs and the warps of one share the keys."""
    QUANTIZED_HOPPER = ("fmha_fwd_q8_sm90_d64_m192n64_s4_w16_f16_int8",)
    """The same by wgmma."""
    ENGINE = ("",)  # Enum of Python 3.11.2 makes another value of ()
    """No kernel: the cases of tests/library/simt, for defects of the checks themselves."""

    @property
    def names(self) -> tuple[str, ...]:
        """Full kernel names."""
        return tuple(name for name in self.value if name)

    @property
    def is_of_fmha_fwd(self) -> bool:
        """Kernels of the family fmha_fwd, which share its headers."""
        return self.value[0].startswith("fmha_fwd_sm89_")


class Check(Enum):
    """What can find a defect. A failing test counts for the check that its message speaks of."""

    COMPILER = "compiler"  # a static_assert, or the linker
    NUMERICS = "numerics"  # the output against float64
    LSE = "softmax_lse"  # softmax_lse against float64
    IDENTITIES = (
        "identities"  # two runs that must agree, a mask bit for bit, a constant that must come out again
    )
    OUTSIDE = "outside"  # poison around and behind the outputs
    GUARD_PAGES = "guard pages"  # a fault at an unmapped page, in any test
    SCHEDULES = "schedules"  # the same bits in every order of warps and lanes
    RULES = "rules"  # a rule of the host's machine model
    RACES = "races"  # the shadow of shared memory
    BANKS = "bank conflicts"  # counted, and more than designed
    ENGINE = "engine cases"  # tests/library/simt
    HANG = "hang"  # did not end in time
    OTHER = "other"  # any other exception


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect: `old` becomes `new` in a header. `old` must occur there exactly once."""

    name: str
    header: str  # relative to templates/include/sdpa
    old: str
    new: str
    defect: str  # what is wrong then
    kernels: Kernels
    by: Check  # the check that must find it, whichever others do
    observed: bool = False  # built so that plain loads and stores are seen: simt/observed.hpp
    alone: bool = False  # it decides a type or a constant, which no switch can turn on: switches.py

    @property
    def path(self) -> Path:
        return HEADERS / self.header

    def occurrences(self) -> int:
        """How often `old` is in the header; 0 when there is no such header."""
        return self.path.read_text(encoding="utf-8").count(self.old) if self.path.is_file() else 0

    def why_stale(self) -> str | None:
        """Why the defect cannot be put into the headers as they are, or None."""
        if not self.path.is_file():
            return f"there is no header {self.header}"
        found = self.occurrences()
        return None if found == 1 else f"its old text occurs {found} times in {self.header}, not once"
